"""``Prompts``: the problems of a split as token prompts, and the order in which they are drawn."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.chat.template import ChatEncoder
from torchrl_grpo.tasks.base import Problem, Split, Task

Outcomes = Iterable[Sequence[int]]
"""Numbers of responses: problem, whether they are correct, how many."""


class Prompts:
    """Draws problems, each ``repeats`` times in a row. Each epoch goes through the split in the task's order.

    With a ``difficulty_filter`` an epoch leaves out the problems of whose responses so far, in all epochs, too many or
    too few were correct. Without further responses they stay out; where all would be left out, none is.

    Args:
        task: the problems.
        tokenizer: with a chat template.
        split: ``"train"`` or ``"test"``.
        repeats: rows per problem (the group size).
        max_prompt_tokens: problems whose prompts are longer, or have no token at all, are dropped and counted in
            ``num_dropped``. None keeps all.
        template_arguments: of the chat template.

    Attributes:
        epoch: which pass over the problems it is in, from 0.
        usable: indices of the problems that may be drawn.
        skipped: those that the current epoch leaves out.
        difficulty_filter: (low, high), the shares of correct responses between which a problem is drawn again; None
            draws all. It counts from when it is set.

    Raises:
        ValueError: no problem is left.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        split: Split,
        repeats: int,
        max_prompt_tokens: int | None,
        template_arguments: Mapping[str, Any],
    ) -> None:
        self.task, self.repeats = task, repeats
        self._chats = ChatEncoder(tokenizer, template_arguments)
        self.problems: Sequence[Problem] = task.problems(split)
        self._tokens: dict[int, Tensor] = {}
        self._warned = split != "train"  # one line is enough: the test problems are of the same kind
        self.usable = self._select(max_prompt_tokens)
        self.num_dropped = len(self.problems) - len(self.usable)
        if self.num_dropped:
            torchrl_logger.info(
                f"Dropped {self.num_dropped} of {len(self.problems)} {split} prompts of {task.name!r} that are longer "
                f"than max_prompt_tokens={max_prompt_tokens}, or have no token at all."
            )
        if not self.usable:
            raise ValueError(
                f"split={split!r} of task {task.name!r} must have a problem whose prompt has 1 to "
                f"max_prompt_tokens={max_prompt_tokens} tokens, none of its {len(self.problems)} has: use a larger "
                "max_prompt_tokens, a model length that leaves more room beside the response, or a tokenizer that "
                "knows the characters of the prompts."
            )
        self.difficulty_filter: Sequence[float] | None = None
        self.skipped: frozenset[int] = frozenset()
        self._outcomes: Counter[tuple[int, bool]] = Counter()  # responses by problem, and whether they are correct
        self._news: Counter[tuple[int, bool]] = Counter()  # those that ``take_news`` has not given
        self._next_group = 0
        self._copies_left = 0  # of the problem and the group that were drawn last
        self.seed(0)

    def _select(self, most: int | None) -> list[int]:
        """Indices of the problems that may be drawn. Without a limit none is tokenized here."""
        everything = list(range(len(self.problems)))
        if most is None:
            return everything
        encoded = self._chats.encode([self._render(problem) for problem in self.problems])
        return [i for i in everything if 1 <= len(encoded[i]) <= most]

    def _render(self, problem: Problem) -> str:
        tools = list(self.task.tools) or None
        text = self._chats.render(self.task.messages(problem), tools=tools, add_generation_prompt=True)
        if not self._warned and self._chats.spells_control(text):
            self._warned = True
            torchrl_logger.warning(
                f"A prompt of {self.task.name!r} spells out a control token of the tokenizer, which is tokenized as "
                f"text: the chat template alone writes control tokens. Its query: {problem.query!r:.200}"
            )
        return text

    def __len__(self) -> int:
        """Problems that can be drawn."""
        return len(self.usable)

    def tokens(self, index: int) -> Tensor:
        """[T] int64 prompt of problem ``index``, tokenized when it is first drawn."""
        if index not in self._tokens:
            tokens = self._chats.encode([self._render(self.problems[index])])[0]
            self._tokens[index] = torch.tensor(tokens, dtype=torch.int64)
        return self._tokens[index]

    def first(self, count: int) -> list[Tensor]:
        """The prompts of the split's first ``count`` problems, [T] int64 each; drawing is not affected."""
        return [self.tokens(index) for index in self.usable[:count]]

    def draw(self) -> tuple[int, int]:
        """The problem and the group of the next row."""
        if self._copies_left == 0:
            if self._position == len(self._order):
                self.skipped = self._out_of_range()
                self._start_epoch(self.epoch + 1)
            self._current = (self._order[self._position], self._next_group)
            self._position += 1
            self._next_group += 1
            self._copies_left = self.repeats
        self._copies_left -= 1
        return self._current

    def start_group(self) -> None:
        """Has the next row be the first of a group."""
        self._copies_left = 0

    def skip(self, groups: int) -> None:
        """Goes on in the order of the problems as if so many groups had been drawn."""
        for _ in range(groups):
            self.start_group()
            self.draw()
        self.start_group()

    def seed(self, seed: int) -> None:
        """Starts over with the order that ``seed`` decides."""
        self._seed = seed
        self.skipped = frozenset()
        self._outcomes, self._news = Counter(), Counter()
        self.start_group()
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch, self._position = epoch, 0
        usable = [index for index in self.usable if index not in self.skipped] if self.skipped else self.usable
        self._order = self.task.epoch(self.problems, usable, random.Random(f"{self._seed}/{epoch}"))

    def record(self, index: int, correct: bool) -> None:
        """Notes a response to a problem, with a valid reward, if there is a ``difficulty_filter``."""
        if self.difficulty_filter is not None:
            self._outcomes[index, correct] += 1
            self._news[index, correct] += 1

    def take_news(self) -> Outcomes:
        """What was noted since this was last called, for ``add``."""
        news, self._news = self._news, Counter()
        return _listed(news)

    def add(self, outcomes: Outcomes) -> None:
        """Notes what other prompts of the same problems gave as ``take_news``."""
        for index, correct, count in outcomes:
            self._outcomes[index, bool(correct)] += count

    def metrics(self) -> dict[str, float]:
        """How many problems are left out, if there is a ``difficulty_filter``."""
        return {} if self.difficulty_filter is None else {"rollout/problems_skipped": float(len(self.skipped))}

    def _out_of_range(self) -> frozenset[int]:
        """Problems whose share of correct responses is outside of the ``difficulty_filter``."""
        if self.difficulty_filter is None:
            return self.skipped
        low, high = self.difficulty_filter
        out = set()
        for index in {index for index, _ in self._outcomes}:
            right, wrong = self._outcomes[index, True], self._outcomes[index, False]
            if not low <= right / (right + wrong) <= high:
                out.add(index)
        if len(out) == len(self.usable):
            torchrl_logger.warning(
                f"difficulty_filter=[{low}, {high}] leaves out all {len(out)} problems of {self.task.name!r}: all of "
                "them are drawn again."
            )
            return frozenset()
        return frozenset(out)

    def twin(self) -> Prompts:
        """One that shares the problems and their tokens, and goes on by itself."""
        twin = copy(self)
        twin._outcomes, twin._news = self._outcomes.copy(), Counter()
        return twin

    @cached_property
    def digest(self) -> str:
        """Equal for equal problems in the same order."""
        told = hashlib.sha256()
        for index in self.usable:
            told.update(repr((self.problems[index].query, self.problems[index].answer)).encode(errors="replace"))
        return told.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Where drawing is, and with a ``difficulty_filter`` what that goes by."""
        known: dict[str, Any] = {"outcomes": _listed(self._outcomes)} if self._outcomes else {}
        known |= {"skipped": sorted(self.skipped)} if self.skipped else {}
        return known | {
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self._position,
            "next_group": self._next_group,
            "num_problems": len(self),
            "problems": self.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where ``state_dict`` was taken: what is drawn next is what would have been drawn there.

        Raises:
            ValueError: the problems are others.
        """
        if state["num_problems"] != len(self):
            raise ValueError(
                f"the saved environment has num_problems={state['num_problems']}, this one has {len(self)}: use the "
                "dataset, split and max_prompt_tokens of the saved run."
            )
        if state["problems"] != self.digest:
            raise ValueError(
                f"the saved environment has other problems, although both have num_problems={len(self)}: use the "
                "dataset and the seed of the saved run."
            )
        self.seed(state["seed"])
        self.add(state.get("outcomes", ()))
        self.skipped = frozenset(state.get("skipped", ()))
        self._start_epoch(state["epoch"])
        self._position, self._next_group = state["position"], state["next_group"]

    def go_to(self, state: Mapping[str, Any]) -> None:
        """As ``load_state_dict``, but ``take_news`` still gives what was noted before."""
        if state["next_group"] != self._next_group:
            news = self._news
            self.load_state_dict(state)
            self._news = news


def _listed(counts: Mapping[tuple[int, bool], int]) -> list[list[Any]]:
    return [[*key, count] for key, count in sorted(counts.items())]
