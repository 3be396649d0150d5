"""``Demonstrations``: trajectories that are read from data, in place of sampled ones or beside
them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.chat.template import ChatEncoder, with_arguments
from torchrl_grpo.collectors.rollout import RolloutCounts
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Engine
from torchrl_grpo.tasks.base import Message, Problem
from torchrl_grpo.tasks.drawing import Drawn

_TAG = re.compile(r"<[^<>\s]*>")
_LEARNED = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
"""Fields of an assistant's message that a template must write, where the message has them."""
Spans = list[tuple[int, int]]


class WrittenChat(NamedTuple):
    """A chat as tokens.

    Attributes:
        tokens: of all of it, [T] int64.
        prompt: number of tokens that are the prompt's.
        turns: the tokens of each of the assistant's turns after the prompt.
        learned: which tokens are in a turn, [T] bool.
        cut: whether a turn or the chat was longer than its limit; it ends there.
    """

    tokens: Tensor
    prompt: int
    turns: list[range]
    learned: Tensor
    cut: bool


class ChatWriter:
    """Writes a chat as the chat template does, and finds the assistant's turns in it.

    The turns are what the template's ``generation`` markers enclose. Without them a turn begins
    where the prompt of the messages before it ends, and ends where the chat up to it does. Where no
    turn has a token that ends it, each gets the one that follows, or the end-of-sequence token. An
    assistant's control tokens are tokens, others' are text.

    Args:
        tokenizer: a fast one with a chat template.
        stop_token_ids: the tokens that end a turn.
        template_arguments: of the chat template.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_grpo.starter import starter_path
        >>> tokenizer = AutoTokenizer.from_pretrained(starter_path())
        >>> user, assistant = {"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "#### 4"}
        >>> chat = ChatWriter(tokenizer, [1])([user], [assistant])
        >>> tokenizer.decode(chat.tokens), tokenizer.decode(chat.tokens[chat.learned])
        ('<|user|>2+2=?<|end|><|assistant|>#### 4<|end|>', '#### 4<|end|>')
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Collection[int],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                "model.name's tokenizer must be a fast one to learn from demonstrations, "
                f"{type(tokenizer).__name__} does not say which characters its tokens are: use a "
                "model with a tokenizer.json."
            )
        self.tokenizer = tokenizer
        self._stops = set(stop_token_ids)
        self._chats = ChatEncoder(tokenizer, template_arguments or {})

    def __call__(
        self,
        prompt: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        most: int | None = None,
        longest: int | None = None,
    ) -> WrittenChat:
        """Return a chat as tokens.

        Args:
            prompt: the messages before the assistant's first turn to be learned.
            rest: the messages after them, with an assistant's first and last.
            tools: JSON schemas for the chat template.
            most: tokens of a turn.
            longest: tokens of the chat.

        Raises:
            ValueError: the template leaves something out, or does not write the chat after its
                prompt.
        """
        head, text, spans = self.render(prompt, rest, tools)
        [before] = self._chats.encode([head])
        tokens, turns = self._chats.encode_spans(text, spans)
        shared = min(_common_length(before, tokens), turns[0].start)
        if not any(tokens[i] in self._stops for turn in turns for i in turn):
            tokens, turns = self._with_ends(tokens, turns)
        end, cut = len(tokens), False
        for turn in turns:
            stop = next((i for i in reversed(turn) if tokens[i] in self._stops), turn.stop - 1)
            if most is not None and stop - turn.start >= most:
                end, cut = turn.start + most, True
                break
        if longest is not None and end > longest:
            end, cut = longest, True
        turns = [range(turn.start, min(turn.stop, end)) for turn in turns if turn.start < end]
        learned = torch.zeros(end, dtype=torch.bool)
        for turn in turns:
            learned[turn.start : turn.stop] = True
        return WrittenChat(
            torch.tensor(tokens[:end], dtype=torch.int64), shared, turns, learned, cut
        )

    def render(
        self,
        prompt: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[str, str, Spans]:
        """Return the prompt and the chat, for ``ChatEncoder.encode``, and the assistant's turns in
        the chat.

        Raises:
            ValueError: see ``__call__``.
        """
        chat, first = [*prompt, *rest], len(prompt)
        arguments = {"tools": list(tools) or None}
        text, marked = self._chats.render_turns(chat, first, **arguments)
        whole = self._chats.plain(text)
        heads = {first: self._chats.render(prompt, add_generation_prompt=True, **arguments)}
        start = len(heads[first])
        _check_begins_with(whole, self._chats.plain(heads[first]))
        spans = [(max(begin, start), end) for begin, end in marked if end > start]
        if not spans:
            spans = list(self._spans(chat, first, whole, arguments))
        _check_written(rest, whole, spans, start)
        return heads[first], text, spans

    def _spans(
        self, chat: Sequence[Message], first: int, whole: str, arguments: dict[str, Any]
    ) -> Iterator[tuple[int, int]]:
        """Yield the assistant's turns in a chat whose template does not mark them."""

        def write(size: int, prompts: bool) -> str:
            text, _ = self._chats.render_turns(
                chat[:size], first, add_generation_prompt=prompts, **arguments
            )
            return self._chats.plain(text)

        for place in range(first, len(chat)):
            if chat[place]["role"] != "assistant":
                continue
            head = write(place, prompts=True)
            _check_begins_with(whole, head)
            up_to_here = whole if place == len(chat) - 1 else write(place + 1, prompts=False)
            _check_begins_with(up_to_here, head)
            turn, start = up_to_here[len(head) :], len(head)
            # A template may begin the last turn of a chat with an empty thought that it writes in
            # no other.
            extra = next((n for n in range(len(turn)) if whole.startswith(turn[n:], start)), None)
            if extra is None:
                raise ValueError(
                    "model.chat_template must end an assistant's turn in the same way wherever it "
                    f"is, it ends the last one with {up_to_here[-20:]!r}: use a template with "
                    "generation markers, or one turn per row."
                )
            yield start, start + len(turn) - extra

    def _with_ends(self, tokens: list[int], turns: list[range]) -> tuple[list[int], list[range]]:
        """Return tokens and turns in which each turn has a further token, which ends it."""
        out: list[int] = []
        ended: list[range] = []
        done = 0
        for turn in turns:
            out += tokens[done : turn.start]
            start, done = len(out), turn.stop
            out += tokens[turn.start : turn.stop]
            follows = tokens[done : done + 1]
            if self._stops.issuperset(follows) and follows:
                done += 1
            else:
                follows = [self.tokenizer.eos_token_id]
            out += follows
            ended.append(range(start, len(out)))
        return out + tokens[done:], ended


