"""``LLMEnv``: problems of a task in, token transitions out; single- and multi-turn.

It is not a reward function (a ``Task`` has that) and not a sampler (a policy writes the response). Token in, token out:
text is made from response tokens for the task alone, and no text that the policy wrote is tokenized again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.data import Binary, Categorical, Composite, NonTensor, StackedComposite, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.checks import check_multiple
from torchrl_grpo.keys import GROUP_ID, LENGTH_STOPPED, PROMPT, QUERY, RESPONSE, REWARD_VALID
from torchrl_grpo.reward_pool import Failure, RewardPool, score_dialog
from torchrl_grpo.tasks.base import Problem, Split, Task

_PLACEHOLDER = "@@assistant-turn@@"
_OUTCOME = ("reward", "done", "terminated", "truncated", "correct", "valid")


@dataclass
class _Dialog:
    """One row of the environment: its problem, the policy's turns so far, and how it ended."""

    problem: Problem
    responses: list[str] = field(default_factory=list)
    reward: float = 0.0
    correct: bool = False
    valid: bool = True
    terminated: bool = False
    truncated: bool = False

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class _RaggedTokens(Categorical):
    """Spec of token ids whose rows differ in length; where TorchRL would stack them once more, it refuses."""

    def expand(self, *shape: Any) -> Categorical:
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(size) > self.ndim:
            raise ValueError(
                f"LLMEnv must not be stacked to {list(size[:-1])} rows by SerialEnv or ParallelEnv, which cannot step "
                "rows of tokens that differ in length: use num_envs for more rows, and reward_pool for more processes."
            )
        return super().expand(*shape)


