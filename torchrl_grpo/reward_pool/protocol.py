"""Messages between a reward pool and its workers, and the worker's side of the pipe.

Requests are pickled. Answers are JSON and never unpickled, because a worker's output may come from
the code that it scores.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torchrl_grpo.checks import check_reward
from torchrl_grpo.errors import INVALID_CAUSES, InvalidRewardError
from torchrl_grpo.host import interrupts
from torchrl_grpo.host.children import serve_connection
from torchrl_grpo.host.processes import continue_in_guarded_child, enable_stack_dump
from torchrl_grpo.host.text import clip, printable
from torchrl_grpo.images import ImageFile, message_content
from torchrl_grpo.tasks.base import Dialog, Message, Score, Task, Turn, TurnLimits, attempt

MAX_ANSWER_BYTES = 2**28
MAX_TURN_BYTES = MAX_ANSWER_BYTES // 64
"""Maximum size of a turn as JSON, images included."""
_MAX_ERROR_CHARACTERS = 4000
_MAX_LINE_CHARACTERS = 200
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True)
class Failure:
    """Reason why a dialog has no score.

    Attributes:
        kind: failures of one kind are logged once.
        text: message for the log; a traceback if there is one.
        cause: one of ``INVALID_CAUSES``: ``crash`` if the process died, ``lost`` if the process
            with the dialog's state had died before.
        policy_message: message to the policy, if a tool took too long or ended its process.
        line: the failure on one line: an exception's type, message, and location in the user's
            file.
    """

    kind: tuple[Any, ...]
    text: str
    cause: str = "exception"
    policy_message: str = ""
    line: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure for a task's exception; its kind is the type and the location. The
        text omits our own frames.
        """
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
        is_invalid_reward = isinstance(error, InvalidRewardError)
        visible_frames = user_frames or ([] if is_invalid_reward else frames)
        lines = [*traceback.format_list(visible_frames), *traceback.format_exception_only(error)]
        cause = error.cause if isinstance(error, InvalidRewardError) else "exception"
        line = f"{type(error).__name__}: {printable(clip(str(error), _MAX_LINE_CHARACTERS))}"
        own_frames = [
            frame for frame in user_frames if not frame.filename.startswith(_STANDARD_LIBRARY)
        ]
        called = own_frames or user_frames
        if called:  # the deepest line of the file that was called
            deepest = [frame for frame in called if frame.filename == called[0].filename][-1]
            line += f" at {deepest.filename}:{deepest.lineno}"
        place = (frames[-1].filename, frames[-1].lineno) if frames else ()
        return cls(
            kind=(type(error).__name__, *place),
            text=clip("".join(lines).rstrip(), _MAX_ERROR_CHARACTERS),
            cause=cause if cause in INVALID_CAUSES else "exception",
            line=line,
        )


def advance(
    task: Task, dialogs: Sequence[Dialog], timeout_s: float | None = None
) -> list[Turn | Failure]:
    """Return the turn of ``task.advance`` for each dialog, with finite rewards, or its failure."""
    turns = attempt(lambda dialogs: task.advance(dialogs, timeout_s), dialogs)  # may be a user's
    if isinstance(turns, Exception):
        turns = [turns] * len(dialogs)
    return [_check_turn(turn, task) for turn in turns]


def _check_turn(turn: Turn | Exception, task: Task) -> Turn | Failure:
    if isinstance(turn, Exception):
        return Failure.of(turn)
    try:
        if turn.reward is not None:
            reward = check_reward(turn.reward, f"the reward of a turn of {task.name!r}")
            turn = replace(turn, reward=reward)
        if turn.messages is not None:
            what = f"a message of {task.name!r}"
            turn = replace(turn, messages=[_with_files(entry, what) for entry in turn.messages])
        if turn.score is None:
            return turn
        parts: dict[str, float | None] = {}
        for name, value in turn.score.parts.items():
            part = f"the part {name} of {task.name!r}"
            parts[str(name)] = None if value is None else check_reward(value, part)
        reward = check_reward(turn.score.reward, f"the reward of {task.name!r}")
        what = f"the reward of a turn of {task.name!r}"
        turns = tuple(v if v is None else check_reward(v, what) for v in turn.score.turns)
        correct, feedback = bool(turn.score.correct), str(turn.score.feedback)
        return replace(turn, score=Score(reward, correct, parts, feedback, turns))
    except Exception as error:
        return Failure.of(error)


def _with_files(message: Message, what: str) -> Message:
    """Return a message with each image as a file."""
    content = message_content(message.get("content"), what)
    return message if content is None else {**message, "content": content}


def encode(turns: Sequence[Turn | Failure], number: int) -> bytes:
    """Return the answer to a request, as JSON."""
    return f"[{number}, [{', '.join(map(_to_json, turns))}]]".encode()