def _common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common beginning of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def _check_begins_with(text: str, head: str) -> None:
    if not text.startswith(head):
        same = _common_length(text, head)
        raise ValueError(
            "model.chat_template must write a response after the prompt that the policy sees, "
            f"which goes on with {head[same:]!r:.80} where the chat has {text[same:]!r:.80}: write "
            "in the row what the prompt begins (such as reasoning_content), or use a template, or "
            "env.chat_template_kwargs, that write both alike."
        )


def _check_written(rest: Sequence[Message], text: str, spans: Spans, start: int) -> None:
    """Check that the words of each message are written, an assistant's within its turns and others'
    between them.
    """
    borders = [start, *(border for span in spans for border in span), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    sides = {True: "".join(pieces[1::2]), False: "".join(pieces[::2])}
    places = {True: 0, False: 0}
    for message in rest:
        own = message["role"] == "assistant"
        ends = [places[own]]
        for field in _LEARNED if own else ("content",):
            place = places[own]
            value = message.get(field)
            if field == "tool_calls":
                calls = [with_arguments(call, as_object=True) for call in value or ()]
                functions = [call.get("function", call) for call in calls]
                value = [(function["name"], function["arguments"]) for function in functions]
            for word in _words(value):
                start = sides[own].find(word, place)
                if start < 0:
                    raise ValueError(
                        f"model.chat_template must write {field} of each message, it left out "
                        f"{word!r} of {message[field]!r:.80} of the {message['role']}: use a "
                        "template that writes it (one for training, which keeps earlier turns as "
                        "they were), or remove it from the row."
                    )
                place = start + len(word)
            ends.append(place)
        places[own] = max(ends)


def _words(value: Any) -> Iterator[str]:
    """Yield the words of a text, or of a value's texts, without tags."""
    if isinstance(value, str):
        yield from re.findall(r"\w+", _TAG.sub(" ", value))
    elif isinstance(value, Mapping):
        yield from _words(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _words(entry)


class Demonstrations:
    """Returns the demonstrations of problems in the form of a ``RolloutCollector``'s trajectories.

    A demonstration has a reward of 1, is correct, and its behavior log-probs are 0, because nobody
    sampled it. One that ``give`` adds to sampled trajectories has neither reward nor log-probs: it
    is no member of the group, and only the loss reads it.

    Attributes:
        last: counts of the latest batch.

    Args:
        env: source of problems, prompts and tokenizer; it plays nothing.
        engine: source of the version of the weights.
        stop_token_ids: the tokens that end a turn.
        most: tokens of a turn; a demonstration ends there, as a dialog would.
        longest: tokens of a prompt and its demonstration.
    """

    def __init__(
        self,
        env: LLMEnv,
        engine: Engine,
        stop_token_ids: Collection[int],
        most: int,
        longest: int | None = None,
    ) -> None:
        self.env = env
        self.engine = engine
        self.most = most
        self.longest = longest
        self.last = RolloutCounts()
        self._write = ChatWriter(env.tokenizer, stop_token_ids, env.template_arguments)

    @staticmethod
    def check(env: LLMEnv, stop_token_ids: Collection[int]) -> None:
        """Check the demonstrations of an environment's problems.

        Raises:
            ValueError: there is none of a problem, or the chat template does not write all of it.
        """
        writer = ChatWriter(env.tokenizer, stop_token_ids, env.template_arguments)
        for index in env.prompts.usable:
            problem, task = env.prompts.problems[index], env.task
            try:
                writer.render(
                    task.messages(problem), task.demonstration(problem), task.tools_for(problem)
                )
            except ValueError as error:
                raise ValueError(f"the demonstration of {problem.query!r:.80}: {error}") from error

    def rollout(self, drawn: Sequence[Drawn]) -> TensorDictBase:
        """Return the demonstrations of problems, a flat lazy stack with a row for each.

        Raises:
            ValueError: the task has no demonstration of a problem.
        """
        start = time.perf_counter()
        batch = lazy_stack([self._row(group) for group in drawn])
        self.last = RolloutCounts(env_seconds=time.perf_counter() - start)
        return batch

    def give(self, drawn: Drawn, rows: Sequence[TensorDictBase]) -> None:
        """Write the demonstration of a problem into the first of the rows that were sampled for it,
        in place.

        The others get an empty one: ``keys.DEMONSTRATION`` and ``keys.DEMONSTRATION_MASK``.

        Raises:
            ValueError: the task has no demonstration of the problem.
        """
        chat = self._chat(drawn.problem)
        for number, row in enumerate(rows):
            part = slice(0, 0 if number else None)
            row.set(keys.DEMONSTRATION, chat.tokens[part])
            row.set(keys.DEMONSTRATION_MASK, chat.learned[part])

    def _chat(self, problem: Problem) -> WrittenChat:
        task = self.env.task
        return self._write(
            task.messages(problem),
            task.demonstration(problem),
            task.tools_for(problem),
            most=self.most,
            longest=self.longest,
        )

    def _row(self, drawn: Drawn) -> TensorDictBase:
        chat = self._chat(drawn.problem)
        mask, cut = chat.learned, chat.cut
        texts = [
            self.env.tokenizer.decode(chat.tokens[turn.start : turn.stop], skip_special_tokens=True)
            for turn in chat.turns
        ]
        version = int(self.engine.policy_version)
        true = torch.tensor([True])
        row = TensorDict(
            {
                keys.PROMPT: chat.tokens[: chat.prompt],
                keys.RESPONSE: chat.tokens[chat.prompt :],
                keys.FULL: chat.tokens,
                keys.ATTENTION_MASK: torch.ones_like(mask),
                keys.ASSISTANT_MASK: mask,
                keys.LOG_PROBS: torch.zeros(mask.shape),
                keys.POLICY_VERSION: torch.tensor([version]),
                keys.POLICY_VERSIONS: torch.where(mask, version, -1),
                keys.GROUP_ID: torch.tensor([drawn.group]),
                keys.REWARD: torch.ones(1),
                keys.REWARD_VALID: true,
                keys.CORRECT: true,
                keys.DONE: true,
                keys.TERMINATED: true & (not cut),
                keys.TRUNCATED: true & cut,
                keys.QUERY: NonTensorData(drawn.problem.query),
                keys.RESPONSE_TEXT: NonTensorData(
                    _with_others(self.env.task.demonstration(drawn.problem), texts)
                ),
            }
        )
        if drawn.problem.dataset:
            row.set(keys.DATASET, NonTensorData(drawn.problem.dataset))
        return row

    def take_counts(self) -> dict[str, float]:
        """Return nothing: no reward function was called."""
        return {}

    def shutdown(self) -> None:
        """Do nothing: the engine belongs to the sampler."""


def _with_others(chat: Sequence[Message], turns: Sequence[str]) -> str:
    """Return the text of a demonstration: the assistant's turns and, marked by their roles, the
    messages between them.

    >>> _with_others([{"role": "assistant"}, {"role": "user", "content": "Why?"}, {"role": "assistant"}], ["4", "2+2"])
    '4\\n[user] Why?\\n2+2'
    """
    lines, between, turn = list[str](), list[str](), iter(turns)
    for message in chat:
        if message["role"] != "assistant":
            between.append(f"[{message['role']}] {message.get('content') or ''}")
        elif (text := next(turn, None)) is not None:
            lines += [*between, text]
            between.clear()
    return "\n".join([*lines, *turn])
