"""``WithAgent``: a task whose problems are played by an agent that only uses an OpenAI client.

A request of the agent waits until the policy has taken its turn. To ``LLMEnv`` it looks like any
other task's messages to the policy, so tokens, masks, log-probs, versions, groups, and resume work
as in any dialog.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import Any

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.images import MAX_PIXELS, images_in
from torchrl_grpo.integrations.agents.programs import Program, load_program
from torchrl_grpo.integrations.agents.protocol import (
    RESPONSES,
    TEXT,
    Answer,
    BadRequest,
    Request,
    with_data_urls,
)
from torchrl_grpo.integrations.agents.server import PendingRequest, Server
from torchrl_grpo.integrations.responses import response_id
from torchrl_grpo.tasks.base import (
    Dialog,
    Message,
    Problem,
    Score,
    Task,
    Turn,
    WrappedTask,
    attempt,
)
from torchrl_grpo.tools.toolbox import Parser

_AT_A_TIME = 64
_IDS = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes of the ids of answers."""
_PART = "agent"
"""Name of the reward part that the agent itself returned."""
_DEFAULT_TIMEOUT_S = 3600.0
"""Timeout of an agent if the run has none."""
_MIN_SCORING_S = 1.0
"""Minimum timeout of the scorers, however long the agents took."""


@dataclass
class TokenCounter:
    """Counts the tokens of prompts. Loads the tokenizer on first use.

    Attributes:
        tokenizer: arguments of ``load_tokenizer``; None refuses all requests.
        template_arguments: arguments of the chat template.
    """

    tokenizer: Mapping[str, Any] | None = None
    template_arguments: Mapping[str, Any] | None = None

    @cached_property
    def _chats(self) -> Any:
        from torchrl_grpo.chat.template import ChatEncoder
        from torchrl_grpo.models.loading import load_tokenizer

        return ChatEncoder(load_tokenizer(**self.tokenizer or {}), self.template_arguments or {})

    def __call__(self, request: Request) -> int:
        """Return the number of tokens of the prompt with a request's whole chat.

        Raises:
            BadRequest: the tokens cannot be counted.
        """
        if self.tokenizer is None or images_in(request.messages):
            raise BadRequest(
                "messages must be text only, and the task needs a tokenizer, to count tokens: send the "
                "request itself, whose usage has the count.",
                "messages",
            )
        chat, tools = request.messages, list(request.tools) or None
        try:
            return len(self._chats.tokens(chat, tools=tools, add_generation_prompt=True))
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error


_NO_COUNTER = TokenCounter()


@dataclass
class _Received:
    """A turn that the agent received.

    Attributes:
        request: the request that it answers.
        chat: the chat whose tokens its sample has, including the answer.
        sample: number of its sample.
        ancestors: numbers of the turns whose answers its request includes, and its own number.
        context: number shared by all turns that follow the same first request.
        is_abandoned: whether the agent later went back to an earlier point.
    """

    request: Request
    chat: Sequence[Message]
    sample: int
    ancestors: Set[int]
    context: int
    is_abandoned: bool = False


