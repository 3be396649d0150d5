"""``WithAgent``: a task whose problems are played by an agent that knows only an OpenAI client.

A request of the agent waits until the policy has taken its turn; to ``LLMEnv`` it is what every
other task says to the policy. So tokens, masks, log-probs, versions, groups and resume are those of
any dialog.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torchrl_grpo.agents.programs import Program
from torchrl_grpo.agents.protocol import TEXT, Answer, BadRequest, Request
from torchrl_grpo.agents.server import Asked, Server
from torchrl_grpo.errors import InvalidRewardError
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
from torchrl_grpo.tools.toolbox import Parser, parse_tool_calls

_AT_A_TIME = 64
_PART = "agent"
"""Part of the reward that is the agent's own number."""
_NO_LIMIT_S = 3600.0
"""Seconds for an agent where the run has no limit: nothing waits for ever."""
_SHORTEST_SCORING_S = 1.0
"""Seconds for the scorers, however long the agents took."""


@dataclass
class _Sample:
    """One training sample of an episode: the chat that its tokens stand for, the policy's answer
    included.
    """

    chat: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    path: str


class _Episode:
    """One play of a problem: the agent's requests in the order in which they came, and its end.

    Args:
        takes_tools: whether the chat template writes tools.

    Attributes:
        answered: turns of the policy that answered a request.
        delivered: numbers of those that reached the agent.
        refused: why it gets no further answers; None while it does.
        cut: whether a request was refused.
        result: the agent's end, once it has come.
    """

    def __init__(self, takes_tools: bool = True) -> None:
        self.takes_tools = takes_tools
        self.key = secrets.token_urlsafe(24)
        self.answered = 0
        self.delivered: list[int] = []
        self.refused: BadRequest | None = None
        self.cut = False
        self.result: Future[float | None] | None = None
        self.end: Callable[[], None] = lambda: None
        self._events: SimpleQueue[Asked | Future[float | None]] = SimpleQueue()
        self._waiting: Asked | None = None
        self._closed: BadRequest | None = None
        self._samples: list[_Sample] = []
        self._sample = 0
        self._begins = False  # whether the sample began with the request that waits
        self._answered: tuple[Asked, list[Message]] | None = (
            None  # the latest, and the chat that it makes
        )

    def ask(self, request: Request) -> Asked:
        """Takes a request; in the server's thread.

        Raises:
            BadRequest: it has tools, which would be lost.
        """
        if request.tools and not self.takes_tools:
            raise BadRequest(
                "tools must be left out, the model's chat template does not write them: say in "
                "the prompt what can be called, or use a model or a model.chat_template that "
                "writes tools.",
                "tools",
            )
        asked = Asked(request)
        self._events.put(asked)
        if self._closed is not None:  # meanwhile
            self._refuse_all(self._closed)
        return asked

    def ended(self, result: Future[float | None]) -> None:
        """Takes the agent's end; in any thread."""
        self._events.put(result)

    def next(self, deadline: float) -> Asked | Future[float | None]:
        """The next request, or the end.

        Raises:
            TimeoutError: there is none in time.
        """
        try:
            return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimeoutError from None

    def turn(self, asked: Asked) -> Turn:
        """A request as what is said to the policy: what follows an answer of ours, or a whole chat."""
        request = asked.request
        self._waiting, chat = asked, list(request.messages)
        self._sample, said = len(self._samples), chat
        for number, sample in enumerate(self._samples):
            rest = _rest(chat, sample, request)
            if rest is not None and (self._sample == len(self._samples) or len(rest) <= len(said)):
                self._sample, said = number, rest
        self._begins = self._sample == len(self._samples)
        if self._begins:
            self._samples.append(_Sample(chat, request.tools, request.path))
        return Turn(said, None, tools=request.tools, sample=self._sample, limits=request.limits)

    def answer(self, dialog: Dialog, parser: Parser) -> None:
        """Gives the request that waits the policy's turn."""
        assert self._waiting is not None
        request = self._waiting.request
        answer = Answer.of(request, dialog, self.answered, parser)
        chat = [*request.messages, answer.message]
        if (
            request.path == TEXT
        ):  # with a stop string that the answer is without: the tokens have it
            chat = [{"role": "", "content": request.messages[0]["content"] + dialog.responses[-1]}]
        self.answered += 1
        self._answered = self._waiting, chat
        self._waiting.answer.set_result(answer)
        self._waiting = None

    def settle(self, deadline: float) -> bool:
        """Return whether the latest answer was lost, because its client had left: then it is as if
        it were not there.

        Raises:
            TimeoutError: the client does not read it in time.
        """
        if self._answered is None:
            return False
        (asked, chat), self._answered = self._answered, None
        if asked.delivered.result(max(0.0, deadline - time.monotonic())):
            self._samples[self._sample].chat = chat
            self.delivered.append(self.answered - 1)
            return False
        if self._begins:
            self._samples.pop()
        return True

    def refuse(self, why: BadRequest, asked: Asked | None = None) -> None:
        """Refuses a request, by default the one that waits, and all that come later."""
        self.refused, asked, self._waiting = why, asked or self._waiting, None
        if asked is not None:
            self.cut = True
            asked.answer.set_exception(why)

    def close(self) -> None:
        """Ends the agent, and refuses what it still asks."""
        ended = BadRequest(
            "the API key must be that of an episode that is being played, its has ended.",
            status=401,
        )
        self.end()
        self.refuse(ended)
        self._closed = ended
        self._refuse_all(ended)

    def _refuse_all(self, why: BadRequest) -> None:
        with suppress(Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Asked):
                    self.refuse(why, event)


