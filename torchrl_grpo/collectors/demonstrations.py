"""``Demonstrations``: trajectories read from data, instead of or in addition to sampled ones."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
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
from torchrl_grpo.images import ImageSpan, images_in, images_of, text_of, tokens_of
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.tasks.base import Message, Problem
from torchrl_grpo.tasks.drawing import Drawn

_TAG = re.compile(r"<[^<>\s]*>")
_LEARNED = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
"""Fields of an assistant message that the template must render if the message has them."""
TextSpans = list[tuple[int, int]]


class WrittenChat(NamedTuple):
    """A chat as tokens.

    Attributes:
        tokens: the whole chat, [T] int64.
        prompt: number of prompt tokens.
        turns: token range of each assistant turn after the prompt.
        learned: whether each token is in an assistant turn, [T] bool.
        truncated: whether a turn or the chat was cut off at its limit.
        images: the images among the tokens.
    """

    tokens: Tensor
    prompt: int
    turns: list[range]
    learned: Tensor
    truncated: bool
    images: tuple[ImageSpan, ...] = ()


class ChatWriter:
    """Tokenizes a chat with the chat template and locates the assistant's turns in it.

    The template's ``generation`` markers enclose the turns. Without markers, a turn begins where
    the generation prompt for the preceding messages ends, and ends where the chat up to and
    including the turn ends. If no turn contains a stop token, each turn is extended by the stop
    token that follows it, or by the end-of-sequence token. Control tokens in assistant messages
    stay control tokens; in other messages they are plain text.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        stop_token_ids: the tokens that end a turn.
        template_arguments: arguments for the chat template.
        image_encoder: encodes the images of chats; None for models that read only text.

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
        image_encoder: ImageEncoder | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                "model.name's tokenizer must be a fast one to learn from demonstrations, but "
                f"{type(tokenizer).__name__} cannot map tokens to characters: use a model with a "
                "tokenizer.json."
            )
        self.tokenizer = tokenizer
        self._stops = set(stop_token_ids)
        self._image_encoder = image_encoder
        self._chats = ChatEncoder(tokenizer, template_arguments or {})

    def __call__(
        self,
        prompt: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_turn_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> WrittenChat:
        """Return a chat as tokens.

        Args:
            prompt: the messages before the first assistant turn to be learned.
            rest: the remaining messages; the first and last ones are the assistant's.
            tools: JSON schemas for the chat template.
            max_turn_tokens: maximum number of tokens in a turn.
            max_tokens: maximum number of tokens in the chat.

        Raises:
            ValueError: the template leaves something out, or the rendered chat does not begin with
                the rendered prompt.
        """
        head, text, spans = self.render(prompt, rest, tools)
        [before] = self._chats.encode([head])
        tokens, turns = self._chats.encode_spans(text, spans)
        shared = min(_common_length(before, tokens), turns[0].start)
        if not any(tokens[i] in self._stops for turn in turns for i in turn):
            tokens, turns = self._with_ends(tokens, turns)
        images: tuple[ImageSpan, ...] = ()
        if self._image_encoder is not None:
            files = images_in([*prompt, *rest])
            expanded = self._image_encoder.expand(tokens, files)
            moved = partial(self._image_encoder.expanded_index, tokens, files)
            shared = moved(shared)
            turns = [range(moved(turn.start), moved(turn.stop)) for turn in turns]
            tokens, images = tokens_of(expanded).tolist(), images_of(expanded)
        end, truncated = len(tokens), False
        for turn in turns:
            stop = next((i for i in reversed(turn) if tokens[i] in self._stops), turn.stop - 1)
            if max_turn_tokens is not None and stop - turn.start >= max_turn_tokens:
                end, truncated = turn.start + max_turn_tokens, True
                break
        if max_tokens is not None and end > max_tokens:
            inside = (span.offset for span in images if span.offset < max_tokens < span.end)
            end, truncated = next(inside, max_tokens), True
        turns = [range(turn.start, min(turn.stop, end)) for turn in turns if turn.start < end]
        learned = torch.zeros(end, dtype=torch.bool)
        for turn in turns:
            learned[turn.start : turn.stop] = True
        images = tuple(span for span in images if span.end <= end)
        chat_tokens = torch.tensor(tokens[:end], dtype=torch.int64)
        return WrittenChat(chat_tokens, shared, turns, learned, truncated, images)

    def check(
        self,
        prompt: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Check a chat, without encoding its images.

        Raises:
            ValueError: see ``__call__``.
        """
        _, text, spans = self.render(prompt, rest, tools)
        if self._image_encoder is not None:
            ids, _ = self._chats.encode_spans(text, spans)
            self._image_encoder.expanded_length(ids, images_in([*prompt, *rest]))

    def render(
        self,
        prompt: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[str, str, TextSpans]:
        """Return the prompt and the chat as text for ``ChatEncoder.encode``, and the spans of the
        assistant's turns in the chat.

        Raises:
            ValueError: see ``__call__``.
        """
        chat, first = [*prompt, *rest], len(prompt)
        arguments = {"tools": list(tools) or None}
        text, marked = self._chats.render_turns(chat, first, **arguments)
        plain = self._chats.plain(text)
        heads = {first: self._chats.render(prompt, add_generation_prompt=True, **arguments)}
        start = len(heads[first])
        _check_begins_with(plain, self._chats.plain(heads[first]))
        spans = [(max(begin, start), end) for begin, end in marked if end > start]
        if not spans:
            spans = list(self._spans(chat, first, plain, arguments))
        _check_written(rest, plain, spans, start)
        return heads[first], text, spans

    def _spans(
        self, chat: Sequence[Message], first: int, plain: str, arguments: dict[str, Any]
    ) -> Iterator[tuple[int, int]]:
        """Yield the assistant's turns in a chat whose template does not mark them."""

        def write(size: int, prompts: bool) -> str:
            text, _ = self._chats.render_turns(
                chat[:size], first, add_generation_prompt=prompts, **arguments
            )
            return self._chats.plain(text)

        for position in range(first, len(chat)):
            if chat[position]["role"] != "assistant":
                continue
            head = write(position, prompts=True)
            _check_begins_with(plain, head)
            up_to_here = plain if position == len(chat) - 1 else write(position + 1, prompts=False)
            _check_begins_with(up_to_here, head)
            turn, start = up_to_here[len(head) :], len(head)
            # A template may begin only the last turn of a chat with an empty thought.
            extra = next((n for n in range(len(turn)) if plain.startswith(turn[n:], start)), None)
            if extra is None:
                raise ValueError(
                    "model.chat_template must end all assistant turns in the same way, but it ends "
                    f"the last one with {up_to_here[-20:]!r}: use a template with generation "
                    "markers, or one turn per row."
                )
            yield start, start + len(turn) - extra

    def _with_ends(self, tokens: list[int], turns: list[range]) -> tuple[list[int], list[range]]:
        """Return the tokens and turns with a stop token appended to each turn."""
        out: list[int] = []
        ended: list[range] = []
        copied = 0
        for turn in turns:
            out += tokens[copied : turn.start]
            start = len(out)
            copied = turn.stop
            out += tokens[turn.start : turn.stop]
            follows = tokens[copied : copied + 1]
            if self._stops.issuperset(follows) and follows:
                copied += 1
            else:
                follows = [self.tokenizer.eos_token_id]
            out += follows
            ended.append(range(start, len(out)))
        return out + tokens[copied:], ended


def _common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def _check_begins_with(text: str, head: str) -> None:
    if not text.startswith(head):
        length = _common_length(text, head)
        raise ValueError(
            "model.chat_template must render a chat so that it begins with the prompt that the "
            f"policy sees, but the prompt continues with {head[length:]!r:.80} where the chat has "
            f"{text[length:]!r:.80}: add the missing field (such as reasoning_content) to the row, "
            "or use a template or env.chat_template_kwargs that render both alike."
        )


def _check_written(rest: Sequence[Message], text: str, spans: TextSpans, start: int) -> None:
    """Check that the chat contains the words of each message: the assistant's words within its
    turns, all others between them.
    """
    borders = [start, *(border for span in spans for border in span), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    sides = {True: "".join(pieces[1::2]), False: "".join(pieces[::2])}
    positions = {True: 0, False: 0}
    for message in rest:
        is_assistant = message["role"] == "assistant"
        ends = [positions[is_assistant]]
        for field in _LEARNED if is_assistant else ("content",):
            position = positions[is_assistant]
            value = message.get(field)
            if field == "content" and value is not None:
                value = text_of(value)
            if field == "tool_calls":
                calls = [with_arguments(call, as_object=True) for call in value or ()]
                functions = [call.get("function", call) for call in calls]
                value = [(function["name"], function["arguments"]) for function in functions]
            for word in _words(value):
                start = sides[is_assistant].find(word, position)
                if start < 0:
                    raise ValueError(
                        f"model.chat_template must render {field} of each message, but it left out "
                        f"{word!r} of {message[field]!r:.80} of the {message['role']}: use a "
                        "template that renders it (a training template, which keeps earlier turns "
                        "unchanged), or remove it from the row."
                    )
                position = start + len(word)
            ends.append(position)
        positions[is_assistant] = max(ends)


def _words(value: Any) -> Iterator[str]:
    """Yield the words of a text, or of all texts in a nested value, without tags."""
    if isinstance(value, str):
        yield from re.findall(r"\w+", _TAG.sub(" ", value))
    elif isinstance(value, Mapping):
        yield from _words(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _words(entry)


class Demonstrations:
    """Source of demonstrations in the form of a ``RolloutCollector``'s trajectories.

    A demonstration has a reward of 1 and is correct. Its behavior log-probs are 0, because it was
    not sampled. A demonstration that ``give`` adds to sampled trajectories has neither reward nor
    log-probs: it is not a member of the group, and only the loss reads it.

    Attributes:
        last: counts of the latest batch.

    Args:
        env: source of problems, prompts and tokenizer; it is never stepped.
        engine: source of the weights' version.
        stop_token_ids: the tokens that end a turn.
        max_turn_tokens: maximum number of tokens in a turn; longer demonstrations are cut off there,
            like dialogs.
        max_tokens: maximum number of tokens in a prompt with its demonstration.
    """

    def __init__(
        self,
        env: LLMEnv,
        engine: Engine,
        stop_token_ids: Collection[int],
        max_turn_tokens: int,
        max_tokens: int | None = None,
    ) -> None:
        self.env = env
        self.engine = engine
        self.max_turn_tokens = max_turn_tokens
        self.max_tokens = max_tokens
        self.last = RolloutCounts()
        self._write = self._writer(env, stop_token_ids)

    @staticmethod
    def _writer(env: LLMEnv, stop_token_ids: Collection[int]) -> ChatWriter:
        encoder = env.prompts.image_encoder
        return ChatWriter(env.tokenizer, stop_token_ids, env.template_arguments, encoder)

    @staticmethod
    def check(env: LLMEnv, stop_token_ids: Collection[int]) -> None:
        """Check the demonstrations of an environment's problems.

        Raises:
            ValueError: a problem has no demonstration, or the chat template leaves out a part of
                it.
        """
        writer = Demonstrations._writer(env, stop_token_ids)
        for index in env.prompts.usable:
            problem, task = env.prompts.problems[index], env.task
            try:
                writer.check(
                    task.messages(problem), task.demonstration(problem), task.tools_for(problem)
                )
            except ValueError as error:
                raise ValueError(f"the demonstration of {problem.query!r:.80}: {error}") from error

    def rollout(self, drawn: Sequence[Drawn]) -> TensorDictBase:
        """Return the demonstrations of problems as a flat lazy stack with one row each.

        Raises:
            ValueError: the task has no demonstration of a problem.
        """
        start = time.perf_counter()
        batch = lazy_stack([self._row(group) for group in drawn])
        self.last = RolloutCounts(env_seconds=time.perf_counter() - start)
        return batch

    def give(self, drawn: Drawn, rows: Sequence[TensorDictBase]) -> None:
        """Write a problem's demonstration into the first of its sampled rows, in place.

        The other rows get an empty demonstration. The keys are ``keys.DEMONSTRATION``,
        ``keys.DEMONSTRATION_MASK`` and, for a model that reads images,
        ``keys.DEMONSTRATION_IMAGES``.

        Raises:
            ValueError: the task has no demonstration of the problem.
        """
        chat = self._chat(drawn.problem)
        for number, row in enumerate(rows):
            part = slice(0, 0 if number else None)
            row.set(keys.DEMONSTRATION, chat.tokens[part])
            row.set(keys.DEMONSTRATION_MASK, chat.learned[part])
            if self.env.has_images:
                row.set(keys.DEMONSTRATION_IMAGES, NonTensorData(chat.images[part]))

    def _chat(self, problem: Problem) -> WrittenChat:
        task = self.env.task
        return self._write(
            task.messages(problem),
            task.demonstration(problem),
            task.tools_for(problem),
            max_turn_tokens=self.max_turn_tokens,
            max_tokens=self.max_tokens,
        )

    def _row(self, drawn: Drawn) -> TensorDictBase:
        chat = self._chat(drawn.problem)
        mask, truncated = chat.learned, chat.truncated
        texts = [
            self.env.tokenizer.decode(chat.tokens[turn.start : turn.stop], skip_special_tokens=True)
            for turn in chat.turns
        ]
        version = int(self.engine.policy_version)
        ones = torch.tensor([True])
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
                keys.PROBLEM: torch.tensor([drawn.index]),
                keys.REWARD: torch.ones(1),
                keys.REWARD_VALID: ones,
                keys.CORRECT: ones,
                keys.DONE: ones,
                keys.TERMINATED: ones & (not truncated),
                keys.TRUNCATED: ones & truncated,
                keys.QUERY: NonTensorData(drawn.problem.query),
                keys.RESPONSE_TEXT: NonTensorData(
                    _with_others(self.env.task.demonstration(drawn.problem), texts)
                ),
            }
        )
        if drawn.problem.dataset:
            row.set(keys.DATASET, NonTensorData(drawn.problem.dataset))
        if self.env.has_images:
            row.set(keys.IMAGES, NonTensorData(chat.images))
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
            between.append(f"[{message['role']}] {text_of(message.get('content') or '')}")
        elif (text := next(turn, None)) is not None:
            lines += [*between, text]
            between.clear()
    return "\n".join([*lines, *turn])