class _Episode:
    """One episode of a problem: the agent's requests in order, and its end.

    Args:
        opening: the dialog before its first turn.
        max_pixels: maximum number of pixels of an image.

    Attributes:
        answer_count: number of the policy's turns that answered a request.
        received: the turns that reached the agent, by index.
        rewards: reward of each turn that the agent rewarded.
        refusal: why the agent gets no further answers; None if it does.
        is_cut: whether a request was refused.
        result: the agent's result, once it has ended.
    """

    def __init__(self, opening: Dialog, max_pixels: int = MAX_PIXELS) -> None:
        self._opening = opening
        self._max_pixels = max_pixels
        self.key = secrets.token_urlsafe(24)
        self.answer_count = 0
        self.received: dict[int, _Received] = {}
        self.rewards: dict[int, float] = {}
        self._answered: list[PendingRequest] = []
        self.refusal: BadRequest | None = None
        self.is_cut = False
        self.result: Future[float | None] | None = None
        self.end: Callable[[], None] = lambda: None
        self._events: SimpleQueue[PendingRequest | Future[float | None]] = SimpleQueue()
        self._pending: PendingRequest | None = None
        self._close_reason: BadRequest | None = None
        self._sample = 0  # of the pending request
        self._beginning: list[int] = []  # turns whose chats it begins with
        self._stored: dict[str, list[Message]] = {}  # chats by the id of their last answer
        self._last_answer: tuple[PendingRequest, list[Message]] | None = (
            None  # with the chat that includes it
        )

    def submit(self, request: Request) -> PendingRequest:
        """Queue a request; called in the server's thread.

        Raises:
            BadRequest: it has tools or images, which the prompt would not show.
        """
        roles = {m["role"] for m in request.messages if images_in([m])}
        if unread := roles.difference(self._opening.image_roles):
            raise BadRequest(
                "messages must have no images in messages of the role "
                f"{' and '.join(sorted(unread))}, because the model, or its chat template, does "
                "not read them: describe them in text, or use a vision-language model.",
                "messages",
            )
        if request.tools and not self._opening.takes_tools:
            raise BadRequest(
                "tools must be left out, because the model's chat template does not render them, or "
                "writes calls in an unknown format: describe them in the prompt, set "
                "env.tool_parser, or use a model or a model.chat_template that supports tools.",
                "tools",
            )
        pending = PendingRequest(request)
        self._events.put(pending)
        if self._close_reason is not None:  # closed in the meantime
            self._refuse_all(self._close_reason)
        return pending

    def submit_result(self, result: Future[float | None]) -> None:
        """Queue the agent's end; called in any thread."""
        self._events.put(result)

    def next_event(self, deadline: float) -> PendingRequest | Future[float | None]:
        """Return the next request, or the agent's end.

        Raises:
            TimeoutError: there was no event in time.
        """
        try:
            return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimeoutError from None

    def turn(self, pending: PendingRequest) -> Turn:
        """Return a request as messages to the policy: those that continue a sample, or a whole
        chat.

        Raises:
            BadRequest: one of their images is broken, or the answer that they continue is unknown.
        """
        request = pending.request = self._with_history(pending.request)
        chat = list(request.messages)
        ends = {turn.sample: number for number, turn in self.received.items()}
        self._sample, messages, self._beginning = len(ends), chat, []
        # Continue the sample with the fewest new messages, the latest one if there are several.
        # Begin a new sample only if the chat continues none.
        for number, turn in self.received.items():
            new_messages = _new_messages(chat, turn, request)
            if new_messages is None:
                continue
            self._beginning.append(number)
            if number in ends.values() and len(new_messages) <= len(messages):
                self._sample, messages = turn.sample, new_messages
        try:
            for image in images_in(messages):
                image.check_size(self._max_pixels)
                image.open()
        except ValueError as error:
            raise BadRequest(f"messages must have readable images: {error}", "messages") from error
        self._pending = pending
        return Turn(messages, None, tools=request.tools, sample=self._sample, limits=request.limits)

    def _with_history(self, request: Request) -> Request:
        """Return a request with the chat of its ``previous_response_id`` before it, if it has one."""
        previous = request.fields.get("previous_response_id")
        if request.path != RESPONSES or previous is None:
            return request
        history = self._stored.get(str(previous))
        if history is None:
            raise BadRequest(
                f"previous_response_id={previous!s:.60} must name a stored answer of this "
                "episode: send the whole input, or leave out store=false.",
                "previous_response_id",
                code="previous_response_not_found",
            )
        return request.after(history)

    def answer(self, dialog: Dialog, parser: Parser | None) -> None:
        """Answer the pending request with the policy's turn."""
        pending = self._pending
        self._pending = None
        assert pending is not None
        request = pending.request
        answer = Answer.of(request, dialog, self.answer_count, parser)
        chat = [*request.messages, answer.message]
        if request.path == TEXT:  # with the stop string, which the sample's tokens contain
            chat = [{"role": "", "content": request.messages[0]["content"] + dialog.responses[-1]}]
        self.answer_count += 1
        self._answered.append(pending)
        self._last_answer = pending, chat
        pending.answer.set_result(answer)

    def confirm_delivery(self, deadline: float) -> bool:
        """Return whether the latest answer was lost because its client had left. The episode then
        continues as if there had been no answer.

        Raises:
            TimeoutError: the client does not read it in time.
        """
        if self._last_answer is None:
            return False
        pending, chat = self._last_answer
        self._last_answer = None
        if pending.delivered.result(max(0.0, deadline - time.monotonic())):
            number, request = self.answer_count - 1, pending.request
            self._receive(number, request, chat)
            if request.path == RESPONSES and request.fields.get("store") is not False:
                self._stored[response_id(number)] = chat[request.num_instructions :]
            return False
        return True

    def _receive(self, number: int, request: Request, chat: Sequence[Message]) -> None:
        """Add a turn, and record which earlier turns it abandons."""
        earlier = self.received
        ancestors = {n for n, turn in earlier.items() if turn.chat[-1] in request.messages}
        ancestors |= {number, *self._beginning}
        contexts = [
            turn.context
            for n, turn in earlier.items()
            if n in self._beginning or turn.request.messages == request.messages
        ]
        context = next(iter(contexts), number)
        for n, turn in earlier.items():
            if turn.context == context or n in ancestors:
                turn.is_abandoned = n not in ancestors
        earlier[number] = _Received(request, chat, self._sample, ancestors, context)

    def reward(self, value: Any, answer: Any = None) -> None:
        """Set the reward of an answer; called in any thread.

        Args:
            value: a number, or a number as text.
            answer: the answer or its id; by default the latest answer.

        Raises:
            BadRequest: the reward is not a finite number, or there is no such answer.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise BadRequest(
                f"the reward of an answer must be a finite number, but it is {value!s:.60}: for "
                "example, send X-Reward: 0.5.",
                "X-Reward",
            )
        name = getattr(answer, "id", answer)
        received = [
            index
            for index, pending in enumerate(self._answered)
            if (not pending.delivered.done() or pending.delivered.result())
            and name in (None, *(f"{kind}{index}" for kind in _IDS))
        ]
        if not received:
            raise BadRequest(
                f"X-Reward-Id must name an answer of the same episode, but there is no "
                f"{name or 'answer'}: send the id of an answer, or leave it out for the latest one.",
                "X-Reward-Id",
            )
        self.rewards[received[-1]] = number

    def with_credits(self, score: Score, turns: int, drops_abandoned: bool) -> Score:
        """Return the score with the rewards of the turns.

        Args:
            score: the score of the whole trajectory.
            turns: number of turns.
            drops_abandoned: whether abandoned turns are left out.
        """
        kept = {
            number: turn
            for number, turn in self.received.items()
            if not (drops_abandoned and turn.is_abandoned)
        }
        ends = {turn.sample: number for number, turn in kept.items()}
        if len(kept) == len(self.received) and len(ends) == 1 and not self.rewards:
            return score
        own = {number: self.rewards.get(number, 0.0) for number in kept}
        credits = dict(own)
        for end in ends.values():  # what followed the sample
            credits[end] += score.reward + sum(
                own[later]
                for later, turn in kept.items()
                if later > end and (turn.context != kept[end].context or end in turn.ancestors)
            )
        reward, parts = score.reward + sum(own.values()), dict(score.parts)
        correct = reward >= 1 if _PART in parts else score.correct
        if self.rewards:
            parts[_PART] = (parts.get(_PART) or 0.0) + sum(own.values())
        turn_credits = tuple(credits.get(number) for number in range(turns))
        return Score(reward, correct, parts, score.feedback, turn_credits)

    def refuse(self, reason: BadRequest, pending: PendingRequest | None = None) -> None:
        """Refuse a request, by default the pending one, and all later ones."""
        self.refusal = reason
        pending = pending or self._pending
        self._pending = None
        if pending is not None:
            self.is_cut = True
            pending.answer.set_exception(reason)

    def close(self) -> None:
        """End the agent, and refuse its open requests."""
        reason = BadRequest(
            "the API key must belong to an episode in progress, but its episode has ended.",
            status=401,
        )
        self.end()
        self.refuse(reason)
        self._close_reason = reason
        self._refuse_all(reason)

    def _refuse_all(self, reason: BadRequest) -> None:
        with suppress(Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, PendingRequest):
                    self.refuse(reason, event)


def _new_messages(chat: list[Message], turn: _Received, request: Request) -> list[Message] | None:
    """Return the messages of a chat that follow a turn; None if the chat does not begin with the
    turn's chat."""
    before = turn.request
    if before.path != request.path or list(before.tools) != list(request.tools):
        return None
    if request.path != TEXT:
        size = len(turn.chat)
        return chat[size:] if chat[:size] == list(turn.chat) else None
    text, known = chat[0]["content"], turn.chat[0]["content"]
    return [{"role": "", "content": text[len(known) :]}] if text.startswith(known) else None


