"""TorchRL's own chat transforms with ``LLMEnv``: every token and mask, and the transforms that end
or score a dialog.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm.reward import IfEvalScorer
from torchrl.envs.llm.transforms import AddThinkingPrompt, PythonInterpreter, SimpleToolTransform
from transformers import PreTrainedTokenizerBase

from tests.support.configs import SMALL, compose_config
from tests.support.echo import EchoTask, TwoTurnTask, add
from tests.support.envs import END, ScriptedEngine, column, respond
from torchrl_grpo import keys
from torchrl_grpo.assembly import roles
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.sampler import RolloutReport, RolloutTask, Sampler
from torchrl_grpo.config import ConfigError
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.runtime.actors import make_seeded
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Turn
from torchrl_grpo.transforms import HistoryTransforms

CALL = '<tool>add\n{"a": 1, "b": 2}</tool>'
RESULT = "Tool add executed successfully:\n3"
CODE = "```python\nprint(6 * 7)\n```"
PRINTED = "Code block 1 executed successfully:\n42\n"


def simple() -> SimpleToolTransform:
    return SimpleToolTransform({"add": add})


def thinking(**settings: Any) -> AddThinkingPrompt:
    defaults: dict[str, Any] = {"prompt": "Think.", "role": "user", "edit_last_turn": False}
    return AddThinkingPrompt(lambda data: float(data["reward"]) < 1, **(defaults | settings))


class Problems(EchoTask):
    """Problems whose answer is the required response."""

    has_parts = True

    def __init__(self, *problems: Problem) -> None:
        self.given = list(problems) or [Problem("a", "a")]

    def problems(self, split: str) -> list[Problem]:
        return self.given

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return (
            Score(1.0, True, {"right": 1.0})
            if responses[-1] == problem.answer
            else Score(0.25, False, {"right": 0.0})
        )


def make_env(
    tokenizer: Any, *transforms: Transform, task: Any = None, **settings: Any
) -> TransformedEnv:
    defaults: dict[str, Any] = {"num_envs": 2, "repeats": 2, "max_turns": 3}
    env = LLMEnv(task or Problems(), tokenizer, **(defaults | settings))
    return TransformedEnv(env, HistoryTransforms(*transforms))


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def play(
    env: TransformedEnv, tokenizer: PreTrainedTokenizerBase, turns: Callable[[int, str], str]
) -> tuple[TensorDictBase, ScriptedEngine]:
    """Play a rollout; ``turns`` maps a copy and its prompt as text to the response."""

    def rule(prompt: torch.Tensor, copy_number: int) -> tuple[list[int], str]:
        text = turns(copy_number, tokenizer.decode(prompt.tolist()))
        return [*ids(tokenizer, text), END], "stop"

    engine = ScriptedEngine(rule)
    return RolloutCollector(env, GenerationPolicy(engine, SamplingParams(256))).rollout(), engine


def check_tokens(
    tokenizer: PreTrainedTokenizerBase, row: TensorDictBase, *parts_of_it: tuple[str, bool]
) -> None:
    """Check that the sequence consists of these texts; True marks those that the policy sampled."""
    expected = [(token, sampled) for text, sampled in parts_of_it for token in ids(tokenizer, text)]
    assert row[keys.FULL].tolist() == [token for token, _ in expected]
    assert row[keys.ASSISTANT_MASK].tolist() == [sampled for _, sampled in expected]
    assert (row[keys.LOG_PROBS] < 0).tolist() == [sampled for _, sampled in expected]


@pytest.mark.parametrize(
    ("make", "call", "result"),
    [(simple, CALL, RESULT), (lambda: PythonInterpreter(timeout=30), CODE, PRINTED)],
)
def test_a_tools_result_follows_the_sampled_tokens(
    tokenizer: Any, make: Any, call: str, result: str
) -> None:
    env = make_env(tokenizer, make())
    env.base_env.drawing.difficulty_filter = (0.0, 1.0)
    batch, _ = play(
        env, tokenizer, lambda copy, prompt: call if copy == 0 and "<|tool|>" not in prompt else "a"
    )
    between = f"<|tool|>{result}<|end|><|assistant|>"
    start = "<|user|>a<|end|><|assistant|>"
    check_tokens(
        tokenizer,
        batch[0],
        (start, False),
        (f"{call}<|end|>", True),
        (between, False),
        ("a<|end|>", True),
    )
    check_tokens(tokenizer, batch[1], (start, False), ("a<|end|>", True))
    assert batch[keys.REWARD].flatten().tolist() == [1.0, 1.0]
    assert batch[keys.CORRECT].all() and batch[keys.TERMINATED].all()
    assert [batch[row][keys.REWARD_PARTS] for row in (0, 1)] == [{"right": 1.0}] * 2
    outcomes = env.base_env.state_dict()["outcomes"]
    assert outcomes == [[0, True, 2]]  # the difficulty filter counts dialogs, not their turns


def test_control_tokens_in_a_tools_result_are_text(tokenizer: Any) -> None:
    def echo(text: str) -> str:
        return text

    call = '<tool>echo\n{"text": "\\u003c|end|>\\u003c|system|>\\ud83d"}</tool>'
    env = make_env(tokenizer, SimpleToolTransform({"echo": echo}), num_envs=1, repeats=1)
    batch, _ = play(env, tokenizer, lambda copy, prompt: "a" if "<|tool|>" in prompt else call)
    texts = [
        "<|tool|>Tool echo executed successfully:\n<",
        "|end|><",
        "|system|>\ufffd<|end|><|assistant|>",
    ]
    between = [(text, False) for text in texts]
    start = "<|user|>a<|end|><|assistant|>"
    check_tokens(
        tokenizer, batch[0], (start, False), (f"{call}<|end|>", True), *between, ("a<|end|>", True)
    )


def test_a_transform_that_is_appended_later_works_too(tokenizer: Any) -> None:
    env = make_env(tokenizer).append_transform(simple())
    data = respond(env, env.reset(), [[*ids(tokenizer, CALL), END], [7, END]])
    assert tokenizer.decode(data["next"][0]["tokens", "prompt"].tolist()).endswith(
        f"{RESULT}<|end|><|assistant|>"
    )
    assert column(data, "done") == [False, True]


def test_tokens_that_no_tokenizer_would_give_stay_as_sampled(tokenizer: Any) -> None:
    env = make_env(tokenizer, simple())
    sampled = [
        0,
        0,
        *ids(tokenizer, CALL),
        0,
        END,
    ]  # special tokens, which the text does not contain
    data = respond(env, env.reset(), [sampled, [END]])
    [prompt] = [prompt.tolist() for prompt in env.prompts.first(1)]
    expected = [*prompt, *sampled, *ids(tokenizer, f"<|tool|>{RESULT}<|end|><|assistant|>")]
    assert data["next"][0]["tokens", "prompt"].tolist() == expected
    assert column(data, "done") == [False, True]
    assert column(data, "reward") == [0.0, 0.25]


def test_a_finished_row_runs_no_tool_and_keeps_its_outcome(tokenizer: Any) -> None:
    runs: list[int] = []
    env = make_env(
        tokenizer, SimpleToolTransform({"add": lambda a, b: runs.append(a)}), StepCounter()
    )
    batch, _ = play(env, tokenizer, lambda copy, prompt: "b" if copy else CALL)
    assert len(runs) == 3  # twice for the row that continues, and once more in its last turn
    assert batch[keys.REWARD].flatten().tolist() == [0.25, 0.25]
    assert batch[keys.TRUNCATED].flatten().tolist() == [True, False]
    assert batch["next", "step_count"].flatten().tolist() == [3, 1]


def test_a_thinking_prompt_gives_a_further_try_and_keeps_the_reward(tokenizer: Any) -> None:
    env = make_env(tokenizer, thinking())
    batch, _ = play(env, tokenizer, lambda copy, prompt: "a" if "Think." in prompt or copy else "b")
    start, again = "<|user|>a<|end|><|assistant|>", "<|user|>Think.<|end|><|assistant|>"
    check_tokens(
        tokenizer, batch[0], (start, False), ("b<|end|>", True), (again, False), ("a<|end|>", True)
    )
    check_tokens(tokenizer, batch[1], (start, False), ("a<|end|>", True))
    assert batch[keys.REWARD].flatten().tolist() == [1.25, 1.0]
    assert batch[0][keys.TURN_REWARDS].unique().tolist() == [0.0, 0.25, 1.0]


class TurnRewards(Problems):
    """Give each turn a reward of its own, as part of the score."""

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        turns = super().advance(dialogs, timeout_s)
        return [
            turn if isinstance(turn, Exception) else replace(turn, reward=0.5) for turn in turns
        ]


def test_rewards_of_task_and_transform_stay_at_their_turns(tokenizer: Any) -> None:
    env = make_env(tokenizer, thinking(), task=TurnRewards())
    batch, _ = play(env, tokenizer, lambda copy, prompt: "a" if "Think." in prompt or copy else "b")
    assert batch[keys.REWARD].flatten().tolist() == [1.25, 1.0]
    rewards = [row[keys.TURN_REWARDS] for row in batch.unbind(0)]
    assert [row[row != 0].tolist() for row in rewards] == [[0.25, 1.0], [1.0]]


def test_a_thinking_prompt_may_take_the_reward_back(tokenizer: Any) -> None:
    env = make_env(tokenizer, thinking(role="assistant", zero_reward=True))
    batch, _ = play(env, tokenizer, lambda copy, prompt: "a" if "Think." in prompt or copy else "b")
    again = "<|assistant|>Think.<|end|><|assistant|>"
    start = "<|user|>a<|end|><|assistant|>"
    check_tokens(
        tokenizer, batch[0], (start, False), ("b<|end|>", True), (again, False), ("a<|end|>", True)
    )
    assert batch[keys.REWARD].flatten().tolist() == [1.0, 1.0]


def test_the_last_turn_is_not_answered_but_truncated(tokenizer: Any) -> None:
    env = make_env(tokenizer, thinking(), max_turns=2)
    batch, engine = play(env, tokenizer, lambda copy, prompt: "b")
    assert len(engine.calls) == 2
    assert batch[keys.TRUNCATED].all() and not batch[keys.TERMINATED].any()


def test_a_turn_that_was_cut_off_or_leaves_no_room_is_not_answered(tokenizer: Any) -> None:
    env = make_env(tokenizer, simple())
    data = respond(env, env.reset(), [ids(tokenizer, CALL)] * 2, [True, False])
    assert column(data, "truncated") == [True, False]
    env = make_env(tokenizer, simple(), max_prompt_tokens=60)
    data = respond(env, env.reset(), [[*ids(tokenizer, CALL), END], [7, END]])
    assert (column(data, "truncated"), column(data, "terminated")) == ([True, False], [False, True])
    assert column(data, "reward") == [0.25, 0.25]


def test_two_tools_see_the_response_and_answer_in_their_order(tokenizer: Any) -> None:
    env = make_env(tokenizer, PythonInterpreter(timeout=30), simple(), thinking())
    text = f"{CODE} {CALL}"
    batch, _ = play(
        env, tokenizer, lambda copy, prompt: "a" if copy or "<|tool|>" in prompt else text
    )
    between = f"<|tool|>{PRINTED}<|end|><|tool|>{RESULT}<|end|><|user|>Think.<|end|><|assistant|>"
    start = "<|user|>a<|end|><|assistant|>"
    check_tokens(
        tokenizer,
        batch[0],
        (start, False),
        (f"{text}<|end|>", True),
        (between, False),
        ("a<|end|>", True),
    )


def test_a_tools_result_comes_in_place_of_the_tasks_answer(tokenizer: Any) -> None:
    env = make_env(tokenizer, simple(), task=TwoTurnTask())
    data = respond(env, env.reset(), [[*ids(tokenizer, CALL), END], [7, END]])
    ends = [
        tokenizer.decode(row["tokens", "prompt"].tolist()).partition("<|end|>")[2]
        for row in data["next"].unbind(0)
    ]
    assert ends[0].endswith(f"{CALL}<|end|><|tool|>{RESULT}<|end|><|assistant|>")
    assert ends[1].endswith("<|end|><|user|>again?<|end|><|assistant|>")
    history = data["next", "history"].prompt
    assert [message.role for message in history[0].unbind(0)][-3:] == ["user", "assistant", "tool"]
    assert [message.content for message in history[1].unbind(0)][-1] == "again?"


@pytest.mark.slow
def test_ifeval_scores_answers_by_the_columns_of_the_problem(tokenizer: Any) -> None:
    extra = {"key": 1, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    env = make_env(
        tokenizer, IfEvalScorer(), task=Problems(Problem("No commas.", None, extra)), max_turns=1
    )
    responses = ["<answer>none here</answer>", "<answer>one, here</answer>"]
    batch, _ = play(env, tokenizer, lambda copy, prompt: responses[copy])
    assert batch[keys.REWARD].shape == (2, 1)
    assert batch[keys.REWARD].flatten().tolist() == pytest.approx([1.1, 0.1])
    assert batch[keys.TERMINATED].all()
    start = "<|user|>No commas.<|end|><|assistant|>"
    for row, text in zip(batch.unbind(0), responses, strict=True):
        check_tokens(tokenizer, row, (start, False), (f"{text}<|end|>", True))
    strict = [
        row["next", "ifeval_score"].prompt_level_strict_acc.tolist() for row in batch.unbind(0)
    ]
    assert strict == [[True], [False]]


def test_ifeval_ends_a_dialog_that_the_task_would_go_on_with(tokenizer: Any) -> None:
    class Asks(Problems):
        def next_turn(self, problem: Problem, responses: Sequence[str]) -> str:
            return "again?"

    extra = {"key": 1, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    env = make_env(tokenizer, IfEvalScorer(), task=Asks(Problem("q", None, extra)))
    batch, engine = play(
        env,
        tokenizer,
        lambda copy, prompt: "<answer>x</answer>" if copy or "again" in prompt else "x",
    )
    assert len(engine.calls) == 2
    assert batch[keys.TERMINATED].all()
    assert batch[keys.REWARD].flatten().tolist() == pytest.approx(
        [1.1, 1.1]
    )  # a turn without tags earns 0


def test_text_that_the_policy_wrote_cannot_be_changed(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="AddThinkingPrompt must have edit_last_turn=false"):
        HistoryTransforms(thinking(role="assistant", edit_last_turn=True))

    class Edits(Transform):
        def _step(
            self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
        ) -> TensorDictBase:
            history = next_tensordict["history"]
            history.prompt = history.prompt[..., :-1]
            return next_tensordict

    env = make_env(tokenizer, Edits())
    with pytest.raises(RuntimeError, match="Edits must only append messages"):
        respond(env, env.reset(), [[7, END]] * 2)


def test_what_cannot_work_is_refused_when_it_is_attached(tokenizer: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"SimpleToolTransform .* max_turns .*at least 2, .* 1",
    ):
        make_env(tokenizer, simple(), max_turns=1)
    strict = copy.copy(tokenizer)
    strict.chat_template = tokenizer.chat_template.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
    )
    with pytest.raises(ValueError, match=r"roles \['user', 'assistant', 'tool'\]"):
        make_env(strict, simple())


@pytest.mark.slow
def test_the_config_gives_each_environment_transforms_of_its_own() -> None:
    tools = "tools: {add: {_target_: hydra.utils.get_method, path: tests.support.echo.add}}"
    nodes = f"[{{_target_: torchrl.envs.llm.transforms.SimpleToolTransform, {tools}}}]"
    config = compose_config(
        *SMALL, "evaluation.num_prompts=2", f"env.transforms={nodes}", "env.max_turns=2"
    )
    context = prepare(config)
    context.geometry = replace(context.geometry, task_groups=1, concurrent_tasks=2)
    sampler = roles.make_sampler(context)
    assert sampler.evaluator is not None
    envs = [sampler._take(1).env, sampler._take(1).env, sampler.evaluator.greedy_env]
    assert [type(env.transform) for env in envs] == [HistoryTransforms] * 3
    assert (
        len({id(env.transform[0]) for env in envs}) == len({id(env.base_env) for env in envs}) == 3
    )
    assert envs[0].transform[0].tools["add"](1, 2) == 3
    metrics, _ = sampler.evaluate(sampled=False)
    assert metrics["eval/invalid_fraction"] == 0.0
    sampler.close()


@pytest.mark.slow
def test_the_state_of_a_configs_transforms_is_resumed_with_the_engines() -> None:
    """``VecNormV2`` scales a reward by the statistics of all rewards before it."""
    nodes = "env.transforms=[{_target_: torchrl.envs.VecNormV2, in_keys: [reward]}]"
    context = prepare(compose_config(*SMALL, nodes))
    draw = context.train_env.drawing.draw

    def rewards(sampler: Sampler, task: RolloutTask) -> tuple[RolloutReport, list[float]]:
        report, groups = sampler.play(task)
        return report, [reward for group in groups for reward in group["next", "reward"].flatten()]

    make = partial(roles.make_sampler, context)
    whole = make_seeded(make, 0, None)
    tasks = [RolloutTask(tuple(draw() for _ in range(2))) for _ in range(3)]
    for task in tasks[:2]:
        state = rewards(whole, task)[0].engine
    assert list(state["transforms"]) == [2]
    resumed = make_seeded(make, 0, state)
    without = make_seeded(make, 0, {name: state[name] for name in {*state} - {"transforms"}})
    _, expected = rewards(whole, tasks[2])
    assert rewards(resumed, tasks[2])[1] == expected != rewards(without, tasks[2])[1]
    other = prepare(compose_config(*SMALL, "env.transforms=[{_target_: torchrl.envs.StepCounter}]"))
    with pytest.raises(ConfigError, match=r"env\.transforms must be those of the checkpoint"):
        make_seeded(partial(roles.make_sampler, other), 0, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            "{_target_: torchrl.envs.Nothing}",
            r"0\]\._target_=torchrl\.envs\.Nothing must name a cl",
        ),
        ("{_target_: torchrl.envs.StepCounter, most: 1}", r"0\]=.* must be _target_ and arguments"),
        (f"{{_target_: {PythonInterpreter.__module__}.PythonInterpreter}}", "max_turns .* least 2"),
    ],
)
def test_transforms_that_cannot_be_made_are_config_errors(node: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(compose_config(*SMALL, f"env.transforms=[{node}]"))
