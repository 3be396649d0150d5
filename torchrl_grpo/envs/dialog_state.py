"""``DialogState``: a dialog in progress, its training samples and its outcome, with named
transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from torchrl_grpo.images import Prompt, Spans, images_of, text_of
from torchrl_grpo.tasks.base import Dialog, Message, Problem, Score, TurnLimits
from torchrl_grpo.tasks.drawing import Drawn

LOST = -1
"""Sample number of a turn that belongs to no sample, such as an undelivered one."""


@dataclass
class Outcome:
    """Outcome of a dialog; neither terminated nor truncated while the dialog continues."""

    reward: float = 0.0
    correct: bool = False
    parts: dict[str, float | None] = field(default_factory=dict)
    feedback: str = ""
    valid: bool = True
    error: str = ""
    credits_turns: bool = False
    terminated: bool = False
    truncated: bool = False

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True)
class SampleState:
    """A training sample in progress.

    Attributes:
        number: number of the sample within the trajectory.
        chat: messages of the sample's first prompt.
        later: all later messages.
        tokens: all tokens up to the policy's latest turn; None before its first turn.
        turn_tokens: tokens of that turn.
        images: the images among all tokens.
    """

    number: int
    chat: Sequence[Message]
    later: Sequence[Message] = ()
    tokens: Tensor | None = None
    turn_tokens: Sequence[int] = ()
    images: Spans = ()

    @property
    def messages(self) -> list[Message]:
        return [*self.chat, *self.later]


@dataclass(frozen=True)
class Sample:
    """A training sample of a dialog that is over.

    Attributes:
        turns: indices of its turns in the dialog.
        rewards: the task's reward of each of these turns; None for turns without a reward.
        text: the messages after its first prompt. Messages of roles other than the policy begin with
            ``[role]``.
    """

    turns: Sequence[int]
    rewards: Sequence[float | None]
    text: str


@dataclass
class DialogState:
    """A dialog in progress.

    Each turn calls ``add_turn``, possibly ``undo_turn``, and then ``continue_with`` for the task's
    reply or one of ``score``, ``invalidate`` and ``end``.

    Attributes:
        drawn: group and problem.
        current: training sample that the policy is writing.
        episode: key of a stateful task's dialog, which must be closed; empty for other tasks.
        prompt: the first prompt, [T] int64 if it has no images; None before it is needed.
        prompt_tokens: number of tokens before the next turn, for a stateful task.
        limits: limits of the next turn.
        responses: text of each turn.
        turn_rewards: reward of each turn; None for turns without a reward.
        turn_samples: sample number of each turn.
        by_number: samples that have a turn, by number; the dialog may return to them.
        outcome: reward, and how the dialog ended.
        dialog: the dialog up to its latest turn that was delivered.
    """

    drawn: Drawn
    current: SampleState
    episode: str = ""
    prompt: Tensor | Prompt | None = None
    prompt_tokens: int = 0
    limits: TurnLimits = field(default_factory=TurnLimits)
    responses: list[str] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    turn_samples: list[int] = field(default_factory=list)
    by_number: dict[int, SampleState] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)
    dialog: Dialog = field(init=False, repr=False)
    _before: SampleState | None = None  # the current sample before the latest turn

    @property
    def problem(self) -> Problem:
        return self.drawn.problem

    @property
    def query(self) -> str:
        """The problem's query or, without a query, the end of the first prompt."""
        chat = self.current.chat
        return self.problem.query or (text_of(chat[-1]["content"]) if chat else "")

    def add_turn(self, dialog: Dialog, tokens: Tensor) -> None:
        """Append the policy's turn to the current sample, and set its tokens to ``tokens``."""
        later = [*self.current.later, dialog.messages[-1]]
        self.current = replace(self.current, later=later, tokens=tokens, turn_tokens=dialog.tokens)
        self.by_number[self.current.number] = self.current
        self.responses.append(dialog.responses[-1])
        self.turn_rewards.append(None)
        self.turn_samples.append(self.current.number)

    def undo_turn(self) -> None:
        """Remove the latest turn, which was not delivered, from its sample."""
        self.by_number.pop(self.current.number, None)
        if self._before is not None:
            self.by_number[self.current.number] = self._before
        self.turn_samples[-1] = LOST
        self.current = SampleState(LOST, self.current.chat)

    def continue_with(
        self,
        number: int,
        messages: Sequence[Message],
        prompt: Tensor | Prompt,
        limits: TurnLimits,
    ) -> None:
        """Append the task's reply to a sample, or begin a sample with it. The first prompt of a
        stateful task is such a reply too.

        Args:
            number: number of the sample.
            messages: the reply; a whole chat if it begins the sample.
            prompt: all tokens of the sample, including the reply.
            limits: limits of the next turn.
        """
        self._before = sample = self.by_number.pop(number, None)
        if sample is None:
            self.current = SampleState(number, messages, images=images_of(prompt))
        else:
            later = [*sample.later, *messages]
            self.current = replace(sample, later=later, images=images_of(prompt))
        self.limits = limits
        self.prompt_tokens = len(prompt)

    def reopen(self, later: Sequence[Message]) -> None:
        """Continue a dialog of one sample without the task's answer to the latest turn.

        Args:
            later: all messages after the first prompt.
        """
        self.current = SampleState(0, self.current.chat, later)
        self.by_number.clear()
        self.turn_rewards[-1] = None  # it came with the task's answer
        self.outcome = Outcome()

    def score(self, score: Score, *, truncated: bool) -> None:
        """End the dialog with a score."""
        self.outcome = Outcome(score.reward, score.correct, dict(score.parts), score.feedback)
        self.outcome.credits_turns = bool(score.turns)
        for turn, reward in enumerate(score.turns):
            self.turn_rewards[turn] = reward
            if reward is None:
                self.turn_samples[turn] = LOST
        self.end(truncated=truncated)

    def add_reward(self, reward: float) -> None:
        """Add to the reward of a dialog that is over and, where turns have their own rewards, to that
        of the last turn of each sample.
        """
        self.outcome.reward += reward
        ends = {number: turn for turn, number in enumerate(self.turn_samples) if number != LOST}
        for turn in ends.values() if self.outcome.credits_turns else ():
            self.turn_rewards[turn] = (self.turn_rewards[turn] or 0.0) + reward

    def invalidate(self, error: str, *, truncated: bool) -> None:
        """End the dialog without a valid reward, for the reason in the one-line ``error``."""
        truncated |= self.outcome.truncated
        self.outcome = Outcome(valid=False, error=error)
        self.end(truncated=truncated)

    def end(self, *, truncated: bool) -> None:
        """End the dialog."""
        self.outcome.truncated = truncated
        self.outcome.terminated = not truncated

    def samples(self) -> list[Sample]:
        """Return the training samples in the order in which they ended, without the turns that
        belong to no sample. If there are only such turns, the last one is a sample.
        """
        turns: dict[int, list[int]] = {}
        # A dialog without an opening has a first transition too.
        for turn, number in enumerate(self.turn_samples or [0]):
            turns.setdefault(number, []).append(turn)
        lost = turns.pop(LOST, [])
        turns = turns or {LOST: lost[-1:]}
        states = {self.current.number: self.current, **self.by_number}
        return [
            Sample(
                of_sample,
                [self.turn_rewards[turn] for turn in of_sample if self.turn_rewards],
                "\n".join(map(_line, states[number].later)),
            )
            for number, of_sample in sorted(turns.items(), key=lambda entry: entry[1][-1])
        ]


def _line(message: Message) -> str:
    text = text_of(message["content"])
    return text if message["role"] in ("assistant", "") else f"[{message['role']}] {text}"
