"""reasoning-gym's data sets: over 100 generators of problems, each with its own scorer
(arXiv:2505.24760).

A hash of the question decides a problem's split, so no question is ever in both.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torchrl_grpo.tasks.base import Message, Problem, Score, Split, Task
from torchrl_grpo.tasks.fields import fill_template
from torchrl_grpo.tasks.generated import split_by_hash

_DRAWS_PER_SEED = 2**20
"""The library draws problem i of seed s with the seed s + i, so one of our seeds is a range of its
seeds.
"""
_TRAIN_SAMPLES = 1000
_TRAIN_PER_TEST = 4
_DRAWS_PER_PROBLEM = 20
EVALUATED = frozenset({
    "binary_matrix", (
        "countdown"
    ), "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Data sets whose scorers evaluate an answer as Python, by ``eval`` or by sympy's parser, which
uses it.
"""
_CALL = re.compile(r"(\w+|[)\]}'\"])\s*\(")
_MATH_FUNCTIONS = frozenset({
    "abs", "acos", (
        "acosh"
    ), "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "erf", "exp", "ln", "log",
    "sec", "sin", "sinh", "sqrt", "tan", "tanh",
})  # fmt: skip
_CODE = re.compile(r"__|\blambda\b|\.\s*[^\W\d]|[@#\\]")
_OWN = ("seed", "levels")
_OURS = ("size",)


class ReasoningGymTask(Task):
    """Problems of one of reasoning-gym's data sets, scored by the data set's scorer.

    The scorer gets the text in the last ``<answer>`` tag, which the library's system prompt asks
    for; with a ``system_prompt`` that does not name the tag, it gets the whole response. Its score
    is the reward, and 1 is correct. An exception in the scorer makes the sequence invalid. Some
    scorers run the answer as Python: for them, an answer that calls other than mathematical
    functions counts as no answer.

    Args:
        dataset: name of the data set, such as ``chain_sum``.

    Keyword Args:
        options: options of the data set's own configuration. Two are ours: ``seed`` (0), and
            ``levels``, difficulty levels of the data set's curriculum, each with an equal share of
            the problems, easiest first.
        max_samples: number of train problems, with a quarter as many test problems; fewer if the
            data set has fewer different ones.
        prompt_template: the user message, with ``question`` and the metadata as columns; by default
            the question.
        system_prompt: by default the library's.
        field: prefix of the options in messages.

    Raises:
        ValueError: the library is not installed, has no such data set, or the data set refuses the
            options.

    >>> task = ReasoningGymTask("chain_sum", options={"max_digits": 1})  # doctest: +SKIP
    >>> task.problems("train")[0].query  # doctest: +SKIP
    'State the final answer to the following arithmetic problem: 2 + 9 - 5 ='
    """

    reward = None

    def __init__(
        self,
        dataset: str,
        *,
        options: Mapping[str, Any] | None = None,
        max_samples: int | None = None,
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        field: str = "env",
    ) -> None:
        self.name = dataset
        self.max_samples = _TRAIN_SAMPLES if max_samples is None else max_samples
        self.prompt_template = prompt_template
        self.field = field
        self._options = dict(options or {})
        self._seed = self._options.pop("seed", 0)
        self._levels = self._options.pop("levels", None)
        gym = _library(field, dataset)
        self.system_prompt = (
            gym.utils.SYSTEM_PROMPTS["default"] if system_prompt is None else system_prompt
        )
        self._in_tag = "<answer>" in self.system_prompt
        self._check(gym)
        self._configs = self._make_configs(gym)
        self._problems: dict[Split, list[Problem]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without problems and scorer; each process makes its own scorer."""
        return {name: value for name, value in self.__dict__.items() if name != "_scorer"} | {
            "_problems": {}
        }

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the split's problems, all different, level by level.

        Raises:
            ValueError: the data set cannot generate problems with these options.
        """
        if split not in self._problems:
            size = self.max_samples if split == "train" else -(-self.max_samples // _TRAIN_PER_TEST)
            levels = len(self._configs)
            by_question: dict[str, Problem] = {}
            for number, (level, config) in enumerate(self._configs):
                count = size * (number + 1) // levels - size * number // levels
                self._draw(split, count, level, config, by_question)
            self._problems[split] = list(by_question.values())
            if not self._problems[split]:
                raise ValueError(
                    f"{self.field}.dataset=reasoning_gym:{self.name} must have different questions "
                    f"for both splits, but none is in the split {split}: use options that allow "
                    "more."
                )
        return self._problems[split]

    def messages(self, problem: Problem) -> list[Message]:
        """Return the system prompt, if it is not empty, and the question, in the template if there
        is one.
        """
        content = problem.query
        if self.prompt_template is not None:
            content = fill_template(
                self.prompt_template, problem.extra["metadata"] | {"question": problem.query}
            )
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": content}]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Return the data set's score of the last response's answer."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(responses[-1]) if self._in_tag else responses[-1].strip()
        if answer is not None and self.name in EVALUATED and not is_harmless(answer):
            answer = None
        reward = float(self._scorer.score_answer(answer, problem.extra))
        return Score(reward, correct=reward >= 1.0)

    @cached_property
    def _scorer(self) -> Any:
        """Create the data set, because some scorers need the data that it reads on creation."""
        import reasoning_gym

        return reasoning_gym.factory.DATASETS[self.name][0](self._configs[0][1])

    def _draw(
        self,
        split: Split,
        size: int,
        level: int | None,
        config: Any,
        by_question: dict[str, Problem],
    ) -> None:
        """Add ``size`` problems of a level to ``by_question``, or fewer if the level has fewer new
        ones.
        """
        import reasoning_gym

        draws = _DRAWS_PER_PROBLEM * max(size, 10)
        dataset = reasoning_gym.factory.DATASETS[self.name][0](
            dataclasses.replace(config, size=draws)
        )
        total = len(by_question) + size
        for index in range(draws):
            if len(by_question) == total:
                break
            try:
                entry = dataset[index]
            except Exception as error:
                raise ValueError(
                    f"{self.field}.dataset=reasoning_gym:{self.name} could not generate problem "
                    f"{index} with {self._all_options} ({type(error).__name__}: {error}): use "
                    "other options."
                ) from error
            question = entry["question"]
            if split_by_hash(question) == split and question not in by_question:
                extra = dict(entry) if level is None else entry | {"level": level}
                by_question[question] = Problem(question, entry["answer"], extra)

    def _make_configs(self, gym: Any) -> list[tuple[int | None, Any]]:
        """Return the data set's configuration, one for each requested level."""
        seed = _DRAWS_PER_SEED * self._seed
        config_class = gym.factory.DATASETS[self.name][1]
        try:
            if self._levels is None:
                configs = [(None, config_class(**self._options))]
            else:
                configs = [(level, self._at_level(gym, level)) for level in self._levels]
            for _, config in configs:
                if hasattr(config, "validate"):
                    config.validate()
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.field}.dataset_options={self._all_options} must be options of "
                f"reasoning_gym:{self.name} ({error}): use some of "
                f"{self._option_names(config_class)}."
            ) from error
        return [(level, dataclasses.replace(config, seed=seed)) for level, config in configs]

    def _at_level(self, gym: Any, level: int) -> Any:
        curriculum = gym.factory.create_curriculum(self.name)
        curriculum.set_global_level(level)
        return curriculum.generate_configuration(dict(self._options))

    def _check(self, gym: Any) -> None:
        names = self._option_names(gym.factory.DATASETS[self.name][1])
        key = f"{self.field}.dataset_options"
        for name in self._options:
            if name not in names or name in _OURS:
                close = difflib.get_close_matches(name, names, 1)
                use = close[0] if close else f"one of {names}"
                if name in _OURS:
                    use = f"{self.field}.max_samples"
                raise ValueError(
                    f"{key}.{name} must be an option of reasoning_gym:{self.name}: use {use}."
                )
        if not isinstance(self._seed, int) or isinstance(self._seed, bool) or self._seed < 0:
            raise ValueError(
                f"{key}.seed={self._seed} must be an integer of at least 0: for example, 0."
            )
        if self._levels is None:
            return
        if self.name not in gym.factory.CURRICULA:
            raise ValueError(
                f"{key}.levels={self._levels} must be left out, because reasoning_gym:{self.name} "
                "has no levels: remove it."
            )
        curriculum = gym.factory.create_curriculum(self.name)
        num_levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
        levels = self._levels
        entries = levels if isinstance(levels, list) else [None]
        in_range = all(type(level) is int and 0 <= level < num_levels for level in entries)
        if not in_range or not levels or sorted(set(levels)) != levels:
            raise ValueError(
                f"{key}.levels={levels} must be increasing integers from 0 to {num_levels - 1}: for "
                "example, [0,1,2]."
            )
        set_by_level = {
            name
            for attribute in curriculum.attributes.values()
            for name in (
                getattr(attribute, kind, None)
                for kind in ("field_name", "lower_field_name", "upper_field_name")
            )
        }
        for name in self._options:
            if name in set_by_level:
                raise ValueError(f"{key}.{name} must be left out with {key}.levels, which set it.")

    def _option_names(self, config_class: Any) -> list[str]:
        options = [
            item.name
            for item in dataclasses.fields(config_class)
            if item.name not in (*_OWN, *_OURS)
        ]
        return sorted([*options, *_OWN])

    @property
    def _all_options(self) -> dict[str, Any]:
        return self._options | ({} if self._levels is None else {"levels": self._levels})