class WithAgent(WrappedTask):
    """A task's problems, each played by an agent; see ``torchrl_grpo.integrations.agents.programs``.

    If the agent returns a reward, it is the score, with the part ``agent``, and counts as correct
    if it is at least 1; otherwise the other task scores the dialog. Up to 64 agents play at a time
    in one process.

    Args:
        task: the task with the problems and the scorer.
        program: the agent.
        parser: finds tool calls in the policy's text.
        max_pixels: maximum number of pixels of an image.
        counter: counts the tokens of prompts.
        drops_abandoned: whether abandoned turns are excluded from training.
    """

    def __init__(
        self,
        task: Task,
        program: Program,
        parser: Parser | None = None,
        max_pixels: int = MAX_PIXELS,
        counter: TokenCounter = _NO_COUNTER,
        drops_abandoned: bool = False,
    ) -> None:
        super().__init__(task)
        self.counter = counter
        self.drops_abandoned = drops_abandoned
        self.max_pixels = max_pixels
        self.program = program
        self.parser = parser
        self.reads_calls = parser is None
        self.is_stateful = True
        self.at_a_time = _AT_A_TIME
        self.has_parts = True
        self.group_rewards = min(task.group_rewards, "also")  # the agent may score
        self._server: Server | None = None
        self._episodes: dict[str, _Episode] = {}
        self._keys: dict[str, _Episode] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_server": None, "_episodes": {}, "_keys": {}}

    @property
    def multi_turn(self) -> bool:
        return True

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        if dialogs and dialogs[0].group:  # only ever groups: their dialogs have no episode
            return self.task.advance(dialogs, timeout_s)
        deadline = time.monotonic() + (_DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        # All of them, before waiting for any.
        failures = [attempt(self._continue, dialog) for dialog in dialogs]
        outcome = partial(self._outcome, deadline=deadline, timeout_s=timeout_s)
        turns = [
            failure if isinstance(failure, Exception) else attempt(outcome, dialog)
            for dialog, failure in zip(dialogs, failures, strict=True)
        ]
        unscored = [
            index
            for index, (dialog, turn) in enumerate(zip(dialogs, turns, strict=True))
            if isinstance(turn, Turn)
            and turn.score is None
            and self._episodes[dialog.episode].result is not None
        ]
        if unscored:  # all at once, because the other task may run several scorers at a time
            if timeout_s is not None:
                timeout_s = max(_MIN_SCORING_S, deadline - time.monotonic())
            finished = [self._finished_dialog(dialogs[index]) for index in unscored]
            scored_turns = self.task.advance(finished, timeout_s)
            for index, other in zip(unscored, scored_turns, strict=True):
                episode = self._episodes[dialogs[index].episode]
                turns[index] = self._with_score(turns[index], other, episode)
        return [
            self._with_credits(dialog, turn) for dialog, turn in zip(dialogs, turns, strict=True)
        ]

    def _with_credits(self, dialog: Dialog, turn: Turn | Exception) -> Turn | Exception:
        if isinstance(turn, Exception) or turn.score is None:
            return turn
        episode, turns = self._episodes[dialog.episode], len(dialog.responses)
        return replace(turn, score=episode.with_credits(turn.score, turns, self.drops_abandoned))

    def _finished_dialog(self, dialog: Dialog) -> Dialog:
        """Return a finished dialog for the scorer: with the turns that reached the agent."""
        received = self._episodes[dialog.episode].received
        return replace(dialog, responses=[dialog.responses[turn] for turn in received], last=True)

    def _with_score(
        self, turn: Any, other: Turn | Exception, episode: _Episode
    ) -> Turn | Exception:
        """Return the agent's last turn, with the score of the other task."""
        if isinstance(other, Turn):
            return replace(turn, score=other.score)
        if not isinstance(other, NotImplementedError):
            return other
        if episode.rewards:
            return replace(turn, score=Score(0.0, False, {_PART: 0.0}))
        error = None if episode.result is None else episode.result.exception()
        if isinstance(error, Exception):
            return error
        return InvalidRewardError(
            "an agent must return its reward if nothing else scores the response, but it returned "
            "None: return a number, or set env.reward.",
            "none",
        )

    def _continue(self, dialog: Dialog) -> None:
        """Start an episode's agent, or give it the policy's latest turn."""
        if not dialog.responses:
            self._start(dialog)
            return
        episode = self._episodes[dialog.episode]
        turns = len(dialog.responses)
        if turns <= episode.answer_count:  # its request did not fit into the context
            episode.refuse(
                BadRequest(
                    "the chat must leave room for an answer, but it is longer than "
                    "env.max_prompt_tokens and the model's context allow: end the episode, or use "
                    "a model with a longer context.",
                    "messages",
                    code="context_length_exceeded",
                )
            )
            return
        episode.answer(dialog, self.parser)
        if dialog.last:
            episode.refusal = BadRequest(
                f"an episode must have at most env.max_turns={turns} requests, but this is one "
                f"more: end the episode, or use env.max_turns={2 * turns}.",
                code="max_turns_exceeded",
            )

    def _start(self, dialog: Dialog) -> None:
        if self._server is None:
            self._server = Server(self._keys.get, self.counter)
        episode = _Episode(dialog, self.max_pixels)
        self._episodes[dialog.episode] = self._keys[episode.key] = episode
        result, episode.end = self.program.start(
            self._problem(dialog.problem), self._server.url, episode.key, episode.reward
        )
        result.add_done_callback(episode.submit_result)

    def _problem(self, problem: Problem) -> dict[str, Any]:
        return with_data_urls(
            {
                **problem.extra,
                "prompt": problem.query,
                "messages": self.task.messages(problem),
                "answer": problem.answer,
            }
        )

    def _outcome(self, dialog: Dialog, *, deadline: float, timeout_s: float | None) -> Turn:
        """Return the agent's next request, or its score."""
        episode = self._episodes[dialog.episode]
        try:
            undelivered = episode.confirm_delivery(deadline)
            while True:
                event = episode.next_event(deadline)
                if isinstance(event, Future):
                    episode.result = event
                    # A refused agent would have continued: its dialog is truncated.
                    messages: list[Message] | None = [] if episode.is_cut else None
                    score = self._own_score(episode, event)
                    return Turn(messages, score, undelivered=undelivered)
                if event.delivered.done():  # the client has left
                    continue
                if episode.refusal is None:
                    try:
                        turn = episode.turn(event)
                    except BadRequest as refusal:
                        event.answer.set_exception(refusal)
                        continue
                    return replace(turn, undelivered=undelivered)
                episode.refuse(episode.refusal, event)
        except TimeoutError:
            raise InvalidRewardError(
                f"an agent must send a request or end within env.reward_timeout_s={timeout_s}, but "
                "it did not: raise the limit, or fix the agent.",
                "timeout",
            ) from None

    def _own_score(self, episode: _Episode, result: Future[float | None]) -> Score | None:
        """Return the agent's own score; None if the other task must score.

        Raises:
            InvalidRewardError: the agent got no answer.
            Exception: raised by the agent. An agent that was refused an answer is scored anyway.
        """
        error = result.exception()
        if error is not None and not episode.is_cut:
            if isinstance(error, Exception):
                raise error
            # An agent must not interrupt a run, for example with KeyboardInterrupt.
            raise RuntimeError(f"the agent raised {type(error).__name__}: {error}")
        if not episode.received:
            raise InvalidRewardError(
                "an agent must query the policy, but it ended without an answer: send a request, "
                "and wait for its answer.",
                "exception",
            )
        reward = None if error else result.result()
        return None if reward is None else Score(reward, reward >= 1, {_PART: reward})

    def close(self, episode: str) -> None:
        state = self._episodes.pop(episode, None)
        if state is not None:
            del self._keys[state.key]
            state.close()


def with_agent(
    task: Task,
    spec: str,
    drops_abandoned: bool,
    parser: Parser | None,
    max_pixels: int,
    *counter: Mapping[str, Any] | None,
) -> WithAgent:
    """Wrap a task in the agent that ``env.agent`` names; see ``load_program``.

    Args:
        task: see ``WithAgent``.
        spec: see ``load_program``.
        drops_abandoned: see ``WithAgent``.
        parser: see ``WithAgent``.
        max_pixels: see ``WithAgent``.
        *counter: arguments of ``TokenCounter``.
    """
    tokens = TokenCounter(*counter)
    return WithAgent(task, load_program(spec), parser, max_pixels, tokens, drops_abandoned)
