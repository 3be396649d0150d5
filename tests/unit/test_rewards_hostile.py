"""No built-in reward raises for a response, leaves its range or is slow.

Rewards that query a model or run a program have tests of their own.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_grpo.integrations.graders.ifeval_checks import CHECKS
from torchrl_grpo.rewards import BUILTINS

pytest.importorskip("math_verify")
pytest.importorskip("langdetect")

# Each instruction once, with arguments, so that every check reads every text.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "keywords:existence": {"keywords": ["good"]},
    "keywords:frequency": {"keyword": "a", "frequency": 2, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["good"]},
    "keywords:letter_frequency": {"letter": "a", "let_frequency": 2, "let_relation": "at least"},
    "language:response_language": {"language": "en"},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "at least"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 3},
    "length_constraints:number_words": {"num_words": 3, "relation": "at least"},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": 1,
        "nth_paragraph": 1,
        "first_word": "a",
    },
    "detectable_content:number_placeholders": {"num_placeholders": 3},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 3},
    "detectable_format:number_highlighted_sections": {"num_highlights": 3},
    "detectable_format:multiple_sections": {"section_spliter": "SECTION", "num_sections": 3},
    "combination:repeat_prompt": {"prompt_to_repeat": "a"},
    "startend:end_checker": {"end_phrase": "a"},
    "change_case:capital_word_frequency": {"capital_frequency": 3, "capital_relation": "at least"},
}
COLUMNS: dict[str, dict[str, Any]] = {
    "gsm8k": {"answer": "72", "mode": "last_number"},
    "math": {"answer": "72"},
    "countdown": {"nums": [2, 3, 5], "target": 16},
    "ifeval": {
        "instruction_id_list": list(CHECKS),
        "kwargs": [ARGUMENTS.get(name, {}) for name in CHECKS],
    },
}
NAMES = {*COLUMNS, "format", "length", "number", "operations", "structure"}
PATTERNS = (
    *(
        "1 ",
        "9",
        "a",
        " ",
        "\n",
        "(",
        "[",
        "<<",
        "*",
        "***",
        "* a\n",
        "1,",
        "1/",
        ".",
        "a. ",
        "#### ",
        "=",
        "1=1 ",
    ),
    *(
        "\\boxed{",
        "\\frac{",
        "$",
        "<answer>",
        "<answer>1</answer>",
        "answer: 1 ",
        "the answer is ",
        "p.s",
        "SECTION 1",
    ),
    *("\ud800", "é", "漢", "\U0001f600", "\x00", "A@a", "http://", "-", "''", "and "),
)


def load(name: str) -> Callable[..., Any]:
    module, _, function = BUILTINS[name].partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def numbers(result: Any) -> list[float]:
    return [
        float(value)
        for value in (result.values() if isinstance(result, dict) else [result])
        if value is not None
    ]


def test_every_builtin_is_a_function_of_a_response() -> None:
    assert set(BUILTINS) - {"code", "judge", "judge_ranking", "reward_model", "rubric"} == NAMES
    for name in NAMES:
        parameters = inspect.signature(load(name)).parameters
        assert next(iter(parameters)) == "response"
        assert set(COLUMNS.get(name, {})) <= set(parameters)


def in_range(name: str, text: str) -> bool:
    return all(0 <= value <= 1 for value in numbers(load(name)(text, **COLUMNS.get(name, {}))))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_time_of_a_reward_is_linear_in_its_text(name: str) -> None:
    """A quadratic one would take minutes."""
    in_range(name, "72")  # imports and profiles
    size = 20_000 if name == "ifeval" else 200_000
    slow = {}
    for pattern in PATTERNS:
        start = time.process_time()
        assert in_range(name, pattern * (size // len(pattern)))
        if (seconds := time.process_time() - start) > 2:
            slow[pattern] = seconds
    assert slow == {}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_ten_million_characters_make_no_reward_fail(name: str) -> None:
    assert in_range(name, "So 1/2 = 0.5. " * 700_000 + "#### 72")


@pytest.mark.parametrize("name", sorted(NAMES - {"math"}))
@given(text=st.text(max_size=200))
def test_no_text_makes_a_reward_fail(name: str, text: str) -> None:
    assert in_range(name, text)
    assert in_range(name, f"#### {text} = {text} <answer>{text}</answer>")