def is_harmless(answer: str) -> bool:
    """Return whether evaluating an answer as Python calls only mathematical functions and reads no
    attributes.

    >>> is_harmless("(x + 1)*sin(2*x)"), is_harmless("['A', 'B']"), is_harmless("exec(chr(49))")
    (True, True, False)
    """
    calls = {name.lower() for name in _CALL.findall(answer)}
    return calls <= _MATH_FUNCTIONS and not _CODE.search(answer)


def _library(field: str, dataset: str) -> Any:
    """Import reasoning-gym, with the data set registered."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{field}.dataset=reasoning_gym:{dataset} needs reasoning-gym, which is not installed: pip install "
            '"torchrl_grpo[reasoning-gym]".'
        ) from error
    names = sorted(set(reasoning_gym.factory.DATASETS) - {"composite"})
    if dataset == "composite":
        raise ValueError(
            f"{field}.dataset=reasoning_gym:composite must be one of the data sets that it "
            "combines: use env.datasets for several, with weights."
        )
    if dataset not in names:
        close = difflib.get_close_matches(dataset, names, 1)
        use = f"reasoning_gym:{close[0]}" if close else f"one of {', '.join(names)}"
        raise ValueError(
            f"{field}.dataset=reasoning_gym:{dataset} must be one of the {len(names)} data sets of "
            f"the installed reasoning-gym: use {use}."
        )
    return reasoning_gym