def _to_json(turn: Turn | Failure) -> str:
    if isinstance(turn, Failure):
        return json.dumps(vars(turn))
    fields = vars(turn) | {
        "messages": None if turn.messages is None else list(turn.messages),
        "score": turn.score
        and vars(turn.score) | {"parts": dict(turn.score.parts), "turns": list(turn.score.turns)},
        "counts": {str(name): float(count) for name, count in turn.counts.items()},
        "tools": None if turn.tools is None else list(turn.tools),
        "limits": vars(turn.limits),
    }
    try:
        text = json.dumps(fields, default=_image_to_json)
        if len(text) > MAX_TURN_BYTES:
            raise ValueError(
                f"a turn must be under {MAX_TURN_BYTES:,} bytes, but it has {len(text):,}: return "
                "shorter messages, or smaller images, such as JPEG files."
            )
        return text
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps(vars(Failure.of(error)))


def _image_to_json(value: Any) -> str:
    """Return an image of a message as text."""
    if isinstance(value, ImageFile):
        return b64encode(value.data).decode()
    raise TypeError(f"a message must have texts and images, but it has {value!r:.80}.")


def decode(answer: bytes, number: int, count: int) -> list[Turn | Failure]:
    """Return the turns of an answer.

    Raises:
        ValueError: it is not an answer to the request with this number and count of dialogs.
    """
    try:
        answered, parts = json.loads(answer)
        turns = [_from_json(fields) for fields in parts]
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise ValueError("it is not an answer") from error
    if answered != number or len(turns) != count:
        raise ValueError("it is not an answer to this request")
    return turns


def _from_json(fields: dict[str, Any]) -> Turn | Failure:
    if "cause" in fields:
        if fields["cause"] not in INVALID_CAUSES:
            raise ValueError("unknown cause")
        kind = tuple(map(str, fields["kind"]))
        return Failure(kind, str(fields["text"]), fields["cause"], line=str(fields["line"]))
    score, limits = fields["score"], fields["limits"]
    if score is not None:
        parts = {name: _number(value) for name, value in score["parts"].items()}
        score = Score(
            float(score["reward"]),
            bool(score["correct"]),
            parts,
            str(score["feedback"]),
            tuple(map(_number, score["turns"])),
        )
    max_tokens = limits["max_tokens"]
    return Turn(
        messages=_messages(fields["messages"]),
        score=score,
        counts={name: float(count) for name, count in fields["counts"].items()},
        reward=_number(fields["reward"]),
        tools=_objects(fields["tools"]),
        sample=int(fields["sample"]),
        limits=TurnLimits(
            None if max_tokens is None else int(max_tokens),
            tuple(map(str, limits["stop"])),
            bool(limits["log_probs"]),
        ),
        undelivered=bool(fields["undelivered"]),
    )


def _messages(values: Any) -> list[Message] | None:
    """Return messages with their images."""
    messages = _objects(values)
    for message in messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image":
                part["image"] = ImageFile(b64decode(part["image"], validate=True))
    return messages


def _objects(values: Any) -> list[dict[str, Any]] | None:
    return None if values is None else [dict(value) for value in values]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def serve(fd: int, parent: int) -> None:
    """Run a worker process: load the task, advance dialogs until the pipe closes, then close the
    remaining dialogs.

    Args:
        fd: the worker's end of the pipe.
        parent: the process that started it.
    """
    connection = serve_connection(fd)
    if sys.platform == "linux":
        continue_in_guarded_child(parent, closing=fd)
        enable_stack_dump()
    interrupts.ignore_broken_pipes()  # a scorer may print
    with suppress(EOFError, OSError):
        task_bytes = connection.recv_bytes()
        try:
            task = pickle.loads(task_bytes)
        except Exception:
            text = clip(traceback.format_exc(), _MAX_ERROR_CHARACTERS)
            connection.send_bytes(text.encode(errors="replace"))
            return
        connection.send_bytes(b"")
        open_episodes: set[str] = set()
        printed_kinds: set[tuple[Any, ...]] = set()
        try:
            while True:
                number, dialogs, ended, timeout_s = connection.recv()
                _close(task, ended, printed_kinds)
                open_episodes.difference_update(ended)
                open_episodes.update(dialog.episode for dialog in dialogs if dialog.episode)
                try:
                    turns = advance(task, dialogs, timeout_s)
                # A scorer raised it, because no keyboard interrupts a worker.
                except BaseException as error:
                    turns = [Failure.of(error)] * len(dialogs)
                connection.send_bytes(encode(turns, number))
        finally:
            _close(task, sorted(open_episodes), printed_kinds)


def _close(task: Task, episodes: Iterable[str], printed_kinds: set[tuple[Any, ...]]) -> None:
    """Close dialogs; failures of one kind are printed once."""
    for episode in episodes:
        error = attempt(task.close, episode)
        if not isinstance(error, Exception):
            continue
        failure = Failure.of(error)
        if failure.kind not in printed_kinds:
            printed_kinds.add(failure.kind)
            message = f"task {task.name!r} failed to close a dialog.\n{failure.text}"
            print(message, file=sys.stderr, flush=True)
