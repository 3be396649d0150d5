"""Supervised training: demonstrations as trajectories, their loss, and exact resuming."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.chats import make_chat_tokenizer
from tests.support.configs import compose_config
from tests.support.models import make_tiny_model
from tests.support.runs import at, differences, run, state_of, steps
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.collectors.demonstrations import ChatWriter, Demonstrations, WrittenChat
from torchrl_grpo.config import ConfigError
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.extras.doctor.diagnosis import queries_of
from torchrl_grpo.extras.view.runs import RunView, curves
from torchrl_grpo.generation import TransformersEngine
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import DemonstrationLoss
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.fields import checked_demonstration, first_turn

ROWS = [
    {"question": f"{a}+{b}=?", "solution": f"It is #### {a + b}", "answer": str(a + b)}
    for a in range(10, 20)
    for b in range(20, 24)
]


def write(folder: Path, rows: list[dict]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(*texts: str) -> list[dict[str, str]]:
    """Return a chat of user and assistant in alternation."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(starter_path())


MARKED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{%- if m.role == 'assistant' %}{{- '\n' }}{% generation %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{- m.content }}"
    "{% for call in m.tool_calls %}{{ '\n<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}"
    "{% endfor %}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ '\n' }}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template in the style of Qwen's, with markers around the assistant's turns."""
UNMARKED = re.sub(r"{% (end)?generation %}", "", MARKED)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": "\u00e9\n"}},
}
CHATS = {
    "one turn": turns("1+1?", "It is\n\n2"),
    "two turns": turns("1+1?", "2", "and 1 more?", "3"),
    "thoughts": [
        *turns("1+1?", "2", "and 1 more?", "3"),
        {"role": "user", "content": "and 2 more?"},
        {"role": "assistant", "content": "5", "reasoning_content": "three and two"},
    ],
    "thoughts as text": turns("1+1?", "<think>\none and one\n</think>\n\n2"),
    "calls": [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL, CALL],
            "reasoning_content": "a tool",
        },
        {"role": "tool", "name": "add", "content": "2", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "2"},
    ],
    "two assistants": [*turns("1+1?", "2"), {"role": "assistant", "content": "or 3"}],
}


def chat_tokenizer(template: str = MARKED) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(make_chat_tokenizer("qwen-3"))
    tokenizer.chat_template = template
    return tokenizer


def written(
    tokenizer: PreTrainedTokenizerFast, chat: list[dict], tools: Sequence[dict] = (), **limits: int
) -> WrittenChat:
    first = first_turn(chat)
    writer = ChatWriter(tokenizer, [tokenizer.eos_token_id])
    rest = checked_demonstration(chat[first:], "messages")
    return writer(chat[:first], rest, tools, **limits)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_tokens_and_turns_are_those_of_the_template_itself(template: str, name: str) -> None:
    marked = chat_tokenizer()
    chat = CHATS[name]
    tools = [ADD] if name == "calls" else None
    expected = marked.apply_chat_template(
        chat, tools=tools, return_assistant_tokens_mask=True, return_dict=True
    )
    prompt = marked.apply_chat_template(
        chat[: first_turn(chat)], tools=tools, add_generation_prompt=True, return_dict=True
    )
    got = written(chat_tokenizer(template), chat, tools or ())
    assert got.tokens.tolist() == expected["input_ids"]
    assert got.learned.long().tolist() == expected["assistant_masks"] and got.learned.any()
    assert got.tokens[: got.prompt].tolist() == prompt["input_ids"] and not got.truncated


def test_an_empty_thought_that_the_template_writes_is_learned() -> None:
    """Qwen3's template writes it in the last turn of a chat only."""
    tokenizer = make_chat_tokenizer("qwen-3")
    chat = turns("1+1?", "2", "and 1 more?", "3")
    got = written(tokenizer, chat)
    assert tokenizer.decode(got.tokens) == tokenizer.apply_chat_template(chat, tokenize=False)
    end = "<|im_end|>\n"
    assert tokenizer.decode(got.tokens[got.learned]) == f"2{end}<think>\n\n</think>\n\n3{end}"


