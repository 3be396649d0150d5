"""``LLMEnv``: problems of a task in, token transitions out; single- and multi-turn.

It is not a reward function (a ``Task`` has that) and not a sampler (a policy writes the response).
Token in, token out: text is made from response tokens for the task alone, and no text that the
policy wrote is tokenized again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.chat.template import TurnTemplate, check_tools
from torchrl_grpo.checks import check_multiple
from torchrl_grpo.envs.prompts import Prompts
from torchrl_grpo.envs.specs import transition_specs
from torchrl_grpo.reward_pool import Failure, RewardPool, advance
from torchrl_grpo.tasks.base import Dialog, Message, Problem, Split, Task, Turn, TurnLimits, attempt
from torchrl_grpo.tasks.drawing import Drawing, Drawn
from torchrl_grpo.tools import tool_message

_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_PREFILL_TOKENS = 32
_OUTCOME = ("reward", "done", "terminated", "truncated", "correct", "valid")


_LOST = -1
"""Sample of a turn that reached nobody: it is in none."""


@dataclass
class _Sample:
    """A training sample that the policy's next turn may go on with."""

    chat: Sequence[Message]
    between: list[Message]
    tokens: Tensor
    latest: Dialog


@dataclass
class _Row:
    """One row of the environment: what was drawn for it, the dialog so far, and how it ended."""

    drawn: Drawn
    chat: Sequence[Message] = ()  # of the first prompt
    prompt: Tensor | None = None  # its tokens; None where they are those of the problem
    episode: str = ""
    responses: list[str] = field(default_factory=list)
    between: list[Message] = field(default_factory=list)  # all messages after the first prompt's
    sample: int = 0  # of which these are
    others: dict[int, _Sample] = field(default_factory=dict)
    before: _Sample | None = (
        None  # the sample before the latest turn; None where it began with that turn
    )
    samples: list[int] = field(default_factory=list)  # of the turns
    limits: TurnLimits = field(default_factory=TurnLimits)  # for the next turn
    given: int = 0  # tokens before it, of a stateful task
    rewards: list[float | None] = field(
        default_factory=list
    )  # of the turns, where the task rewards them
    reward: float = 0.0
    correct: bool = False
    parts: dict[str, float | None] = field(default_factory=dict)
    valid: bool = True
    error: str = ""
    terminated: bool = False
    truncated: bool = False

    @property
    def problem(self) -> Problem:
        return self.drawn.problem

    @property
    def query(self) -> str:
        """The problem's or, where it has none, the end of the first prompt."""
        return self.problem.query or (str(self.chat[-1]["content"]) if self.chat else "")

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class LLMEnv(EnvBase):
    """Draws problems, gives their prompts as tokens, and scores the responses.

    ``reset`` draws ``num_envs / repeats`` problems, or takes those that ``assign`` gave, and
    repeats each ``repeats`` times, in adjacent rows that share a ``group_id``. Each epoch goes once
    through the split in an order that ``seed`` decides. ``step`` reads ``("tokens", "response")``
    (ragged) and ``"length_stopped"``; a row that is done ignores further responses and repeats its
    outcome, so that the rows of a batch may need different numbers of turns.

    A dialog is *terminated* when the policy ended its turn and the task has no further message; it
    is *truncated* when a token limit cut a turn off, when the task had a further message after
    ``max_turns``, or when the next prompt would be longer than ``max_dialog_tokens``. The task
    scores it in either case, all dialogs that end in one step together. Where the task raises,
    takes too long or ends its process (the last two in a ``RewardPool``), ``"reward_valid"`` is
    False and the reward 0. The reward of a dialog is that of its last transition, also where the
    task rewards turns: their shares are in ``turn_rewards``.

    ``reset`` asks a stateful task for the first prompts, for all rows together, and the task is
    told of the end of each dialog. A row whose opening failed is done from the start and not valid;
    ``stepping`` leaves it out. Such a task may begin another training sample in the middle of a
    dialog: the policy's next turn then has another prompt.

    Args:
        task: the problems and their scorer.
        tokenizer: with a chat template.

    Keyword Args:
        num_envs: rows, a multiple of ``repeats``.
        repeats: rows per problem (the group size).
        split: ``"train"`` or ``"test"``.
        max_prompt_tokens: problems whose prompts are longer, or have no token at all, are dropped
            and counted in ``num_dropped``. None keeps all.
        max_dialog_tokens: longest prompt of a later turn; by default ``max_prompt_tokens``.
        max_turns: most turns that the policy has in one dialog.
        seed: decides the order of the problems.
        reward_pool: scores the task's dialogs in processes of their own; None scores here. Several
            environments may share it, and who made it closes it.
        template_arguments: of the chat template, such as ``enable_thinking``.

    Raises:
        ValueError: a number is out of range, the tokenizer has no chat template, or no problem is
            left.

    Examples:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_grpo.starter import starter_path
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> env = LLMEnv(ArithmeticTask(), AutoTokenizer.from_pretrained(starter_path()), num_envs=8, repeats=4)
        >>> env.reset()["group_id"].squeeze(-1)
        tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """

    input_mode = "tokens"  # TorchRL's transforms ask for it; HistoryTransforms makes it "history"

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_envs: int,
        repeats: int,
        split: Split = "train",
        max_prompt_tokens: int | None = None,
        max_dialog_tokens: int | None = None,
        max_turns: int = 1,
        seed: int = 0,
        reward_pool: RewardPool | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        check_multiple("num_envs", num_envs, repeats, f"repeats={repeats}, at least 1")
        if max_turns < 1:
            raise ValueError(
                f"max_turns={max_turns} must be at least 1: use 1 for single-turn tasks."
            )
        if tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer={tokenizer.name_or_path!r} must have a chat template, it has none: use "
                "the model's instruct version, or set tokenizer.chat_template."
            )
        super().__init__(batch_size=(num_envs,))
        self.task = task
        self.tokenizer = tokenizer
        self.repeats = repeats
        self._split = split
        self.max_dialog_tokens = max_dialog_tokens or max_prompt_tokens
        self.max_turns = max_turns
        self.reward_pool = reward_pool
        self.template_arguments = dict(template_arguments or {})
        self.prompts = Prompts(task, tokenizer, split, max_prompt_tokens, self.template_arguments)
        self.drawing = Drawing(task, self.prompts.problems, self.prompts.usable)
        self._has_datasets = any(
            self.prompts.problems[i].dataset for i in (0, -1)
        )  # further test sets come last
        self.counts: Counter[str] = Counter()
        self._template = TurnTemplate(tokenizer, self.template_arguments)
        self._logged_failures: set[tuple[Any, ...]] = vars(task).setdefault(
            "_logged_failures", set()
        )  # of all its envs
        if (
            max_turns > 1
        ):  # what the template does not take, it does not take at the end of a rollout either
            self._template.text([{"role": "user", "content": "@"}])
            if task.tools:
                self._template.text([tool_message("@", "@")])
        self._set_seed(seed)
        self._rows: list[_Row] = []
        self._assigned: list[Drawn] = []
        self._copies: list[
            Drawn
        ] = []  # of the group that was drawn last, for rows that are reset one by one
        self._received: dict[int, tuple[Dialog, Future[Turn | Failure]]] = {}
        self.latest: dict[int, Dialog] = {}
        self._draws = True
        self._set_specs()

    def _set_specs(self) -> None:
        rows = self.batch_size[0]
        specs = transition_specs(rows, len(self.tokenizer), self.task.has_parts, self._has_datasets)
        for name, spec in specs.items():
            setattr(self, name, spec)

    def with_rows(self, num_envs: int) -> LLMEnv:
        """Return an environment with this many rows that shares problems, prompts and reward
        workers, and has its own dialogs.

        What it plays it is to be told by ``assign``: it draws nothing.
        """
        check_multiple("num_envs", num_envs, self.repeats, f"repeats={self.repeats}, at least 1")
        new = object.__new__(type(self))
        EnvBase.__init__(new, batch_size=(num_envs,))
        shared = {name: value for name, value in self.__dict__.items() if name not in new.__dict__}
        new.__dict__.update(
            shared, _rows=[], _assigned=[], _received={}, latest={}, counts=Counter()
        )
        new._set_specs()
        return new

    def fake_tensordict(self) -> TensorDictBase:
        """Return an example transition; as in the real data, rows of tokens are a lazy stack."""
        fake = super().fake_tensordict()
        for key in ("tokens", ("next", "tokens")):
            fake.set(key, lazy_stack(list(fake.get(key).unbind(0))))
        return fake

    @property
    def num_problems(self) -> int:
        """Problems that can be drawn."""
        return len(self.prompts)

    @property
    def num_dropped(self) -> int:
        """Problems whose prompts are too long."""
        return self.prompts.num_dropped

    def _set_seed(self, seed: int | None) -> None:
        self.drawing.seed(0 if seed is None else int(seed))
        self._copies = []

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the position in the data. Dialogs in progress are not part of it: save between two
        rollouts.
        """
        return self.drawing.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Restore ``state_dict``: the next ``reset`` draws what would have been drawn there.

        Raises:
            ValueError: the state is from an environment with other problems.
        """
        self.drawing.load_state_dict(state_dict)
        self._copies = []

    # Transitions

    def assign(self, drawn: Sequence[Drawn]) -> None:
        """Make the next ``reset`` play these groups, one for each ``repeats`` rows, instead of
        drawing.
        """
        if len(drawn) * self.repeats != self.batch_size[0]:
            raise ValueError(
                f"assign() needs {self.batch_size[0] // self.repeats} groups, it was given "
                f"{len(drawn)}."
            )
        self._assigned = list(drawn)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or bool(mask.all()) or not self._rows:
            # Starting afresh keeps groups whole and adjacent, whatever partial resets came before.
            self._copies = []
            groups = self.batch_size[0] // self.repeats
            drawn = self._assigned or [self.drawing.draw() for _ in range(groups)]
            self._draws = not self._assigned
            self._assigned = []
            self._end_episodes(self._rows)
            self._rows = [self._row(one, member) for one in drawn for member in range(self.repeats)]
            new = self._rows
        else:
            new = []
            for row in mask.reshape(-1).nonzero().reshape(-1).tolist():
                self._copies = self._copies or [self.drawing.draw()] * self.repeats
                self._end_episodes([self._rows[row]])
                self._rows[row] = self._row(self._copies.pop(), len(self._copies))
                new.append(self._rows[row])
        self._received = {}
        if self.task.is_stateful:
            self._open(new)
        blank = [_Row(row.drawn) for row in self._rows]
        columns: dict[str, Any] = self._outcome_columns(blank, ("correct", "valid"))
        columns[keys.QUERY] = NonTensorStack(*[NonTensorData(row.query) for row in self._rows])
        if self._has_datasets:
            columns[keys.DATASET] = NonTensorStack(
                *[NonTensorData(row.problem.dataset) for row in blank]
            )
        if self.task.has_parts:
            columns[keys.REWARD_PARTS[-1]] = NonTensorStack(
                *[NonTensorData(row.parts) for row in blank]
            )
        return TensorDict(
            {
                "tokens": lazy_stack(
                    [TensorDict({"prompt": self._prompt_of(row)}) for row in self._rows]
                ),
                keys.GROUP_ID: torch.tensor([row.drawn.group for row in blank]).unsqueeze(-1),
                "text": TensorDict(
                    {"response": NonTensorStack(*[NonTensorData("")] * len(blank))}, self.batch_size
                ),
                **columns,
            },
            self.batch_size,
        )

    def _row(self, drawn: Drawn, member: int) -> _Row:
        """A new dialog of a member of a group."""
        episode = (
            f"{self._split}-{self.repeats}/{drawn.group}/{member}" if self.task.is_stateful else ""
        )
        return _Row(drawn, self.task.messages(drawn.problem), episode=episode)

    def _prompt_of(self, row: _Row) -> Tensor:
        return (
            self.prompts.tokens(row.drawn.index, row.problem) if row.prompt is None else row.prompt
        )

    def _open(self, rows: Sequence[_Row]) -> None:
        """Asks the task for the first prompts of rows; where it has none for a row, the row is done
        and not valid.
        """
        takes_tools = self._takes_tools
        dialogs = [
            Dialog(
                row.problem, [], row.chat, last=False, episode=row.episode, takes_tools=takes_tools
            )
            for row in rows
        ]
        if self.reward_pool is None:
            turns = advance(self.task, dialogs)
        else:
            turns = [future.result() for future in self.reward_pool.submit_all(dialogs)]
        for row, turn in zip(rows, turns, strict=True):
            failure = turn if isinstance(turn, Failure) else self._accept_opening(row, turn)
            if failure is not None:
                self._invalidate(row, failure)
                row.terminated = True
                self._end_episodes([row])

    @cached_property
    def _takes_tools(self) -> bool:
        """Whether the chat template writes tools that a task brings."""
        function = {
            "name": "probe",
            "description": "?",
            "parameters": {"type": "object", "properties": {}},
        }
        try:
            check_tools(
                self.tokenizer,
                [{"type": "function", "function": function}],
                **self.template_arguments,
            )
        except ValueError:
            return False
        return True

    def _accept_opening(self, row: _Row, turn: Turn) -> Failure | None:
        """Takes a row's first prompt; returns why it cannot be one."""
        self.counts.update(turn.counts)
        try:
            if turn.messages is None:
                raise ValueError("the dialog was over before its first prompt.")
            prompt = self._first_prompt_tokens(turn)
            most = self.max_dialog_tokens
            if not prompt.numel() or (most is not None and prompt.numel() > most):
                room = "" if most is None else f" to {most}"
                raise ValueError(
                    f"the first prompt of a dialog must have 1{room} tokens, it has "
                    f"{prompt.numel()}."
                )
        except (ValueError, RecursionError) as error:
            return Failure.of(error)
        row.chat, row.prompt = list(turn.messages), prompt
        row.limits, row.given = turn.limits, prompt.numel()
        return None

    def _first_prompt_tokens(self, turn: Turn) -> Tensor:
        """[T] int64, a whole chat, or a whole text where its one message has no role.

        Raises:
            ValueError: the chat template does not take it.
        """
        messages = list(turn.messages or ())
        if messages and not messages[0]["role"]:
            return self._text_tokens(messages, begins=True)
        return self.prompts.chat_tokens(
            messages, self.task.tools if turn.tools is None else turn.tools
        )

    def _text_tokens(self, messages: Sequence[Message], *, begins: bool) -> Tensor:
        """[T] int64, a text as it is: who writes it writes its control tokens, too."""
        ids = self.tokenizer(messages[0]["content"], add_special_tokens=begins)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def _end_episodes(self, rows: Sequence[_Row]) -> None:
        """Tells the task, once, that dialogs are over."""
        for row in rows:
            episode, row.episode = row.episode, ""
            if episode and self.reward_pool is not None:
                self.reward_pool.end(episode)
            elif episode and isinstance(error := attempt(self.task.close, episode), Exception):
                failure = Failure.of(error)
                if self._is_new(failure):
                    torchrl_logger.error(
                        f"LLMEnv: task {self.task.name!r} failed to close a dialog.\n{failure.text}"
                    )

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Gives up the dialogs in progress. May be called again."""
        self._end_episodes(self._rows)
        super().close(raise_if_closed=raise_if_closed)

    @property
    def stepping(self) -> Tensor:
        """[B] bool, the rows whose dialogs go on."""
        return torch.tensor([not row.done for row in self._rows])

    @property
    def turn_rewards(self) -> list[list[float | None]]:
        """Rewards that the task gave to each row's turns, None where it gave none."""
        return [row.rewards for row in self._rows]

    def limits(self, row: int) -> TurnLimits:
        """Limit of a row's next turn."""
        return self._rows[row].limits

    def receive(
        self, row: int, response: Tensor, length_stopped: bool, log_probs: Tensor | None = None
    ) -> None:
        """Take a row's response before the step, so that its dialog is scored while others are
        still being sampled.

        Nothing happens without a ``reward_pool``: scoring here would hold up the sampling.

        Args:
            row: index.
            response: [T] int64, what ``step`` will find there.
            length_stopped: as ``step`` will find it.
            log_probs: [T] float32, as ``step`` will find them.
        """
        if self.reward_pool is not None:
            dialog = self._dialog(row, response.tolist(), length_stopped, log_probs)
            self._received[row] = (dialog, self.reward_pool.submit(dialog))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = tensordict.get("tokens").unbind(0)
        stepping = tensordict.get("_step", None)
        active = [
            row
            for row, state in enumerate(self._rows)
            if not state.done and (stepping is None or bool(stepping[row].any()))
        ]
        responses = {row: rows[row].get(keys.RESPONSE[-1]) for row in active}
        length_stopped = tensordict.get(keys.LENGTH_STOPPED).reshape(-1).tolist()
        scores = tensordict.get(keys.LOG_PROBS[0], None)
        dialogs = {
            row: self._dialog(
                row,
                responses[row].tolist(),
                length_stopped[row],
                None
                if scores is None
                else scores[row].get(keys.LOG_PROBS[-1])[-len(responses[row]) :],
            )
            for row in active
        }
        self.latest = dialogs
        prompts = [row.get(keys.PROMPT[-1]) for row in rows]
        again: dict[int, Dialog] = {}
        for row, turn in zip(active, self._advance(dialogs), strict=True):
            prompts[row] = torch.cat([prompts[row], responses[row]])
            self._rows[row].responses.append(dialogs[row].responses[-1])
            self._rows[row].rewards.append(None)
            self._rows[row].samples.append(self._rows[row].sample)
            self._rows[row].between.append(dialogs[row].messages[-1])
            longer = self._take(row, dialogs[row], turn, prompts[row])
            if longer is not None:
                prompts[row] = longer
            elif self._rows[row].truncated and isinstance(turn, Turn) and turn.score is None:
                again[row] = replace(
                    dialogs[row], finish_reason="length"
                )  # its answer found no room: it ends here
        for row, turn in zip(again, self._advance(again), strict=True):
            self._take(row, again[row], turn, prompts[row])
        self._end_episodes([self._rows[row] for row in active if self._rows[row].done])
        if self.input_mode == "tokens":  # else HistoryTransforms has the last word
            self.note_outcomes()
        text_column = [row.responses[-1] if row.responses else "" for row in self._rows]
        columns: dict[str, Any] = self._outcome_columns(self._rows, _OUTCOME)
        if self.task.has_parts:
            columns[keys.REWARD_PARTS[-1]] = NonTensorStack(
                *[NonTensorData(row.parts) for row in self._rows]
            )
        return TensorDict(
            {
                "tokens": lazy_stack([TensorDict({"prompt": prompt}) for prompt in prompts]),
                "text": TensorDict({"response": NonTensorStack(*text_column)}, self.batch_size),
                **columns,
            },
            self.batch_size,
        )

    def _dialog(
        self, row: int, tokens: list[int], length_stopped: bool, log_probs: Tensor | None
    ) -> Dialog:
        """Return the dialog of a row with a further response, reusing the received one if it is the
        same.
        """
        received, _ = self._received.get(row, (None, None))
        if received is not None and received.tokens == tokens:
            return received
        state, text = self._rows[row], self.tokenizer.decode(tokens, skip_special_tokens=True)
        messages = [*state.chat, *state.between, {"role": "assistant", "content": text}]
        told: list[tuple[str, float]] = []
        if state.limits.log_probs and log_probs is not None:
            told = list(zip(map(self.tokenizer.decode, tokens), log_probs.tolist(), strict=True))
        return Dialog(
            problem=state.problem,
            responses=[*state.responses, text],
            messages=messages,
            tokens=tokens,
            finish_reason="length" if length_stopped else "stop",
            raw=self.tokenizer.decode(tokens) if self.task.tools or self.task.is_stateful else "",
            last=len(state.responses) + 1 >= self.max_turns,
            prefill=self._prefill(state),
            episode=state.episode,
            prompt_tokens=state.given,
            log_probs=told,
        )

    def _prefill(self, row: _Row) -> str:
        """What the chat template begins each of a row's turns with, where it is a thought."""
        match = _THOUGHT.search(self.tokenizer.decode(self._prompt_of(row)[-_PREFILL_TOKENS:]))
        return match[0] if match else ""

    def _advance(self, dialogs: Mapping[int, Dialog]) -> list[Turn | Failure]:
        """Ask the task about the dialogs of rows."""
        if not dialogs:
            return []
        if self.reward_pool is None:
            return advance(self.task, list(dialogs.values()))
        futures = []
        for row, dialog in dialogs.items():
            received, future = self._received.pop(row, (None, None))
            futures.append(
                future
                if future is not None and received is dialog
                else self.reward_pool.submit(dialog)
            )
        return [future.result() for future in futures]

    def _take(
        self, row: int, dialog: Dialog, turn: Turn | Failure, tokens: Tensor
    ) -> Tensor | None:
        """End a row's dialog, or append the task's answer to it.

        Returns:
            [T] int64, all tokens with the answer; None where the dialog ended, or there is no room
            for the answer.
        """
        state = self._rows[row]
        if isinstance(turn, Failure):
            tool_failure_reply = (
                self.task.tool_failure_reply(dialog, turn.told) if turn.told else None
            )
            if tool_failure_reply is None or dialog.last:
                self._invalidate(state, turn)
                state.truncated = dialog.finish_reason == "length"
                state.terminated = not state.truncated
                return None
            calls = sum(message["role"] == "tool" for message in tool_failure_reply)
            turn = Turn(tool_failure_reply, None, {"tools/calls": calls, "tools/errors": calls})
        self.counts.update(turn.counts)
        if turn.undelivered:
            self._forget(state)
        else:
            state.others[state.sample] = _Sample(state.chat, state.between, tokens, dialog)
        if turn.reward is not None:
            state.rewards[-1] = turn.reward
        if turn.score is not None:
            state.reward, state.correct = turn.score.reward, turn.score.correct
            state.parts = dict(turn.score.parts)
            cut = dialog.finish_reason == "length" and not turn.undelivered
            state.truncated = cut or turn.messages is not None
            state.terminated = not state.truncated
            return None
        try:
            longer = self._continued(state, turn)
        except (
            ValueError,
            RecursionError,
        ) as error:  # what an agent asks, the template need not take
            if not self.task.is_stateful:
                raise
            self._invalidate(state, Failure.of(error))
            state.terminated = True
            return None
        if longer is None:
            state.truncated = True
        else:
            state.limits, state.given = turn.limits, longer.numel()
        return longer

    @staticmethod
    def _forget(state: _Row) -> None:
        """Undo what a row's latest turn did to its sample."""
        if state.before is not None:
            state.others[state.sample] = state.before
        state.samples[-1] = state.sample = _LOST
        state.between = []

    def _continued(self, state: _Row, turn: Turn) -> Tensor | None:
        """All tokens of the sample that the task's answer goes on with, or that it begins; None
        without room.
        """
        messages, old = turn.messages or (), state.others.get(turn.sample)
        longer = (
            self._if_fits(self._first_prompt_tokens(turn))
            if old is None
            else self._append_reply(old.tokens, messages, old.latest)
        )
        if longer is None:
            return None
        state.others.pop(turn.sample, None)
        state.before, state.sample = old, turn.sample
        state.chat, state.between = (
            (messages, []) if old is None else (old.chat, [*old.between, *messages])
        )
        return longer

    def _append_reply(
        self, tokens: Tensor, messages: Sequence[Message], dialog: Dialog
    ) -> Tensor | None:
        """Return all tokens with messages after the latest turn; None if there is no room for them."""
        if messages and not messages[0]["role"]:
            between = self._text_tokens(messages, begins=False)
        else:
            between = self._template.tokens(messages, dialog.tokens)
        return self._if_fits(torch.cat([tokens, between]))

    def _if_fits(self, tokens: Tensor) -> Tensor | None:
        return (
            tokens
            if self.max_dialog_tokens is None or tokens.numel() <= self.max_dialog_tokens
            else None
        )

    @property
    def dialogs(self) -> list[Dialog]:
        """Return the dialog of each row so far, including messages after the latest turn."""
        chats = [[*row.chat, *row.between] for row in self._rows]
        return [
            Dialog(row.problem, row.responses, chat)
            for row, chat in zip(self._rows, chats, strict=True)
        ]

    @property
    def transcripts(self) -> list[dict[int, str]]:
        """Return each row's dialog after its prompt, as text, by sample; other roles begin with
        ``[role]``.
        """

        def line(message: Message) -> str:
            said = str(message["content"])
            return said if message["role"] in ("assistant", "") else f"[{message['role']}] {said}"

        chats = [
            {row.sample: row.between}
            | {number: sample.between for number, sample in row.others.items()}
            for row in self._rows
        ]
        return [
            {number: "\n".join(map(line, chat)) for number, chat in one.items()} for one in chats
        ]

    @property
    def samples(self) -> list[list[int]]:
        """Number of the training sample of each turn, for each row."""
        return [row.samples for row in self._rows]

    @property
    def errors(self) -> list[str]:
        """Return in a line why each row's reward is invalid; empty if it is valid."""
        return [row.error for row in self._rows]

    def check_role(self, role: str) -> None:
        """Raise ``ValueError`` if the chat template rejects messages of a role after the policy's
        turn.
        """
        self._template.text([{"role": role, "content": "@"}])

    def resume(self, row: int, messages: Sequence[Message], tokens: Tensor) -> Tensor | None:
        """Continue after a row's latest turn, the end of ``tokens``, with messages that replace the
        task's answer or score; return all tokens. Return None and change nothing if the turn was
        cut off, was the last one, or there is no room.
        """
        dialog, state = self.latest[row], self._rows[row]
        if dialog.last or dialog.finish_reason == "length":
            return None
        longer = self._append_reply(tokens, messages, dialog)
        if longer is not None:
            said = dialog.messages[len(state.chat) :]
            self._rows[row] = _Row(
                state.drawn, state.chat, responses=state.responses, between=[*said, *messages]
            )
        return longer

    def note_outcomes(self) -> None:
        """Count the dialogs that ended in the latest step for the drawing, where this environment
        draws.
        """
        if self._draws:
            self.drawing.record(
                (self._rows[row].drawn.index, self._rows[row].correct)
                for row in self.latest
                if self._rows[row].done and self._rows[row].valid
            )

    def finish(self, row: int, *, truncated: bool) -> None:
        """Ends a row's dialog."""
        self._rows[row].terminated, self._rows[row].truncated = not truncated, truncated

    def _invalidate(self, row: _Row, failure: Failure) -> None:
        """Mark the dialog as not scored; log each kind of failure once."""
        row.valid, row.error = False, failure.line
        self.counts[f"rewards/invalid_{failure.cause}"] += 1
        if self._is_new(failure):
            torchrl_logger.error(
                f"LLMEnv: task {self.task.name!r} failed on query {row.problem.query!r:.500}; its "
                "reward is marked invalid. Further errors of this kind are not "
                f"logged.\n{failure.text}"
            )

    def _is_new(self, failure: Failure) -> bool:
        """Whether a failure is the first of its kind."""
        known = failure.kind in self._logged_failures
        self._logged_failures.add(failure.kind)
        return not known

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, as metrics that add up; ``RewardPool.take_counts``
        included.
        """
        counts, self.counts = self.counts, Counter()
        tools = dict.fromkeys(("tools/calls", "tools/errors") if self.task.tools else (), 0)
        return {
            **tools,
            **counts,
            **({} if self.reward_pool is None else self.reward_pool.take_counts()),
        }

    @staticmethod
    def _outcome_columns(rows: Sequence[_Row], names: Sequence[str]) -> dict[str, Tensor]:
        """Return attributes of the rows as [B, 1] columns."""
        columns = {
            name: torch.tensor([getattr(row, name) for row in rows]).unsqueeze(-1) for name in names
        }
        columns[keys.REWARD_VALID] = columns.pop("valid")
        return columns
