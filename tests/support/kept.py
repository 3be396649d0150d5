"""A task that keeps a log of each dialog. Free of torch, because reward workers import it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.tasks.base import Dialog, Message, Problem, Score, Task, Turn


class KeepingTask(Task):
    """Obey the response: ``exit``, ``hang``, ``boom``, ``stop``; or a number, the reward of the
    turn.

    The reward of a dialog is the sum of its turns'. ``path`` gets a line for each opening and each
    close.

    Args:
        path: log file.
        queries: problems; ``bad`` fails to open.
    """

    name = "keeping"
    is_stateful = True
    multi_turn = True

    def __init__(
        self, path: str | Path, queries: Sequence[str] = "abcd", at_a_time: int = 1
    ) -> None:
        self.path, self.queries, self.at_a_time = Path(path), list(queries), at_a_time
        self.kept: dict[str, list[float]] = {}

    def problems(self, split: str) -> list[Problem]:
        return [Problem(query, query) for query in self.queries]

    def note(self, what: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{what}\n")

    def open(self, dialog: Dialog) -> list[Message]:
        self.note(f"open {dialog.episode}")
        if dialog.problem.query == "bad":
            raise ValueError("no such game")
        if dialog.problem.query == "die":
            os._exit(3)
        self.kept[dialog.episode] = []
        return [*dialog.messages, {"role": "user", "content": "begin"}]

    def turn(self, dialog: Dialog) -> Turn:
        if not dialog.responses:
            return Turn(self.open(dialog), None)
        response, rewards = dialog.responses[-1], self.kept[dialog.episode]
        if response == "exit":
            os._exit(3)
        if response == "hang":
            time.sleep(1000)
        if response == "boom":
            raise KeyError("boom")
        reward = None
        if dialog.finish_reason == "stop" and response != "stop":
            reward = float(response)
            rewards.append(reward)
        over = dialog.finish_reason == "length" or response == "stop"
        score = Score(sum(rewards), sum(rewards) >= 1) if over or dialog.last else None
        return Turn(
            None if over else [{"role": "user", "content": f"{os.getpid()}"}], score, {}, reward
        )

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        self.note(f"advance {len(dialogs)}")
        turns: list[Turn | Exception] = []
        for dialog in dialogs:
            try:
                turns.append(self.turn(dialog))
            except Exception as error:
                turns.append(error)
        return turns

    def close(self, episode: str) -> None:
        self.note(f"close {episode}")
        self.kept.pop(episode, None)