def test_a_thought_that_the_prompt_begins_is_not_begun_again() -> None:
    tokenizer = chat_tokenizer(
        UNMARKED.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    )
    got = written(tokenizer, CHATS["thoughts as text"])
    assert tokenizer.decode(got.tokens).count("<think>") == 1
    assert tokenizer.decode(got.tokens[got.learned]) == "one and one\n</think>\n\n2<|im_end|>\n"
    with pytest.raises(
        ValueError, match=r"model\.chat_template.*'<think>.*env\.chat_template_kwargs"
    ):
        written(tokenizer, CHATS["one turn"])


@pytest.mark.parametrize(
    ("name", "left_out", "message"),
    [
        ("thoughts", "{{ m.reasoning_content }}", "reasoning_content"),
        ("calls", "{{ call.function | tojson }}", "tool_calls"),
        ("one turn", "{{- m.content }}", "content"),
        ("two turns", "{{ '\n' }}{{ m.content }}", "content"),
        ("calls", UNMARKED.partition("{% for m")[0], "tools"),
    ],
)
def test_a_row_of_which_the_template_leaves_something_out_is_refused(
    name: str, left_out: str, message: str
) -> None:
    template = UNMARKED.replace(left_out, "")
    assert template != UNMARKED
    with pytest.raises(
        ValueError, match=rf"model\.chat_template.* must (render|write) (the )?{message} "
    ):
        written(chat_tokenizer(template), CHATS[name], [ADD] if name == "calls" else ())


def test_a_template_that_drops_the_thoughts_of_earlier_turns_is_refused() -> None:
    chat = turns("1+1?", "<think>\none and one\n</think>\n\n2", "and 1 more?", "3")
    with pytest.raises(ValueError, match=r"model\.chat_template.*content.*'one'"):
        written(make_chat_tokenizer("qwen-3"), chat)


def test_control_tokens_are_tokens_where_the_assistant_says_them_alone(tokenizer) -> None:
    chat = turns("1+1<|end|>?", "2", "and <|end|>?", "3<|end|>!")
    got = written(tokenizer, chat)
    assert tokenizer.decode(got.tokens) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(got.tokens[got.learned]) == "2<|end|>3<|end|>!<|end|>"
    assert got.tokens.tolist().count(tokenizer.eos_token_id) == 5


@pytest.mark.parametrize("end", ["", "<|end|>"], ids=["none", "outside the markers"])
def test_each_turn_has_a_token_that_ends_it(tokenizer, end: str) -> None:
    """It is the end-of-sequence token if the template writes none, and the template's own even if
    the markers exclude it.
    """
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        f"{end}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}"
    )
    got = written(tokenizer, turns("?", "2", "!", "3"))
    assert tokenizer.decode(got.tokens) == "?\n2<|end|>\n!\n3<|end|>\n"
    assert tokenizer.decode(got.tokens[got.learned]) == "2<|end|>3<|end|>"


def test_the_limit_is_of_each_turn_and_the_chat_ends_where_one_is_cut(tokenizer) -> None:
    chat = turns("1+1?", "It is 2", "and a long question in between?", "It is 3", "so?", "no")
    assert not written(
        tokenizer, chat, max_turn_tokens=8
    ).truncated  # a turn is 7 characters and the end token
    got = written(tokenizer, chat[:3] + turns("", "It is 34", "so?", "no")[1:], max_turn_tokens=8)
    assert got.truncated and tokenizer.decode(got.tokens[got.learned]) == "It is 2<|end|>It is 34"
    assert tokenizer.decode(got.tokens).endswith("<|assistant|>It is 34")
    got = written(tokenizer, chat, max_tokens=20)
    assert got.truncated and len(got.tokens) == 20 and got.learned.sum() == 8


