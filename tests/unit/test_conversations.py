"""Dialogs with tools and further attempts: token in, token out, in the environment and compared
with one forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.support.chats import CHATS, make_chat_tokenizer
from tests.support.dialogs import log_prob_gap, tokens_between_turns
from tests.support.echo import EchoTask, add, hang, leave
from tests.support.envs import END, ScriptedEngine, column, respond
from tests.support.waiting import until
from torchrl_grpo import keys
from torchrl_grpo.chat.template import ChatEncoder, TurnTemplate, render_chat
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem, Score
from torchrl_grpo.tasks.conversations import WithRetry, WithTools
from torchrl_grpo.tools import Toolbox, tool_message


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def prompts(data: Any) -> list[list[int]]:
    return [row.get("prompt").tolist() for row in data.get("tokens").unbind(0)]


def turn(role: str, text: str) -> str:
    return f"<|{role}|>{text}<|end|>"


def test_results_come_back_as_tool_messages_and_the_last_turn_is_scored(
    tokenizer: PreTrainedTokenizerFast, encode: Callable[[str], list[int]]
) -> None:
    task = WithTools(EchoTask(), Toolbox([add]))
    env = LLMEnv(task, tokenizer, num_envs=4, repeats=4, max_turns=2)
    data = env.reset()
    first, query = prompts(data)[0], data["query"][0]
    texts = [
        call("add", a=2, b=3),
        call("add", a=2),
        query,
        f"{call('add', a=1, b=1)} and {call('add', a=4, b=4)}",
    ]
    responses = [[*encode(text), END] for text in texts]
    after = respond(env, data, responses)
    assert column(after, "done") == [False, False, True, False]
    for row, results in ((0, ["5"]), (1, ["error: add needs the argument 'b'"]), (3, ["2", "8"])):
        between = "".join(turn("tool", text) for text in results) + "<|assistant|>"
        assert prompts(after["next"])[row] == [*first, *responses[row], *encode(between)]
    counts = env.take_counts()
    assert (counts["tools/calls"], counts["tools/errors"]) == (4, 1) and counts["tools/seconds"] > 0

    second = env.step_mdp(after)
    second.set("_step", ~second["done"])
    last = respond(
        env, second, [[*encode(query), END], [*encode(texts[0]), END], [], [*encode("x"), END]]
    )
    samples = [state.samples() for state in env.states]
    assert [sample.text for sample in samples[0]] == [f"{texts[0]}\n[tool] 5\n{query}"]
    assert [sample.text for sample in samples[2]] == [query]
    assert samples[3][0].text.splitlines() == [texts[3], "[tool] 2", "[tool] 8", "x"]
    assert column(last, "correct") == [True, False, True, False]
    assert column(last, "terminated") == [True, False, True, True]
    assert column(last, "truncated") == [
        False,
        True,
        False,
        False,
    ]  # the call in its last turn is not executed
    assert env.take_counts() == {"tools/calls": 0, "tools/errors": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_a_tool_that_hangs_or_ends_its_process_is_told_to_the_policy(
    tokenizer: PreTrainedTokenizerFast, encode: Callable[[str], list[int]]
) -> None:
    task = WithTools(EchoTask(), Toolbox([hang, leave]))
    with RewardPool(task, 2, timeout_s=3.0) as pool:
        env = LLMEnv(task, tokenizer, num_envs=2, repeats=2, max_turns=2, reward_pool=pool)
        data = env.reset()
        first = prompts(data)[0]
        responses = [[*encode(call(name, a=1)), END] for name in ("hang", "leave")]
        after = respond(env, data, responses)
        assert column(after, "reward_valid") == [True, True] and column(after, "done") == [
            False,
            False,
        ]
        for row, why in enumerate(("it took longer than 3 s", "its process ended")):
            result = encode(turn("tool", f"error: {why}") + "<|assistant|>")
            assert prompts(after["next"])[row] == [*first, *responses[row], *result]
        counts = env.take_counts()
        assert (counts["tools/calls"], counts["tools/errors"]) == (2, 2)


def test_a_wrong_answer_has_a_further_try_and_the_last_one_counts(
    tokenizer: PreTrainedTokenizerFast, encode: Callable[[str], list[int]]
) -> None:
    env = LLMEnv(WithRetry(EchoTask(), "no"), tokenizer, num_envs=3, repeats=3, max_turns=2)
    data = env.reset()
    first, query = prompts(data)[0], data["query"][0]
    after = respond(env, data, [[*encode(text), END] for text in (query, "wrong", "wrong")])
    assert column(after, "done") == [True, False, False] and column(after, "reward") == [
        1.0,
        0.0,
        0.0,
    ]
    again = encode(f"{turn('user', 'no')}<|assistant|>")
    assert prompts(after["next"])[1] == [*first, *encode("wrong"), END, *again]
    second = env.step_mdp(after)
    second.set("_step", ~second["done"])
    last = respond(env, second, [[], [*encode(query), END], [*encode("worse"), END]])
    assert column(last, "reward") == [1.0, 1.0, 0.25] and column(last, "correct") == [
        True,
        True,
        False,
    ]
    assert column(last, "truncated") == [False, False, False]  # the policy had all its attempts


class Recording(EchoTask):
    """Record the dialogs to judge."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def judge(self, dialog: Any) -> Score:
        self.seen.append(dialog)
        return Score(1.0, False)