class LLMEnv(EnvBase):
    """Draws problems, gives their prompts as tokens, and scores the responses.

    ``reset`` draws ``num_envs / repeats`` problems and repeats each ``repeats`` times, in adjacent rows that share a
    ``group_id``. Each epoch goes once through the split in an order that ``seed`` decides. ``step`` reads
    ``("tokens", "response")`` (ragged) and ``"length_stopped"``; a row that is done ignores further responses and
    repeats its outcome, so that the rows of a batch may need different numbers of turns.

    A dialog is *terminated* when the policy ended its turn and the task has no further message; it is *truncated* when
    a token limit cut a turn off, when the task had a further message after ``max_turns``, or when the next prompt would
    be longer than ``max_prompt_tokens``. The task scores it in either case, all dialogs that end in one step together.
    Where the task raises, takes too long or ends its process (the last two in a ``RewardPool``), ``"reward_valid"`` is
    False and the reward 0.

    Args:
        task: the problems and their scorer.
        tokenizer: with a chat template.

    Keyword Args:
        num_envs: rows, a multiple of ``repeats``.
        repeats: rows per problem (the group size).
        split: ``"train"`` or ``"test"``.
        max_prompt_tokens: problems with longer prompts are dropped and counted in ``num_dropped``. None keeps all.
        max_turns: most turns that the policy has in one dialog.
        seed: decides the order of the problems.
        reward_pool: scores the task's dialogs in processes of their own; None scores here. Copies of the environment
            share it, and who made it closes it.

    Raises:
        ValueError: a number is out of range, the tokenizer has no chat template, or no problem is left.

    Examples:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_grpo.starter import starter_path
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> env = LLMEnv(ArithmeticTask(), AutoTokenizer.from_pretrained(starter_path()), num_envs=8, repeats=4)
        >>> env.reset()["group_id"].squeeze(-1)
        tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """

    input_mode = "tokens"  # TorchRL's transforms ask for it: prompts and responses are tokens, no text and no history
    _copies_left: int

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_envs: int,
        repeats: int,
        split: Split = "train",
        max_prompt_tokens: int | None = None,
        max_turns: int = 1,
        seed: int = 0,
        reward_pool: RewardPool | None = None,
    ) -> None:
        check_multiple("num_envs", num_envs, repeats, f"repeats={repeats}, at least 1")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1: use 1 for single-turn tasks.")
        if tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer={tokenizer.name_or_path!r} must have a chat template, it has none: use the model's "
                "instruct version, or set tokenizer.chat_template."
            )
        super().__init__(batch_size=(num_envs,))
        self.task = task
        self.tokenizer = tokenizer
        self.repeats = repeats
        self.max_prompt_tokens = max_prompt_tokens
        self.max_turns = max_turns
        self.reward_pool = reward_pool
        self.num_dropped = 0
        self._problems: Sequence[Problem] = task.problems(split)
        self._prompts: dict[int, Tensor] = {}
        self._turn_tokens: dict[str, list[int]] = {}
        self._logged_failures: set[tuple[Any, ...]] = set()
        self._usable = self._select_problems()
        if not self._usable:
            raise ValueError(
                f"split={split!r} of task {task.name!r} must have a problem whose prompt has at most "
                f"max_prompt_tokens={max_prompt_tokens} tokens, none of its {len(self._problems)} has: "
                "use a larger max_prompt_tokens, or a model length that leaves more room beside the response."
            )
        self._next_group = 0
        self._set_seed(seed)
        self._dialogs: list[_Dialog] = []
        self._make_specs()

    def _make_specs(self) -> None:
        rows = self.batch_size
        tokens = _RaggedTokens(len(self.tokenizer), shape=(-1,), dtype=torch.int64)
        self.full_observation_spec = Composite(
            tokens=StackedComposite(*[Composite(prompt=tokens) for _ in range(rows[0])], dim=0),
            text=Composite(response=NonTensor(shape=rows, example_data=""), shape=rows),
            correct=Binary(shape=(*rows, 1), dtype=torch.bool),
            reward_valid=Binary(shape=(*rows, 1), dtype=torch.bool),
            shape=rows,
        )
        self.full_state_spec = Composite(
            group_id=Unbounded(shape=(*rows, 1), dtype=torch.int64),
            query=NonTensor(shape=rows, example_data=""),
            shape=rows,
        )
        self.full_action_spec = Composite(
            tokens=StackedComposite(*[Composite(response=tokens) for _ in range(rows[0])], dim=0),
            length_stopped=Binary(shape=(*rows, 1), dtype=torch.bool),
            shape=rows,
        )
        self.full_reward_spec = Composite(reward=Unbounded(shape=(*rows, 1)), shape=rows)
        self.full_done_spec = Composite(
            **{key: Binary(shape=(*rows, 1), dtype=torch.bool) for key in ("done", "terminated", "truncated")},
            shape=rows,
        )

    def fake_tensordict(self) -> TensorDictBase:
        """What a transition looks like; as in the real data, rows of tokens are a lazy stack."""
        fake = super().fake_tensordict()
        for key in ("tokens", ("next", "tokens")):
            fake.set(key, lazy_stack(list(fake.get(key).unbind(0))))
        return fake

    # Drawing problems

    def _select_problems(self) -> list[int]:
        """Indices of the problems that may be drawn. Without a limit none is tokenized here."""
        everything = list(range(len(self._problems)))
        if self.max_prompt_tokens is None:
            return everything
        texts = [self._render(problem) for problem in self._problems]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        usable = [i for i in everything if len(encoded[i]) <= self.max_prompt_tokens]
        self.num_dropped = len(everything) - len(usable)
        if self.num_dropped:
            torchrl_logger.info(
                f"LLMEnv: dropped {self.num_dropped} of {len(everything)} prompts of {self.task.name!r} that are "
                f"longer than max_prompt_tokens={self.max_prompt_tokens}."
            )
        return usable

    def _render(self, problem: Problem) -> str:
        messages = self.task.messages(problem)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _prompt(self, index: int) -> Tensor:
        """[T] int64 prompt of problem ``index``, tokenized when it is first drawn."""
        if index not in self._prompts:
            tokens = self.tokenizer(self._render(self._problems[index]), add_special_tokens=False)["input_ids"]
            self._prompts[index] = torch.tensor(tokens, dtype=torch.int64)
        return self._prompts[index]

    @property
    def num_problems(self) -> int:
        """Problems that can be drawn."""
        return len(self._usable)

    def first_prompts(self, count: int) -> list[Tensor]:
        """The prompts of the split's first ``count`` problems, [T] int64 each; drawing is not affected."""
        return [self._prompt(index) for index in self._usable[:count]]

    def _draw(self) -> tuple[int, int]:
        """The problem and the group of the next row."""
        if self._copies_left == 0:
            if self._position == len(self._usable):
                self._start_epoch(self._epoch + 1)
            self._current = (self._order[self._position], self._next_group)
            self._position += 1
            self._next_group += 1
            self._copies_left = self.repeats
        self._copies_left -= 1
        return self._current

    def skip(self, groups: int) -> None:
        """Goes on in the order of the problems as if a reset had drawn so many groups."""
        for _ in range(groups):
            self._copies_left = 0
            self._draw()
        self._copies_left = 0

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = list(self._usable)
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)

    def _set_seed(self, seed: int | None) -> None:
        self._seed = 0 if seed is None else int(seed)
        self._copies_left = 0  # of the problem and the group that were drawn last
        self._start_epoch(0)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Where the environment is in its data. Dialogs in progress are not part of it: save between two rollouts."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "next_group": self._next_group,
            "num_problems": len(self._usable),
        }

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Goes to where ``state_dict`` was taken: the next ``reset`` draws what would have been drawn there.

        Raises:
            ValueError: the state is from an environment with another number of problems.
        """
        if state_dict["num_problems"] != len(self._usable):
            raise ValueError(
                f"the saved environment has num_problems={state_dict['num_problems']}, this one has "
                f"{len(self._usable)}: use the dataset, split and max_prompt_tokens of the saved run."
            )
        self._set_seed(state_dict["seed"])
        self._start_epoch(state_dict["epoch"])
        self._position = state_dict["position"]
        self._next_group = state_dict["next_group"]

    # Transitions

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = range(self.batch_size[0])
        if mask is None or bool(mask.all()) or not self._dialogs:
            # Starting afresh keeps groups whole and adjacent, whatever partial resets came before.
            self._copies_left = 0
            self._drawn = [self._draw() for _ in rows]
            self._dialogs = [_Dialog(self._problems[index]) for index, _ in self._drawn]
        else:
            for row in mask.reshape(-1).nonzero().reshape(-1).tolist():
                self._drawn[row] = self._draw()
                self._dialogs[row] = _Dialog(self._problems[self._drawn[row][0]])
        queries = {index: NonTensorData(self._problems[index].query) for index, _ in set(self._drawn)}
        return TensorDict(
            {
                "tokens": lazy_stack([TensorDict({"prompt": self._prompt(index)}) for index, _ in self._drawn]),
                GROUP_ID: torch.tensor([group for _, group in self._drawn]).unsqueeze(-1),
                QUERY: NonTensorStack(*[queries[index] for index, _ in self._drawn]),
                "text": TensorDict({"response": NonTensorStack(*[NonTensorData("")] * len(rows))}, self.batch_size),
                **self._outcome_columns([_Dialog(dialog.problem) for dialog in self._dialogs], ("correct", "valid")),
            },
            self.batch_size,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = tensordict.get("tokens").unbind(0)
        stepping = tensordict.get("_step", None)
        active = [
            row
            for row, dialog in enumerate(self._dialogs)
            if not dialog.done and (stepping is None or bool(stepping[row].any()))
        ]
        responses = [rows[row].get(RESPONSE[-1]) for row in active]
        texts = self.tokenizer.batch_decode([tokens.tolist() for tokens in responses], skip_special_tokens=True)
        length_stopped = tensordict.get(LENGTH_STOPPED).reshape(-1).tolist()
        prompts = [row.get(PROMPT[-1]) for row in rows]
        for row, response, text in zip(active, responses, texts, strict=True):
            dialog = self._dialogs[row]
            dialog.responses.append(text)
            prompts[row] = self._advance(dialog, prompts[row], response, length_stopped[row])
        self._score([self._dialogs[row] for row in active if self._dialogs[row].done])
        text_column = [dialog.responses[-1] if dialog.responses else "" for dialog in self._dialogs]
        return TensorDict(
            {
                "tokens": lazy_stack([TensorDict({"prompt": prompt}) for prompt in prompts]),
                "text": TensorDict({"response": NonTensorStack(*text_column)}, self.batch_size),
                **self._outcome_columns(self._dialogs, _OUTCOME),
            },
            self.batch_size,
        )

    def _advance(self, dialog: _Dialog, prompt: Tensor, response: Tensor, length_stopped: bool) -> Tensor:
        """Ends the dialog, or appends the user's next turn to it; returns [T] int64, all tokens so far."""
        tokens = torch.cat([prompt, response])
        if length_stopped:
            dialog.truncated = True
            return tokens
        try:
            message = self.task.next_turn(dialog.problem, dialog.responses)
        except Exception as error:
            self._invalidate(dialog, Failure.of(error))
            message = None
        if message is None or len(dialog.responses) == self.max_turns:
            dialog.terminated, dialog.truncated = message is None, message is not None
            return tokens
        turn = self._user_turn(message)
        if response.numel() and turn and int(response[-1]) == turn[0]:
            # The policy sampled the token that ends its turn; the template would write it a second time.
            turn = turn[1:]
        longer = torch.cat([tokens, torch.tensor(turn, dtype=torch.int64)])
        if self.max_prompt_tokens is not None and longer.numel() > self.max_prompt_tokens:
            dialog.truncated = True
            return tokens
        return longer

    def _user_turn(self, message: str) -> list[int]:
        """What the chat template puts between an assistant's text and the assistant's next text."""
        if message not in self._turn_tokens:
            chat = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": _PLACEHOLDER},
                {"role": "user", "content": message},
            ]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            _, found, turn = text.partition(_PLACEHOLDER)
            if not found:
                raise ValueError(
                    "the tokenizer's chat template must keep the text of an assistant turn, it left "
                    f"{_PLACEHOLDER!r} out: use max_turns=1 or another template."
                )
            self._turn_tokens[message] = self.tokenizer(turn, add_special_tokens=False)["input_ids"]
        return self._turn_tokens[message]

    def _score(self, dialogs: Sequence[_Dialog]) -> None:
        """Scores the dialogs that have just ended."""
        dialogs = [dialog for dialog in dialogs if dialog.valid]  # the others failed in their last turn
        wanted = [(dialog.problem, dialog.responses) for dialog in dialogs]
        if self.reward_pool is None:
            scores = [score_dialog(self.task, *dialog) for dialog in wanted]
        else:
            scores = self.reward_pool.score(wanted)
        for dialog, score in zip(dialogs, scores, strict=True):
            if isinstance(score, Failure):
                self._invalidate(dialog, score)
            else:
                dialog.reward, dialog.correct = score.reward, score.correct

    def _invalidate(self, dialog: _Dialog, failure: Failure) -> None:
        """Marks the dialog as not scored; one log entry for each kind of failure."""
        dialog.valid = False
        if failure.kind not in self._logged_failures:
            self._logged_failures.add(failure.kind)
            torchrl_logger.error(
                f"LLMEnv: task {self.task.name!r} failed on query {dialog.problem.query!r}; its reward is marked "
                f"invalid. Further errors of this kind are not logged. {failure.text}"
            )

    @staticmethod
    def _outcome_columns(dialogs: Sequence[_Dialog], names: Sequence[str]) -> dict[str, Tensor]:
        """[B, 1] columns of the dialogs' attributes."""
        columns = {name: torch.tensor([getattr(dialog, name) for dialog in dialogs]).unsqueeze(-1) for name in names}
        columns[REWARD_VALID] = columns.pop("valid")
        return columns