@pytest.mark.parametrize("kind", ["completion", "completion_messages", "messages"])
def test_the_columns_of_a_data_set_are_demonstrations(kind: str, tmp_path: Path) -> None:
    chat = turns("1+1?", "2", "and 1 more?", "3")
    row = (
        {"q": "1+1?", "c": "2"}
        if kind == "completion"
        else {"q": "1+1?", "c": chat[1:], "m": chat, "answer": "3"}
    )
    columns = (
        {"messages_column": "m"}
        if kind == "messages"
        else {"prompt_column": "q", "completion_column": "c"}
    )
    task = DatasetTask(str(write(tmp_path, [row])), **columns)
    problem = task.problems("train")[0]
    assert (problem.query, task.messages(problem)) == ("1+1?", chat[:1])
    assert task.demonstration(problem) == (chat[1:2] if kind == "completion" else chat[1:])


COMPLETION = {"completion_column": "c"}
MESSAGES = {"messages_column": "c", "prompt_column": None}
NAMELESS = {"role": "assistant", "content": None, "tool_calls": [{"name": None}]}


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"c": None}, COMPLETION, r"data\.jsonl:1 .* text in the column 'c'"),
        ({"c": turns("no")}, COMPLETION, r":1 .* the assistant's reply .* the column 'c'"),
        ({"c": ["no"]}, COMPLETION, r":1 .* chat messages in the column 'c'.*'no'"),
        ({"c": [NAMELESS]}, COMPLETION, r":1 .* the column 'c'.*tool_calls that name functions"),
        ({"c": turns("1+1?")}, MESSAGES, r":1 .*ending with a message of the assistant"),
        ({"c": turns("?", "2", "?")}, MESSAGES, r":1 .*ending with a message of the assistant"),
        ({"c": "2"}, {"completion_column": "d"}, r"columns\.completion=d must be a column"),
        ({"c": "2"}, MESSAGES | {"messages_column": "d"}, r"columns\.messages=d must be a column"),
    ],
)
def test_a_row_without_a_demonstration_is_named(
    row: dict, columns: dict, message: str, tmp_path: Path
) -> None:
    task = DatasetTask(
        str(write(tmp_path, [{"q": "1+1?", **row}])), **({"prompt_column": "q"} | columns)
    )
    with pytest.raises(ValueError, match=message):
        task.problems("train")


def demonstrations(path: Path, max_turn_tokens: int = 100, **columns: str) -> TensorDictBase:
    """Return all rows of a data set in the trainer's format, with an advantage of 1."""
    task = DatasetTask(
        str(path), **(columns or {"completion_column": "solution", "answer_column": "answer"})
    )
    env = LLMEnv(task, AutoTokenizer.from_pretrained(starter_path()), num_envs=1, repeats=1)
    source = Demonstrations(env, TransformersEngine(make_tiny_model()), [1], max_turn_tokens)
    batch = source.rollout([env.drawing.again(i, i) for i in range(env.num_problems)])
    for row in batch.unbind(0):
        row.set(keys.ADVANTAGE, row[keys.REWARD])
    return batch