def test_a_judge_sees_the_whole_dialog(
    tokenizer: PreTrainedTokenizerFast, encode: Callable[[str], list[int]]
) -> None:
    task = Recording()
    env = LLMEnv(
        WithRetry(WithTools(task, Toolbox([add])), "no"),
        tokenizer,
        num_envs=1,
        repeats=1,
        max_turns=3,
    )
    data = env.reset()
    for text in (call("add", a=1, b=2), "x", "y"):
        data = env.step_mdp(respond(env, data, [[*encode(text), END]]))
    assert [dialog.last for dialog in task.seen] == [False, True]
    dialog = task.seen[-1]
    assert dialog.responses == [call("add", a=1, b=2), "x", "y"]
    roles = [message["role"] for message in dialog.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert dialog.messages[2]["content"] == "3" and dialog.messages[4]["content"] == "no"
    assert (dialog.tokens, dialog.finish_reason, dialog.raw) == (
        [*encode("y"), END],
        "stop",
        "y<|end|>",
    )


CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{{ '<tool_response>\n' + m.content + '\n</tool_response>' if m.role == 'tool' else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9') }}{% endif %}"
    "[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "between"),
    [
        (
            CHATML,
            "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA,
            "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (MISTRAL, '</s>[TOOL_RESULTS] {"content": "5", "call_id": "call00000"}[/TOOL_RESULTS]'),
    ],
)
def test_results_stand_where_the_templates_of_three_families_put_them(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, template: str, between: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert TurnTemplate(tokenizer, {}).text([tool_message("add", "5")]) == between


def test_a_template_that_leaves_results_out_is_refused(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
    )
    with pytest.raises(ValueError, match=r"content .* role 'tool': use"):
        LLMEnv(WithTools(EchoTask(), Toolbox([add])), tokenizer, num_envs=1, repeats=1, max_turns=2)


ONE_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }}|{% endif %}{% endfor %}"
)
NO_SYSTEM = ONE_SYSTEM.partition("{% endif %}")[2]
PART = """{% for m in messages %}{% if '"' in m.content %}{{ m.content.split('"')[1] }}{% else
%}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "roles", "lost"),
    [
        (NO_SYSTEM, "system user", "system"),
        (ONE_SYSTEM, "system user", None),
        (ONE_SYSTEM, "system user system", "system"),
        (ONE_SYSTEM, "developer user", "developer"),
        (ONE_SYSTEM, "user assistant user", None),
        ("{{ messages[0].content }}", "user assistant user", "assistant"),
        ("{{ messages | map(attribute='content') | join(' ') | trim }}", "system user", None),
        ("{{ messages | reverse | list | tojson }}", "system user assistant tool user", None),
        ("{{ messages | map(attribute='content') | join(' ') | upper }}", "system user", None),
        (PART, "user assistant user", None),
    ],
)
def test_a_chat_of_which_the_template_drops_a_message_is_refused(
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    roles: str,
    lost: str | None,
) -> None:
    """The template may merge texts, strip them, leave out a part, such as a thought, change letters,
    and write texts in another order, or as JSON.
    """
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chat = [{"role": role, "content": ' "same"\n'} for role in roles.split()]
    chats = ChatEncoder(tokenizer, {})
    for _ in range(2):
        if lost is None:
            assert "same" in chats.render(chat).lower()
            continue
        with pytest.raises(ValueError, match=rf"model\.chat_template=.*role '{lost}'"):
            chats.render(chat)
    chats.render([{**message, "content": ""} for message in chat])  # nothing that could be lost


def test_a_chat_of_which_the_template_drops_the_calls_is_refused(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = [{"role": "user", "content": "?"}, calling, tool_message("add", "5")]
    monkeypatch.setattr(tokenizer, "chat_template", CALLS.replace("WRITE", "call.function.name"))
    with pytest.raises(ValueError, match=r"model\.chat_template=.* tool_calls .*'assistant'"):
        ChatEncoder(tokenizer, {}).tokens(chat)


@pytest.mark.parametrize("name", CHATS)
def test_templates_of_families_write_whole_chats(name: str) -> None:
    """What a template writes in its own way is no reason to refuse it."""
    chats = ChatEncoder(make_chat_tokenizer(name), {})
    turns = [{"role": role, "content": f" {role} \n"} for role in ("user", "assistant", "user")]
    for chat in (turns, [{"role": "system", "content": "<think>system"}, *turns]):
        try:
            render_chat(chats.tokenizer, chat)
        except ValueError:  # some refuse a system message themselves
            continue
        assert "system" in chats.render(chat) or chat is turns


CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls %}{{ WRITE }}{% endfor %}|"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    "arguments", [{"a": "\u00e9"}, '{"a": "\u00e9"}', '{"a":"\\u00e9"}', None, ""]
)
@pytest.mark.parametrize(
    "write",
    [
        "call.function.arguments | tojson",  # Llama, Qwen 2.5, Mistral: text would be encoded twice
        "'{' + call.function.arguments.items() | join + '}'",
        "call.function.arguments + ''",  # DeepSeek: an object is an error
        "(call.function.arguments if m.content is none else '') + ''",
    ],
)
def test_arguments_are_written_in_the_form_that_the_template_takes(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, write: str, arguments: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CALLS.replace("WRITE", write))
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "add", "arguments": arguments},
    }
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = TurnTemplate(tokenizer, {}).text(
        [{"role": "user", "content": "?"}, calling, tool_message("add", "5")]
    )
    value = "é" if arguments else None
    written = {None: "{}", "é": "{('a', 'é')}" if "items" in write else '{"a": "é"}'}[value]
    assert text.partition("assistant:")[2].partition("|")[0].removeprefix("None") == written


def test_arguments_that_are_nested_too_deeply_are_no_error_of_the_run(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    value: Any = "x"
    for _ in range(100_000):
        value = {"a": value}
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": value}}
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    for write in (TurnTemplate(tokenizer, {}).text, ChatEncoder(tokenizer, {}).tokens):
        with pytest.raises(ValueError, match="nested"):
            write(chat)
    with pytest.raises(ValueError, match="nested"):
        TurnTemplate(tokenizer, {}).tokens(chat, [])


def test_a_template_that_leaves_tools_out_is_refused(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before a model is loaded, and in each request of an agent."""
    task = WithTools(EchoTask(), Toolbox([add]))
    monkeypatch.setattr(
        tokenizer, "chat_template", tokenizer.chat_template.replace("if tools", "if false")
    )
    with pytest.raises(ValueError, match=r"model\.chat_template=.*\['add'\]"):
        LLMEnv(task, tokenizer, num_envs=1, repeats=1, max_turns=2)
    prompts = LLMEnv(EchoTask(), tokenizer, num_envs=1, repeats=1).prompts
    with pytest.raises(ValueError, match=r"model\.chat_template=.*\['add'\]"):
        prompts.of_chat([{"role": "user", "content": "?"}], task.tools)


def test_a_template_that_requires_tools_is_accepted(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chats = ChatEncoder(tokenizer, {})
    assert "add" in chats.render([{"role": "user", "content": "?"}], tools=Toolbox([add]).schemas)


def test_the_policy_sees_the_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    for one in (tokenizer, AutoTokenizer.from_pretrained(starter_path())):
        env = LLMEnv(WithTools(EchoTask(), Toolbox([add])), one, num_envs=1, repeats=1, max_turns=2)
        assert "add" in one.decode(prompts(env.reset())[0])


@pytest.mark.slow
def test_log_probs_of_a_dialog_are_those_of_one_forward_pass() -> None:
    """The engine samples turn by turn, with a user's turn in between; the log-probs are those of
    the whole sequence.
    """
    model = AutoModelForCausalLM.from_pretrained(starter_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    engine = TransformersEngine(model)
    engine.seed(1)
    env = LLMEnv(
        WithRetry(ArithmeticTask(), "Wrong. Try again."),
        tokenizer,
        num_envs=16,
        repeats=4,
        max_turns=3,
    )
    policy = GenerationPolicy(engine, SamplingParams(32, stop_token_ids=(tokenizer.eos_token_id,)))
    batch = RolloutCollector(env, policy).rollout()
    again = tokenizer("<|user|>Wrong. Try again.<|end|><|assistant|>", add_special_tokens=False)[
        "input_ids"
    ]
    between = tokens_between_turns(batch)
    assert all(
        tokens % len(again) == 0 for tokens in between
    )  # only the template's own tokens are masked
    assert sum(1 + tokens // len(again) for tokens in between) > 24
    assert log_prob_gap(batch, model) < 1e-4


def test_each_response_is_scored_while_others_are_sampled(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Any
) -> None:
    """The second response is sampled after the first one's scorer has started."""

    class Slow(EchoTask):
        def score(self, problem: Problem, responses: Sequence[str]) -> Score:
            if responses[0] == "first":
                (tmp_path / "begun").touch()
            return Score(1.0, True)

    def rule(prompt: Any, copy_number: int) -> tuple[list[int], str]:
        until(lambda: not copy_number or (tmp_path / "begun").exists())
        return [
            *tokenizer("second" if copy_number else "first", add_special_tokens=False)["input_ids"],
            END,
        ], "stop"

    with RewardPool(Slow(), 1, timeout_s=300) as pool:
        env = LLMEnv(Slow(), tokenizer, num_envs=2, repeats=2, reward_pool=pool)
        batch = RolloutCollector(
            env, GenerationPolicy(ScriptedEngine(rule), SamplingParams(16))
        ).rollout()
    assert batch[keys.REWARD].flatten().tolist() == [1.0, 1.0]
