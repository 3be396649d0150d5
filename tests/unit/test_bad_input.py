"""Bad input: every key of the schema with invalid values, and keys that contradict each other.

The config alone decides, before anything loads: one ``ConfigError`` names the key and a fix.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from tests.support.configs import compose_config
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.config import ConfigError, check_command_line, from_hydra
from torchrl_grpo.config.schema import COMPONENTS, FIELDS, GRPOConfig
from torchrl_grpo.starter import starter_path

HUGE = int("9" * 400)
NUMBERS = {int, float}


def kinds(name: str) -> set[Any]:
    """Return the types that a key accepts."""
    node: Any = GRPOConfig
    for part in name.split("."):
        node = typing.get_type_hints(node)[part]
    return (
        set(typing.get_args(node))
        if isinstance(node, types.UnionType)
        else {typing.get_origin(node) or node}
    )


def bad_values(name: str) -> Iterator[tuple[str, Any]]:
    """Return invalid values of a key, with the kind of mistake."""
    item = FIELDS[name]
    kind = kinds(name)
    limits = item.metadata.get("limits", {})
    if not kind & {Any, dict}:
        yield "type", {"a": {"b": 1}} if kind & {str} else "nonsense"
    if kind & NUMBERS:
        yield "type", [1]
        yield from (("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf")))
        yield from (("400 digits", HUGE), ("400 digits", -HUGE))
    if "ge" in limits:
        yield "range", limits["ge"] - (1 if int in kind else 1e-6)
    if "gt" in limits:
        yield from (("range", limits["gt"]), ("range", limits["gt"] - 1))
    if "le" in limits:
        yield "range", limits["le"] + (1 if int in kind else 1e-6)
    if "lt" in limits:
        yield "range", limits["lt"]
    if "choices" in item.metadata:
        yield from (
            ("choice", next(iter(item.metadata["choices"]))[:-1] + "x"),
            ("400 digits", HUGE),
        )


def tree(*settings: tuple[str, Any]) -> Any:
    """Return a config of the arithmetic task with some keys set."""
    config = OmegaConf.create({"env": {"dataset": "arithmetic"}})
    for name, value in settings:
        OmegaConf.update(config, name, value, force_add=True)
    return config


VALUES = [(name, kind, value) for name in FIELDS for kind, value in bad_values(name)]


@pytest.mark.slow
@pytest.mark.parametrize("by_day", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_every_key_refuses_what_it_cannot_have_and_says_so(by_day: bool) -> None:
    """NaN stands for what no number may be; the rest comes at night."""
    failed = []
    for name, kind, value in VALUES:
        if by_day == (kind in ("inf", "-inf", "400 digits")):
            continue
        try:
            from_hydra(tree((name, value)))
            failed.append((name, kind, "accepted"))
        except ConfigError as error:
            now = "env.max_turns" if name == "env.max_steps" else name
            message = str(error)
            if (
                not (now in message or name in message)
                or "must" not in message
                or ": " not in message
                or len(message) > 1000
            ):
                failed.append((name, kind, message[:300]))
        except Exception as error:
            failed.append((name, kind, f"{type(error).__name__}: {error}"[:200]))
    assert failed == []


@pytest.mark.slow
def test_a_value_that_a_limit_suggests_is_within_it() -> None:
    for name in (name for name, item in FIELDS.items() if "limits" in item.metadata):
        outside = re.compile(
            rf"{re.escape(name)}=.* must be (at least|above|at most|below) .*: for example, .*=(.*)\."
        )
        match = outside.fullmatch(
            said_to((name, float("nan") if float in kinds(name) else -(2**40)))
        )
        if match is None:  # the key has another name, or a rule of its own
            continue
        try:
            from_hydra(tree((name, yaml.safe_load(match[2]))))
        except ConfigError as error:
            assert not outside.fullmatch(str(error)), error


def test_every_missing_value_is_refused_by_name() -> None:
    message = said_to(("optimizer.lr", "???"), ("env.system_prompt", "???"))
    assert message.startswith("env.system_prompt=???, optimizer.lr=??? must have a value, ")


def said_to(*settings: tuple[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        from_hydra(tree(*settings))
    return str(refused.value)


MISSPELLED = [
    name[:-1] + ("x" if name[-1] != "x" else "y") for name in FIELDS if name not in COMPONENTS
]


@pytest.mark.slow
def test_every_misspelled_key_is_named_with_the_right_one() -> None:
    messages = {name: said_to((name, 1)) for name in MISSPELLED}
    assert [
        name
        for name in MISSPELLED
        if "names a config key that does not exist: " not in messages[name]
    ] == []
    # The few others have no other key with letters like theirs.
    assert sum("did you mean " in text for text in messages.values()) / len(messages) > 0.97


# Keys that contradict each other, and the message, of checks that are not in the table of rules.
PAIRS = {
    "env.num_envs=30": "env.num_envs=30 must be a multiple of env.repeats=8: use 24 or 32",
    "env.num_envs=32 train.dialog_turns_per_batch=40": "=40 must be a multiple of env.num_envs=32: use 32 or 64.",
    "env.num_envs=32 train.optim_batch_size=12": "=12 must divide train.dialog_turns_per_batch=32: use 8 or 16.",
    "env.repeats=1": "env.repeats=1 must be at least 2",
    "policy.advantage_mean=batch policy.advantage_std=batch policy.dynamic_sampling=true env.repeats=1":
        "env.repeats=1 must be at least 2",
    "policy.max_sampling_rounds=1 policy.dynamic_sampling=true env.num_envs=16 train.dialog_turns_per_batch=32":
        "policy.max_sampling_rounds=1 rollouts of 16 trajectories must make up",
    "policy.behaviour_weight=mask": "policy.behaviour_weight=mask needs a proximal policy",
    "policy.advantage_level=token policy.advantage_mean=leave_one_out": "policy.advantage_mean",
    "policy.turn_credit=per_turn policy.advantage_mean=second_best": "policy.advantage_mean",
    "policy.turn_credit=per_turn policy.advantage_mean=length_weighted": "policy.advantage_mean",
    "policy.advantage_level=token policy.advantage_std=group_mean": "policy.advantage_std",
    "policy.advantage_level=token policy.advantage_std=nonzero": "policy.advantage_std",
    "policy.reward_clip=[1.0]": "policy.reward_clip=[1.0] must be a pair",
    "policy.reward_clip=[1.0,-1.0]": "policy.reward_clip=[1.0, -1.0] must be a pair",
    "policy.clip_epsilon=[2,0.1]": "policy.clip_epsilon",
    "policy.clip_epsilon=[0.2]": "policy.clip_epsilon=[0.2] must be a number, or a pair",
    "policy.clip_epsilon=1.5": "policy.clip_epsilon=1.5 must be a number, or a pair",
    # of other values than in test_rules.py
    "env.dataset=gsm8k env.difficulty=3": "env.difficulty=3 must be left out with env.dataset=gsm8k",
    "env.dataset=a.jsonl env.dataset_path=b": "env.dataset_path=b must be left out with env.dataset=a.jsonl",
    "env.task=null": "env.task=null must be verifiers:NAME or a node with _target_",
    f"inference_model.stop=[{'x' * 257}]": "of at most 256 bytes in total",
    "train_model.devices=[]": "must be different indices",
    "train_model.num_devices=most": "must be a whole number of at least 1, or all",
    "train_model.dtype=float16": "precision=bf16",
    "logging.sample_rows=some": "logging.sample_rows=some must be all",
}  # fmt: skip


@pytest.mark.parametrize("keys", PAIRS)
def test_keys_that_contradict_each_other_are_refused(keys: str) -> None:
    settings = [text.partition("=")[::2] for text in keys.split()]
    assert PAIRS[keys] in said_to(*[(name, yaml.safe_load(value)) for name, value in settings])


# These once hung for more than 75 s or ended in a traceback. The config or the check of the command
# line refuses them.
LARGE = {
    "env.num_envs": 10_000_000,
    "evaluation.k": 1_000_000_000,
    "train_model.lora.r": 100_000_000,
    "train.dialog_turns_per_batch": 2**31 - 1,
}


@pytest.mark.parametrize("name", LARGE)
def test_numbers_that_no_machine_can_do_are_refused(name: str) -> None:
    assert said_to((name, LARGE[name])).startswith(f"{name}={LARGE[name]} must be at least")
    assert "at most" in said_to((name, LARGE[name]))


@pytest.mark.parametrize("under", ["", "/deeper"])
def test_a_run_folder_that_is_a_file_is_refused_before_hydra(under: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match=rf"hydra\.run\.dir=.*file{under} must be a folder .*file",
    ):
        check_command_line([f"hydra.run.dir={tmp_path}/file{under}"])
    check_command_line([f"hydra.run.dir={tmp_path}/new/{under}"])


BROKEN_TEMPLATES = {
    "{% for %}": "TemplateSyntaxError: Expected an",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ messages[9].content }}": "UndefinedError: ",
    "{{ messages + 1 }}": "TypeError: ",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: ",
    "{% include 'other' %}": "TypeError: ",
    "{% for i in range(10 ** 9) %}{% endfor %}": "OverflowError: Range too big",
    "{{ raise_exception('no\x1b') }}": r"TemplateError: no\\x1b",
}


@pytest.mark.parametrize("template", BROKEN_TEMPLATES)
def test_a_broken_chat_template_is_one_message(template: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config = compose_config()
        config.model.chat_template = template
        prepare(config)
    message = str(refused.value)
    assert (
        message.startswith("model.chat_template=")
        and "must write a chat with the roles ['user', 'assistant']" in message
    )
    assert BROKEN_TEMPLATES[template] in message and "\n" not in message and "\x1b" not in message
    assert message.endswith("fix it, or leave it out, if it is not the tokenizer's own.")


NO_SYSTEM = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [{"role": role, "content": "1+1=?"} for role in ("user", "system", "user", "assistant")]


@pytest.mark.parametrize(
    "keys",
    [
        "env.system_prompt=Add.",
        "env.columns.messages=chat",
        "algo=sft env.columns.messages=chat",
        "policy.teacher_coef=1 teacher.model=policy teacher.prompt=prompts.py:instructed",
        "env.reward={fn: reward_model, model: judge} env.system_prompt=Add. model.chat_template=null",
    ],
)
def test_a_part_that_a_template_drops_is_refused_before_a_run(
    keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1=?", "answer": str(i + 1), "chat": CHAT} for i in range(20)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("prompts.py").write_text(
        "def instructed(messages):\n    return [{'role': 'system', 'content': 'Add.'}, *messages]\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.save_pretrained("judge")
    own = {"env.dataset": "data.jsonl", "env.reward": "gsm8k", "env.columns.prompt": "question"}
    own |= {"model.chat_template": f'"{NO_SYSTEM}"', "evaluation.num_prompts": "0"}
    own |= dict(word.split("=", 1) for word in re.split(r" (?=\w+[.=])", keys))
    if "env.columns.messages" in own:
        del own["env.columns.prompt"]
    config = compose_config(*(f"{key}={value}" for key, value in own.items()))
    with pytest.raises(ConfigError, match=r"chat.template.* role 'system'"):
        prepare(config)


def test_over_800_bad_inputs_are_tried() -> None:
    assert len(VALUES) + len(MISSPELLED) + len(PAIRS) + len(LARGE) > 800