def test_the_loss_and_gradient_are_those_of_a_plain_cross_entropy(tmp_path: Path) -> None:
    """In float64, over demonstrations of different lengths: the mean over all tokens of the
    assistant.
    """
    rows = [{**row, "solution": row["solution"] * (1 + i % 3)} for i, row in enumerate(ROWS[:5])]
    batch = demonstrations(write(tmp_path, rows))
    model = make_tiny_model().double()
    loss = DemonstrationLoss(TokenScorer(model), aggregation="token_mean")
    out = loss(batch)
    out["loss_objective"].backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    parts = []
    count = 0
    for row in batch.unbind(0):
        labels = torch.where(row[keys.ASSISTANT_MASK], row[keys.FULL], -100)[1:]
        logits = model(input_ids=row[keys.FULL][None]).logits[0, :-1]
        parts.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels >= 0).sum())
    expected = sum(parts) / count
    expected.backward()
    torch.testing.assert_close(out["loss_objective"].detach(), expected.detach(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-7)
    assert (
        out["ratio_mean"],
        out["ESS"],
        out["kl_k3_to_inference"],
        out["clip_fraction_high"],
    ) == (1, 1, 0, 0)
    torch.testing.assert_close(out["objective"], -expected.detach(), rtol=1e-6, atol=0)


def test_samples_show_the_turns_that_are_learned_as_far_as_they_are(tmp_path: Path) -> None:
    chat = turns("17+7=?", "#### 24", "24+7=?", "#### 31", "31+7=?", "#### 38")
    path = write(
        tmp_path, [{"m": chat}, {"m": [*chat[:3], *turns("", "#### 313233", "?", "no")[1:]]}]
    )
    whole, cut = demonstrations(path, max_turn_tokens=8, messages_column="m").unbind(0)
    assert whole[keys.ASSISTANT_MASK].sum() == 24 and not whole[keys.TRUNCATED]
    assert whole[keys.RESPONSE_TEXT] == "#### 24\n[user] 24+7=?\n#### 31\n[user] 31+7=?\n#### 38"
    assert cut[keys.RESPONSE_TEXT] == "#### 24\n[user] 24+7=?\n#### 313"
    assert cut[keys.TRUNCATED] and not cut[keys.TERMINATED]
    assert (
        whole[keys.FULL].tolist() == torch.cat([whole[keys.PROMPT], whole[keys.RESPONSE]]).tolist()
    )


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD]), None], ids=["list", "json", "none"])
def test_tools_of_a_row_are_in_its_prompt(tools: list[dict] | str | None, tmp_path: Path) -> None:
    path = write(tmp_path, [{"m": turns("1+1?", "2"), "tools": tools}])
    [row] = demonstrations(path, messages_column="m").unbind(0)
    text = AutoTokenizer.from_pretrained(starter_path()).decode(row[keys.PROMPT])
    assert (
        text == f"{'<|system|>tools: add<|end|>' if tools else ''}<|user|>1+1?<|end|><|assistant|>"
    )


@pytest.mark.parametrize("tools", ["add", ["add"], [{"function": {}}], 5])
def test_a_row_with_something_else_as_tools_is_named(tools: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        [{"m": turns("1+1?", "2"), "tools": [ADD]}, {"m": turns("1+1?", "2"), "tools": tools}],
    )
    with pytest.raises(ValueError, match=r"data\.jsonl:2 .*column 'tools'"):
        DatasetTask(str(path), messages_column="m").problems("train")


def test_a_row_that_the_template_drops_is_refused_before_loading(
    tmp_path: Path,
) -> None:
    chat = turns("1+1?", "2")
    thinking = [chat[0], {**chat[1], "reasoning_content": "one and one"}]
    path = write(tmp_path, [{"m": chat}, {"m": [{**chat[0], "content": "2+2?"}, thinking[1]]}])
    data = (f"env.dataset={path}", "env.columns.messages=m", "algo=sft", "evaluation.num_prompts=0")
    with pytest.raises(ConfigError, match=r"'2\+2\?': model\.chat_template.*reasoning_content"):
        prepare(compose_config(*data, "env.num_envs=2", "env.repeats=1"))


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_the_loss_is_that_of_trls_sft_trainer_on_the_same_rows(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    path = write(tmp_path, ROWS[:8])
    batch = demonstrations(path)
    model = make_tiny_model()
    expected = DemonstrationLoss(TokenScorer(model), aggregation="token_mean")(batch)[
        "loss_objective"
    ].item()
    rows = [
        {"prompt": turns(row["question"]), "completion": turns("", row["solution"])[1:]}
        for row in ROWS[:8]
    ]
    arguments = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=8,
        max_steps=1,
        learning_rate=0.0,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [20, 10_000])