def _rest(chat: list[Message], sample: _Sample, request: Request) -> list[Message] | None:
    """Return a chat's messages after those of a sample; None if it does not continue the sample."""
    if sample.path != request.path or list(sample.tools) != list(request.tools):
        return None
    if request.path != TEXT:
        size = len(sample.chat)
        return chat[size:] if chat[:size] == list(sample.chat) else None
    text, known = chat[0]["content"], sample.chat[0]["content"]
    return [{"role": "", "content": text[len(known) :]}] if text.startswith(known) else None


class WithAgent(WrappedTask):
    """A task's problems, each played by an agent; see ``torchrl_grpo.agents.programs`` for what an
    agent is.

    Where the agent says a reward, that is the score with the one part ``agent``, and it counts as
    correct from 1 on; where it says none, the other task's scorer has the word. Up to 64 agents
    play at a time in one process.

    Args:
        task: the problems, and the scorer.
        program: the agent.
        parser: finds calls of tools in the policy's text.
    """

    def __init__(self, task: Task, program: Program, parser: Parser = parse_tool_calls) -> None:
        super().__init__(task)
        self.program, self.parser = program, parser
        self.is_stateful, self.at_a_time, self.has_parts = True, _AT_A_TIME, True
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
        deadline = time.monotonic() + (_NO_LIMIT_S if timeout_s is None else timeout_s)
        begun = [
            attempt(self._go_on, dialog) for dialog in dialogs
        ]  # all of them, before one is waited for
        outcome = partial(self._outcome, deadline=deadline, timeout_s=timeout_s)
        turns = [
            failed if isinstance(failed, Exception) else attempt(outcome, dialog)
            for dialog, failed in zip(dialogs, begun, strict=True)
        ]
        ends = {
            index: turn
            for index, (dialog, turn) in enumerate(zip(dialogs, turns, strict=True))
            if isinstance(turn, Turn)
            and turn.score is None
            and self._episodes[dialog.episode].result is not None
        }
        if ends:  # together, because the other task may wait for several scorers at a time
            left = (
                None if timeout_s is None else max(_SHORTEST_SCORING_S, deadline - time.monotonic())
            )
            judged = self.task.advance([self._judged(dialogs[index]) for index in ends], left)
            for (index, turn), other in zip(ends.items(), judged, strict=True):
                turns[index] = self._scored(turn, other, self._episodes[dialogs[index].episode])
        return turns

    def _judged(self, dialog: Dialog) -> Dialog:
        """A dialog that is over as the scorer sees it: the turns that reached the agent."""
        delivered = self._episodes[dialog.episode].delivered
        return replace(dialog, responses=[dialog.responses[turn] for turn in delivered], last=True)

    def _scored(self, turn: Turn, other: Turn | Exception, episode: _Episode) -> Turn | Exception:
        """The agent's last turn, with the score that the other task gives."""
        if isinstance(other, Turn):
            return replace(turn, score=other.score)
        if not isinstance(other, NotImplementedError):
            return other
        raised = None if episode.result is None else episode.result.exception()
        if isinstance(raised, Exception):
            return raised
        return InvalidRewardError(
            "an agent must return its reward where nothing else scores the response, it returned "
            "None: return a number, or name env.reward.",
            "none",
        )

    def _go_on(self, dialog: Dialog) -> None:
        """Starts an episode's agent, or gives it the policy's latest turn."""
        if not dialog.responses:
            self._start(dialog)
            return
        episode = self._episodes[dialog.episode]
        if len(dialog.responses) > episode.answered:
            episode.answer(dialog, self.parser)
            if dialog.last:
                turns = len(dialog.responses)
                episode.refused = BadRequest(
                    f"an episode must have at most env.max_turns={turns} requests, this is one "
                    f"more: end the episode, or use env.max_turns={2 * turns}.",
                    code="max_turns_exceeded",
                )
        else:  # what it asked found no room
            episode.refuse(
                BadRequest(
                    "the chat must leave room for an answer, it is longer than "
                    "env.max_prompt_tokens and the model's context allow: end the episode, or use "
                    "a model with a longer context.",
                    "messages",
                    code="context_length_exceeded",
                )
            )

    def _start(self, dialog: Dialog) -> None:
        if self._server is None:
            self._server = Server(self._keys.get)
        episode = _Episode(dialog.takes_tools)
        self._episodes[dialog.episode] = self._keys[episode.key] = episode
        result, episode.end = self.program.start(
            self._problem(dialog.problem), self._server.url, episode.key
        )
        result.add_done_callback(episode.ended)

    def _problem(self, problem: Problem) -> dict[str, Any]:
        messages = self.task.messages(problem)
        return {
            **problem.extra,
            "prompt": problem.query,
            "messages": messages,
            "answer": problem.answer,
        }

    def _outcome(self, dialog: Dialog, *, deadline: float, timeout_s: float | None) -> Turn:
        """The agent's next request, or the score."""
        episode = self._episodes[dialog.episode]
        try:
            lost = episode.settle(deadline)
            while True:
                event = episode.next(deadline)
                if isinstance(event, Future):
                    # An answer that found no room, or no turn, is one that goes on: the dialog is
                    # truncated.
                    episode.result = event
                    messages: list[Message] | None = [] if episode.cut else None
                    return Turn(messages, self._own_score(episode, event), undelivered=lost)
                if event.delivered.done():  # its client has left
                    continue
                if episode.refused is None:
                    return replace(episode.turn(event), undelivered=lost)
                episode.refuse(episode.refused, event)
        except TimeoutError:
            raise InvalidRewardError(
                f"an agent must ask or end within env.reward_timeout_s={timeout_s}, it did not: "
                "use a larger one, or mend the agent.",
                "timeout",
            ) from None

    def _own_score(self, episode: _Episode, result: Future[float | None]) -> Score | None:
        """The score that the agent gives itself; None leaves it to the other task.

        Raises:
            InvalidRewardError: the agent got no answer.
            Exception: what the agent raised; one that was refused an answer is scored by the task
                all the same.
        """
        error = result.exception()
        if error is not None and not episode.cut:
            interrupts = not isinstance(
                error, Exception
            )  # such as KeyboardInterrupt: no agent interrupts a run
            raise (
                RuntimeError(f"the agent raised {type(error).__name__}: {error}")
                if interrupts
                else error
            )
        if not episode.delivered:
            raise InvalidRewardError(
                "an agent must ask the policy, it ended without an answer: send a request, and wait for its answer.",
                "exception",
            )
        reward = None if error else result.result()
        return None if reward is None else Score(reward, reward >= 1, {_PART: reward})

    def close(self, episode: str) -> None:
        found = self._episodes.pop(episode, None)
        if found is not None:
            del self._keys[found.key]
            found.close()
