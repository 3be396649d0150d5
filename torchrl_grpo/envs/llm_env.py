"""``LLMEnv``: problems of a task in, token transitions out; single- and multi-turn.

The policy samples, and the task scores. Tokens in, tokens out: response tokens are decoded only for
the task, and the policy's text is never tokenized again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.checks import check_multiple
from torchrl_grpo.envs.dialog_state import DialogState, Outcome, SampleState
from torchrl_grpo.envs.prompts import Prompts
from torchrl_grpo.envs.replies import Replies
from torchrl_grpo.envs.specs import transition_specs
from torchrl_grpo.host.progress import scoring
from torchrl_grpo.images import (
    Prompt,
    Spans,
    images_in,
    images_of,
    tokens_of,
)
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.reward_pool import Failure, RewardPool, advance
from torchrl_grpo.rewards.spec import part_weight
from torchrl_grpo.tasks.base import Dialog, Split, Task, Turn, attempt
from torchrl_grpo.tasks.drawing import Drawing, Drawn
from torchrl_grpo.tools.toolbox import CallFormat

_UNREADABLE = "error: the result has an image, which cannot be read here"
_NO_REWARD = Failure(
    ("none",),
    "no reward with a weight applies: functions that compare responses need two with valid rewards.",
    "none",
    line="no reward applies",
)
_OUTCOME = ("reward", "done", "terminated", "truncated", "correct", "valid")


class LLMEnv(EnvBase):
    """Environment that draws problems, returns their prompts as tokens, and scores responses.

    ``reset`` draws ``num_envs / repeats`` problems, or plays the groups in ``reset(drawn=groups)``.
    Each problem fills ``repeats`` adjacent rows that share a ``group_id``. Each epoch goes through the
    split once, in an order set by ``seed``. ``step`` reads ``("tokens", "response")`` (ragged) and
    ``"length_stopped"`` (without it, a response that does not end with the tokenizer's
    ``eos_token`` counts as cut off). A row that is done ignores further responses and repeats its
    outcome, so the rows of a batch may need different numbers of turns.

    A dialog is *terminated* when the policy ended its turn and the task has no further message. It
    is *truncated* when a token limit cut a turn off, when the task had a further message after
    ``max_turns``, or when the next prompt would be longer than ``max_dialog_tokens``. The task
    scores it in either case; dialogs that end in the same step are scored together. If the task
    raises, takes too long or ends its process (the last two only in a ``RewardPool``),
    ``"reward_valid"`` is False and the reward is 0. The reward of a dialog is the reward of its
    last transition, even if the task rewards turns: their shares are in ``turn_rewards``.

    ``reset`` asks a stateful task for the first prompts of all rows at once, and the task is closed
    once for each dialog that ends. A row whose opening failed is done from the start and invalid;
    ``stepping`` leaves it out. A stateful task may begin another training sample in the middle of a
    dialog: the policy's next turn then has another prompt.

    Args:
        task: source of problems and scores.
        tokenizer: a tokenizer with a chat template.

    Keyword Args:
        num_envs: number of rows, a multiple of ``repeats``.
        repeats: number of rows per problem (the group size).
        split: ``"train"`` or ``"test"``.
        max_prompt_tokens: maximum length of a prompt. Problems with longer prompts, or with empty
            ones, are dropped and counted in ``num_dropped``. None keeps all.
        max_dialog_tokens: maximum length of a later turn's prompt; by default
            ``max_prompt_tokens``.
        max_turns: maximum number of the policy's turns in one dialog.
        seed: seed of the order of the problems.
        reward_pool: scores the task's dialogs in separate processes; None scores them here. Several
            environments may share a pool, and its owner closes it.
        template_arguments: arguments for the chat template, such as ``enable_thinking``.
        image_encoder: encodes the images of prompts; None for models that read only text.
        device: device of the tensors that ``reset`` and ``step`` return; None for the CPU.

    Raises:
        ValueError: a number is out of range, the tokenizer has no chat template, no problem is left,
            or the task has tools, but the chat template writes calls that cannot be parsed.

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
        image_encoder: ImageEncoder | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_multiple("num_envs", num_envs, repeats, f"repeats={repeats}, at least 1")
        if max_turns < 1:
            raise ValueError(
                f"max_turns={max_turns} must be at least 1: use 1 for single-turn tasks."
            )
        if tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer={tokenizer.name_or_path!r} must have a chat template: use the model's "
                "instruct version, or set tokenizer.chat_template."
            )
        super().__init__(batch_size=(num_envs,), device=device)
        self.task = task
        self.tokenizer = tokenizer
        self.repeats = repeats
        self._split = split
        self.max_turns = max_turns
        self.reward_pool = reward_pool
        self.template_arguments = dict(template_arguments or {})
        self.has_images = image_encoder is not None
        self.prompts = Prompts(
            task, tokenizer, split, max_prompt_tokens, self.template_arguments, image_encoder
        )
        self.drawing = Drawing(task, self.prompts.problems, self.prompts.usable)
        problems = self.prompts.problems  # further test sets come last
        self._has_datasets = bool(problems[0].dataset or problems[-1].dataset)
        self.counts: Counter[str] = Counter()
        self.replies = Replies(
            self.prompts,
            tokenizer,
            self.template_arguments,
            max_dialog_tokens or max_prompt_tokens,
        )
        # Shared by all environments of the task.
        self._logged_failures: set[tuple[Any, ...]] = vars(task).setdefault(
            "_logged_failures", set()
        )
        if max_turns > 1:  # fails early if the template cannot render a further turn
            self.replies.check_role("user")
            if task.tools:
                self.replies.check_role("tool")
        self.call_format: CallFormat | None = ""
        if task.reads_calls and (task.tools or task.is_stateful):
            try:
                self.call_format = self.replies.call_format
            except ValueError:
                if task.tools:
                    raise
                self.call_format = None  # an agent may not need tools
        self._set_seed(seed)
        self._rows: list[DialogState] = []
        # State of the group drawn last, for rows that are reset one by one.
        self._copies: list[Drawn] = []
        self._received: dict[int, tuple[Dialog, Future[Turn | Failure]]] = {}
        self.latest: dict[int, Dialog] = {}
        self._draws = True
        self._set_specs()

    def _set_specs(self) -> None:
        rows = self.batch_size[0]
        specs = transition_specs(
            rows, len(self.tokenizer), self.task.has_parts, self._has_datasets, self.has_images
        )
        for name, spec in specs.items():
            setattr(self, name, spec if self.device is None else spec.to(self.device))

    def with_rows(self, num_envs: int) -> LLMEnv:
        """Return an environment with this many rows that shares problems, prompts and reward
        workers with this one, but has its own dialogs.

        Let this one draw for it: ``reset(drawn=groups)``.
        """
        check_multiple("num_envs", num_envs, self.repeats, f"repeats={self.repeats}, at least 1")
        new = object.__new__(type(self))
        EnvBase.__init__(new, batch_size=(num_envs,), device=self.device)
        shared = {name: value for name, value in self.__dict__.items() if name not in new.__dict__}
        new.__dict__.update(shared, _rows=[], _received={}, latest={}, counts=Counter())
        new._set_specs()
        return new

    @property
    def num_problems(self) -> int:
        """Number of problems that can be drawn."""
        return len(self.prompts)

    @property
    def num_dropped(self) -> int:
        """Number of problems dropped because their prompts are too long or empty."""
        return self.prompts.num_dropped

    def _set_seed(self, seed: int | None) -> None:
        self.drawing.seed(0 if seed is None else int(seed))
        self._copies = []

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the position in the data. It does not include dialogs in progress, so save it
        between two rollouts.
        """
        return self.drawing.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Restore ``state_dict``: the next ``reset`` draws the same problems as it would have then.

        Raises:
            ValueError: the state is from an environment with other problems.
        """
        self.drawing.load_state_dict(state_dict)
        self._copies = []

    # Transitions

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        drawn: Sequence[Drawn] = (),
        **kwargs: Any,
    ) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or bool(mask.all()) or not self._rows:
            # A full reset keeps groups whole and adjacent, regardless of earlier partial resets.
            self._copies = []
            groups = self.batch_size[0] // self.repeats
            if drawn and len(drawn) != groups:
                raise ValueError(f"reset(drawn=) needs {groups} groups, but got {len(drawn)}.")
            self._draws = not drawn
            drawn = drawn or [self.drawing.draw() for _ in range(groups)]
            self._end_episodes(self._rows)
            self._rows = [
                self._begin(group, member) for group in drawn for member in range(self.repeats)
            ]
            new = self._rows
        else:
            if self.task.group_rewards:
                raise ValueError(
                    "LLMEnv.reset must reset all rows at once, because a reward compares the "
                    "responses to a problem: use RolloutCollector."
                )
            new = []
            for row in mask.reshape(-1).nonzero().reshape(-1).tolist():
                self._copies = self._copies or [self.drawing.draw()] * self.repeats
                self._end_episodes([self._rows[row]])
                self._rows[row] = self._begin(self._copies.pop(), len(self._copies))
                new.append(self._rows[row])
        self._received = {}
        if self.task.is_stateful:
            self._open(new)
        blank = [Outcome() for _ in self._rows]
        columns = self._outcome_columns(blank, ("correct", "valid"))
        columns[keys.QUERY] = NonTensorStack(*[row.query for row in self._rows])
        if self._has_datasets:
            columns[keys.DATASET] = NonTensorStack(*[row.problem.dataset for row in self._rows])
        prompts = list(map(self._prompt_of, self._rows))
        return TensorDict(
            {
                **_prompt_columns(list(map(tokens_of, prompts))),
                **self._image_columns(list(map(images_of, prompts))),
                keys.GROUP_ID: torch.tensor([row.drawn.group for row in self._rows]).unsqueeze(-1),
                keys.PROBLEM: torch.tensor([row.drawn.index for row in self._rows]).unsqueeze(-1),
                "text": TensorDict(
                    {"response": NonTensorData("", self.batch_size)}, self.batch_size
                ),
                **columns,
            },
            self.batch_size,
            device=self.device,
        )

    def _begin(self, drawn: Drawn, member: int) -> DialogState:
        """Return a new dialog for a member of a group."""
        stateful = self.task.is_stateful
        episode = f"{self._split}-{self.repeats}/{drawn.group}/{member}" if stateful else ""
        return DialogState(
            drawn, SampleState(0, self.task.messages(drawn.problem)), episode=episode
        )

    def _prompt_of(self, row: DialogState) -> Tensor | Prompt:
        """Return a row's first prompt, [T] int64 if it has no images."""
        if row.prompt is None:
            row.prompt = self.prompts.of_problem(row.drawn.index, row.problem)
            if images_of(row.prompt):
                row.current = replace(row.current, images=images_of(row.prompt))
        return row.prompt

    def _open(self, rows: Sequence[DialogState]) -> None:
        """Ask the task for the first prompts of rows. Rows without one are done and invalid."""
        dialogs = [
            Dialog(
                row.problem,
                [],
                row.current.chat,
                last=False,
                episode=row.episode,
                takes_tools=self.call_format is not None and self.replies.takes_tools,
                image_roles=self.replies.image_roles,
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
                self._end_episodes([row])

    def _accept_opening(self, row: DialogState, turn: Turn) -> Failure | None:
        """Accept a row's first prompt, or return why it is invalid."""
        self.counts.update(turn.counts)
        try:
            row.prompt = self.replies.opening(turn)
        except (ValueError, RecursionError) as error:
            return Failure.of(error)
        row.continue_with(0, turn.messages or (), row.prompt, turn.limits)
        return None

    def _end_episodes(self, rows: Sequence[DialogState]) -> None:
        """Close the finished dialogs of a stateful task, each once."""
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
        """Abandon the dialogs in progress. May be called again."""
        self._end_episodes(self._rows)
        super().close(raise_if_closed=raise_if_closed)

    @property
    def stepping(self) -> Tensor:
        """Whether the dialog of each row continues, [B] bool."""
        return torch.tensor([not row.outcome.done for row in self._rows])

    @property
    def states(self) -> Sequence[DialogState]:
        """Dialog of each row, with its turns and its outcome."""
        return self._rows

    def receive(
        self, row: int, response: Tensor, length_stopped: bool, log_probs: Tensor | None = None
    ) -> None:
        """Accept a row's response before ``step``, so that its dialog is scored while others are
        still being sampled.

        Does nothing without a ``reward_pool``, because scoring here would block the sampling.

        Args:
            row: index of the row.
            response: [T] int64, the response that ``step`` will read.
            length_stopped: the value that ``step`` will read.
            log_probs: [T] float32, the log-probs that ``step`` will read.
        """
        if self.reward_pool is not None:
            dialog = self._dialog(row, response.tolist(), length_stopped, log_probs)
            self._received[row] = (dialog, self.reward_pool.submit(dialog))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.device is not None:
            tensordict = tensordict.cpu()
        tokens, dialogs = self._read_responses(tensordict)
        self.latest = dialogs
        cut_off: dict[int, Dialog] = {}
        for (row, dialog), turn in zip(dialogs.items(), self._advance(dialogs), strict=True):
            state = self._rows[row]
            state.add_turn(dialog, tokens[row])
            longer = self._take_turn(state, dialog, turn)
            if longer is not None:
                tokens[row] = longer
            elif state.outcome.truncated and isinstance(turn, Turn) and turn.score is None:
                # There was no room for the task's reply, so the dialog ends with the response.
                cut_off[row] = replace(dialog, finish_reason="length")
        for row, turn in zip(cut_off, self._advance(cut_off), strict=True):
            self._take_turn(self._rows[row], cut_off[row], turn)
        if self.task.group_rewards and dialogs and not self.stepping.any():
            self._compare()
        self._end_episodes([self._rows[row] for row in dialogs if self._rows[row].outcome.done])
        if self.input_mode == "tokens":  # otherwise HistoryTransforms counts them later
            self.note_outcomes()
        responses = [row.responses[-1] if row.responses else "" for row in self._rows]
        return TensorDict(
            {
                **_prompt_columns(tokens),
                **self._image_columns([row.current.images for row in self._rows]),
                "text": TensorDict({"response": NonTensorStack(*responses)}, self.batch_size),
                **self._outcome_columns([row.outcome for row in self._rows], _OUTCOME),
            },
            self.batch_size,
            device=self.device,
        )

    def _read_responses(self, tensordict: TensorDictBase) -> tuple[list[Tensor], dict[int, Dialog]]:
        """Return all tokens of each row, and the dialogs that continue, by row, with the responses."""
        rows = tensordict.get("tokens").unbind(0)
        stepping = tensordict.get(keys.STEPPING, None)
        length_stopped = tensordict.get(keys.LENGTH_STOPPED, None)
        log_probs = tensordict.get(keys.LOG_PROBS[0], None)
        tokens = [row.get(keys.PROMPT[-1]) for row in rows]
        end = [self.tokenizer.eos_token_id]
        dialogs: dict[int, Dialog] = {}
        for row, state in enumerate(self._rows):
            if state.outcome.done or (stepping is not None and not stepping[row].any()):
                continue
            response = rows[row].get(keys.RESPONSE[-1])
            tokens[row] = torch.cat([tokens[row], response])
            ids = response.tolist()
            cut = ids[-1:] != end if length_stopped is None else bool(length_stopped[row])
            scores = None
            if log_probs is not None and state.limits.log_probs:
                scores = log_probs[row].get(keys.LOG_PROBS[-1])[-len(ids) :]
            dialogs[row] = self._dialog(row, ids, cut, scores)
        return tokens, dialogs

    def _dialog(
        self, row: int, tokens: list[int], length_stopped: bool, log_probs: Tensor | None
    ) -> Dialog:
        """Return the dialog of a row with a further response. Reuse the dialog from ``receive`` if
        the response is the same.
        """
        received, _ = self._received.get(row, (None, None))
        if received is not None and received.tokens == tokens:
            return received
        state, text = self._rows[row], self.tokenizer.decode(tokens, skip_special_tokens=True)
        messages = [*state.current.messages, {"role": "assistant", "content": text}]
        token_log_probs: list[tuple[str, float]] = []
        if state.limits.log_probs and log_probs is not None:
            texts = map(self.tokenizer.decode, tokens)
            token_log_probs = list(zip(texts, log_probs.tolist(), strict=True))
        return Dialog(
            problem=state.problem,
            responses=[*state.responses, text],
            messages=messages,
            tokens=tokens,
            finish_reason="length" if length_stopped else "stop",
            raw=self.tokenizer.decode(tokens) if self.task.tools or self.task.is_stateful else "",
            last=len(state.responses) + 1 >= self.max_turns,
            prefill=self.replies.prefill(self._prompt_of(state)),
            call_format=self.call_format or "",
            episode=state.episode,
            prompt_tokens=state.prompt_tokens,
            log_probs=token_log_probs,
        )

    def _advance(self, dialogs: Mapping[int, Dialog]) -> list[Turn | Failure]:
        """Return the task's answer to the latest turn of each dialog."""
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
        return [*scoring((future.result() for future in futures), len(futures))]

    def _compare(self) -> None:
        """Have the task compare the validly rewarded responses of each group with at least two, and
        add the resulting parts to their rewards.
        """
        valid = [
            row for row in self._rows if row.outcome.valid and self.task.compares(row.drawn.problem)
        ]
        groups = [[*rows] for _, rows in groupby(valid, lambda row: row.drawn.group)]
        compared = [rows for rows in groups if rows[1:]]
        # Like finished dialogs, so that each task passes them on to its scorer.
        jobs = {
            index: replace(
                rows[0].dialog,
                group=[row.dialog for row in rows],
                episode="",
                finish_reason="length",
            )
            for index, rows in enumerate(compared)
        }
        for rows, turn in zip(compared, self._advance(jobs), strict=True):
            if isinstance(turn, Failure):
                for row in rows:
                    self._invalidate(row, turn)
            elif turn.score is not None:
                for name, value in turn.score.parts.items():
                    index, _, part = name.partition("/")
                    state = rows[int(index)]
                    if part:
                        state.outcome.parts[part] = value
                    else:
                        state.add_reward(value or 0.0)
                for row, text in zip(rows, json.loads(turn.score.feedback or "[]"), strict=False):
                    row.outcome.feedback = f"{row.outcome.feedback}\n{text}".strip()
        for row in valid:
            parts = row.outcome.parts
            weights: Any = self.task.part_weights
            own = weights.get(row.problem.dataset)  # of its task in a mixture
            weights = own if isinstance(own, Mapping) else weights
            # Of a problem with only one response, as in an evaluation, any number is the verdict.
            if row.outcome.valid and not any(
                value is not None and (self.repeats == 1 or part_weight(name, parts, weights))
                for name, value in parts.items()
            ):
                self._invalidate(row, _NO_REWARD)

    def _take_turn(self, state: DialogState, dialog: Dialog, turn: Turn | Failure) -> Tensor | None:
        """End a dialog, or append the task's reply to it.

        Returns:
            all tokens including the reply, [T] int64; None if the dialog ended or there is no room
            for the reply.
        """
        cut = dialog.finish_reason == "length"
        if isinstance(turn, Failure):
            message = turn.policy_message
            reply = self.task.tool_failure_reply(dialog, message) if message else None
            if reply is None or dialog.last:
                self._invalidate(state, turn, truncated=cut)
                return None
            calls = sum(message["role"] == "tool" for message in reply)
            turn = Turn(reply, None, {"tools/calls": calls, "tools/errors": calls})
        self.counts.update(turn.counts)
        if turn.undelivered:
            state.undo_turn()
        else:
            state.dialog = dialog
        if turn.reward is not None:
            state.turn_rewards[-1] = turn.reward
        if turn.score is not None:
            ended_by_limit = turn.messages is not None or (cut and not turn.undelivered)
            state.score(turn.score, truncated=ended_by_limit)
            return None
        try:
            prompt = self.replies.after(state.by_number.get(turn.sample), turn)
        except (ValueError, RecursionError) as error:
            without_images = self._refuse_images(turn, error)
            if without_images is not None:
                return self._take_turn(state, dialog, without_images)
            if not (self.task.is_stateful or images_in(turn.messages or ())):
                raise
            # The template may be unable to render an agent's messages, or an image is broken.
            self._invalidate(state, Failure.of(error))
            return None
        if prompt is None:
            state.end(truncated=True)
            return None
        state.continue_with(turn.sample, turn.messages or (), prompt, turn.limits)
        return tokens_of(prompt)

    def _refuse_images(self, turn: Turn, error: Exception) -> Turn | None:
        """Return a reply whose tools fail, in place of their images, which the model cannot read;
        None if there are none.
        """
        refused = [m for m in turn.messages or () if m["role"] == "tool" and images_in([m])]
        if not refused or turn.tools is not None:
            return None
        failure = Failure.of(error)
        if self._is_new(failure):
            torchrl_logger.error(
                f"LLMEnv: a tool of task {self.task.name!r} returned an image that the model "
                "cannot read; the policy gets an error in its place. Further errors of this kind "
                f"are not logged.\n{failure.text}"
            )
        messages = [
            {**message, "content": _UNREADABLE} if message in refused else message
            for message in turn.messages or ()
        ]
        return replace(turn, messages=messages, counts={"tools/errors": len(refused)}, reward=None)

    @property
    def dialogs(self) -> list[Dialog]:
        """Dialog of each row so far, including messages after the latest turn."""
        return [Dialog(row.problem, row.responses, row.current.messages) for row in self._rows]

    def note_outcomes(self) -> None:
        """Report the dialogs that ended in the latest step to ``drawing``, if this environment
        draws its own problems.
        """
        if self._draws:
            states = [self._rows[row] for row in self.latest]
            self.drawing.record(
                (state.drawn.index, state.outcome.correct)
                for state in states
                if state.outcome.done and state.outcome.valid
            )

    def _invalidate(self, row: DialogState, failure: Failure, *, truncated: bool = False) -> None:
        """End a dialog without a valid reward, and log each kind of failure once."""
        row.invalidate(failure.line, truncated=truncated)
        self.counts[f"rewards/invalid_{failure.cause}"] += 1
        if self._is_new(failure):
            torchrl_logger.error(
                f"LLMEnv: task {self.task.name!r} failed on query {row.problem.query!r:.500}; its "
                "reward is marked invalid. Further errors of this kind are not "
                f"logged.\n{failure.text}"
            )

    def _is_new(self, failure: Failure) -> bool:
        """Return whether a failure is the first of its kind."""
        is_known = failure.kind in self._logged_failures
        self._logged_failures.add(failure.kind)
        return not is_known

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, including ``RewardPool.take_counts``, as metrics
        that can be summed.
        """
        counts, self.counts = self.counts, Counter()
        tools = dict.fromkeys(("tools/calls", "tools/errors"), 0) if self.task.tools else {}
        pool = {} if self.reward_pool is None else self.reward_pool.take_counts()
        return {**tools, **counts, **pool}

    def _image_columns(self, images: Sequence[Spans]) -> dict[str, NonTensorStack]:
        """Return the images of the rows, if the model reads images."""
        return {keys.IMAGES: NonTensorStack(*images)} if self.has_images else {}

    def _outcome_columns(self, outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, Any]:
        """Return attributes of the outcomes as [B, 1] columns, and the parts of the rewards."""
        columns: dict[str, Any] = {
            name: torch.tensor([getattr(outcome, name) for outcome in outcomes]).unsqueeze(-1)
            for name in names
        }
        columns[keys.REWARD_VALID] = columns.pop("valid")
        if self.task.has_parts:
            columns[keys.REWARD_PARTS[-1]] = NonTensorStack(
                *[outcome.parts for outcome in outcomes]
            )
        return columns


def _prompt_columns(prompts: Sequence[Tensor]) -> dict[str, TensorDictBase]:
    """Return prompts and their attention masks as lazy stacks."""
    masks = [torch.ones_like(prompt, dtype=torch.bool) for prompt in prompts]
    return {
        keys.PROMPT[0]: lazy_stack([TensorDict({keys.PROMPT[-1]: row}, []) for row in prompts]),
        keys.ATTENTION_MASK[0]: lazy_stack(
            [TensorDict({keys.ATTENTION_MASK[-1]: row}, []) for row in masks]
        ),
    }