@pytest.mark.parametrize("optim_batch_size", [8, 4])
def test_demonstrations_beside_a_step_add_their_weighted_loss(
    micro_batch_tokens: int, optim_batch_size: int, tmp_path: Path
) -> None:
    """Loss and gradient are those of GRPO plus 0.3 of the supervised ones, each computed
    separately.

    Everything is in float64 except the norms of the model, which are float32.
    """
    sampled = make_batch(repeats=4).exclude(keys.REWARD_VALID)
    rows = [{**row, "solution": row["solution"] * (1 + 2 * i)} for i, row in enumerate(ROWS[:2])]
    examples = demonstrations(write(tmp_path, rows))
    with_examples = sampled.clone()
    for number, row in enumerate(with_examples.unbind(0)):
        example = examples[number // 4]
        own = slice(0, 0) if number % 4 else slice(None)  # the first of each group has it
        row.set(keys.DEMONSTRATION, example[keys.FULL][own])
        row.set(keys.DEMONSTRATION_MASK, example[keys.ASSISTANT_MASK][own])
    settings = {
        "optim_batch_size": optim_batch_size,
        "micro_batch_tokens": micro_batch_tokens,
        "clip_grad_norm": math.inf,
    }
    metrics = []
    for coefficient, batch in ((0.3, with_examples), (0.0, sampled)):
        model = make_tiny_model().double()
        trainer = make_trainer(
            model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **settings
        )
        trainer.loss.sft_coeff = coefficient
        gradients = dict[str, Tensor]()
        trainer.optimizer.register_step_pre_hook(
            lambda *_, of=model, into=gradients: add_gradients(of, into)
        )
        metrics.append(
            (trainer.train_batch(batch), gradients, trainer.scores.of(4), trainer.scores.of(8))
        )
    (got, actual, scores, none), (alone, expected, of_alone, _) = metrics
    model = make_tiny_model().double()
    parts = [examples] if optim_batch_size == 8 else [examples[:1], examples[1:]]
    losses = [
        DemonstrationLoss(TokenScorer(model), aggregation="token_mean")(part)["loss_objective"]
        for part in parts
    ]
    torch.stack(losses).sum().backward()
    supervised = 0.3 * torch.stack(losses).mean().item()
    assert supervised > 1
    assert got["train/loss_sft"] == pytest.approx(supervised, rel=1e-6)
    assert got["train/loss"] == pytest.approx(alone["train/loss"] + supervised, rel=1e-6)
    own = {
        "train/loss",
        "train/loss_sft",
        "train/grad_norm",
        "train/token_efficiency",
        "train/micro_batches",
    }
    assert {name: got[name] for name in got.keys() - own} == pytest.approx(
        {name: alone[name] for name in alone.keys() - own}, rel=1e-6, abs=1e-9, nan_ok=True
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            actual[name], expected[name] + 0.3 * parameter.grad, rtol=1e-4, atol=1e-7
        )
    torch.testing.assert_close(scores["trainer"][: len(of_alone["trainer"])], of_alone["trainer"])
    assert none == {}  # a demonstration is not a sample


def add_gradients(model: torch.nn.Module, into: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        into[name] = into.get(name, 0) + parameter.grad


def test_a_bad_demonstration_is_named_and_one_alone_makes_no_step(tmp_path: Path) -> None:
    example = demonstrations(write(tmp_path, ROWS[:1]))[0]
    batch = make_batch()
    batch.set(keys.DEMONSTRATION, example[keys.FULL].expand(8, -1).contiguous())
    batch.set(keys.DEMONSTRATION_MASK, example[keys.ASSISTANT_MASK].expand(8, -1).contiguous())
    for number, row in enumerate(batch.unbind(0)):
        row.set(keys.QUERY, NonTensorData(f"question {number}"))
    assert queries_of(batch) == [f"question {number}" for number in range(8)] * 2
    trainer = make_trainer()
    trainer.loss.sft_coeff = 1.0
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    batch.set(keys.REWARD_VALID, torch.zeros(8, 1, dtype=torch.bool))
    assert trainer.train_batch(batch)["train/skipped_steps"] == 1
    assert all(map(torch.equal, before, trainer.parameters))
    with pytest.raises(KeyError, match=r"demonstration\.full.* Demonstrations\.give"):
        trainer.train_batch(make_batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["algo=sft", pytest.param("policy.sft_coef=0.5", marks=pytest.mark.nightly)]
)
def test_a_run_learns_evaluates_and_goes_on_as_if_it_had_not_stopped(
    kind: str, tmp_path: Path
) -> None:
    path = write(tmp_path, ROWS)
    data = (
        *(
            f"env.dataset={path}",
            "env.columns.completion=solution",
            "env.columns.answer=answer",
            "env.reward=gsm8k",
        ),
        *("env.test_fraction=0.2", "evaluation.num_prompts=8", kind, "env.difficulty=2"),
    )
    beside = kind != "algo=sft"
    rows = run(tmp_path / "whole", *data, steps(4))
    loss = "train/loss_sft" if beside else "train/loss"
    assert [row[loss] for row in rows if row["step"]][-1] < 0.5 * rows[1][loss]
    assert rows[1]["rollout/sequences"] == 16
    of_rewards = {
        "rollout/reward_mean",
        "rollout/accuracy",
        "rollout/advantage_std",
        "rollout/zero_variance_groups",
    }
    assert of_rewards & {*rows[1]} == (of_rewards if beside else set())
    titles = re.findall(
        r"<figcaption>(.*?)<", (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    )
    assert titles[:2] == ["Reward" if beside else "Loss", "Accuracy"]
    assert rows[-1]["eval/pass@1"] >= rows[0]["eval/pass@1"]
    first = next(
        row for row in read_jsonl(tmp_path / "whole" / "samples.jsonl") if row["split"] == "train"
    )
    assert beside or (
        first["response"].startswith("It is #### ") and first["finish_reason"] == "stop"
    )
    assert beside == ("reward" in first) == ("advantage" in first)
    assert first["query"] in first["prompt"] and first["prompt"] != first["query"]
    run(tmp_path / "half", *data, steps(2))
    again = run(tmp_path / "rest", *data, steps(4), f"train.resume={tmp_path / 'half'}")
    named = ("step", loss, "train/loss", "train/grad_norm", "rollout/tokens")
    both = [
        [[row[name] for name in named] for row in some if row["step"] > 2] for some in (again, rows)
    ]
    assert both[0] == both[1] and len(both[0]) == 2
    assert (
        differences(state_of(at(tmp_path / "whole", 4)), state_of(at(tmp_path / "rest", 4))) == []
    )


def test_curves_of_several_runs_have_the_loss_of_demonstrations_alone(tmp_path: Path) -> None:
    kinds = {"shown": {}, "sampled": {"rollout/reward_mean": 0.5}}
    for name, more in kinds.items():
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "rollout/sequences": 8, "train/loss": 0.25, **more} for step in (1, 2)
        ]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    views = {number: RunView(tmp_path / name, name) for number, name in enumerate(kinds)}
    for view in views.values():
        view.refresh()
    panels = {panel["title"]: panel["curves"] for panel in curves(views)["panels"]}
    assert [curve["run"] for curve in panels["Loss"]] == [0] and [
        curve["run"] for curve in panels["Reward"]
    ] == [1]


@pytest.mark.slow
def test_demonstrations_can_join_a_run_that_goes_on(tmp_path: Path) -> None:
    data = (f"env.dataset={write(tmp_path, ROWS)}", "env.columns.answer=answer", "env.reward=gsm8k")
    run(tmp_path / "alone", *data, steps(1), "evaluation.num_prompts=0")
    options = (
        *data,
        "evaluation.num_prompts=0",
        f"train.resume={tmp_path / 'alone'}",
        "env.columns.completion=solution",
        "policy.sft_coef=0.5",
    )
    assert run(tmp_path / "beside", *options, steps(2))[-1]["train/loss_sft"] > 0


@pytest.mark.slow
def test_rows_that_nothing_scores_need_no_reward(tmp_path: Path) -> None:
    data = (
        f"env.dataset={write(tmp_path, ROWS)}",
        "env.columns.completion=solution",
        "algo=sft",
        "env.difficulty=2",
    )
    with pytest.raises(
        ConfigError,
        match=r"env\.reward: .* algo=sft with evaluation\.num_prompts=0",
    ):
        prepare(compose_config(*data, "evaluation.num_prompts=8", "env.test_fraction=0.2"))
    rows = run(tmp_path / "run", *data, steps(3), "evaluation.num_prompts=0")
    assert rows[-1]["train/loss"] < 0.5 * rows[1]["train/loss"] and "eval/pass@1" not in rows[0]


@pytest.mark.parametrize("override", ["algo=sft", "policy.sft_coef=0.1"])
def test_a_task_without_demonstrations_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"need a response to each problem, .*'arithmetic' has"):
        prepare(compose_config(override, "evaluation.num_prompts=0", "logging.tensorboard=false"))
