"""Environments that count, hang, die and report what happened to them. Free of torch, because
reward workers import it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

PATH = os.environ.get("GAMES_PATH", "/dev/null")


def note(what: str) -> None:
    with Path(PATH).open("a") as file:
        file.write(f"{what}\n")


class Game:
    """Obey the response: ``hang``, ``exit``, ``boom``, ``stop``; or a number, the reward of the
    step.
    """

    def __init__(self) -> None:
        self.thread: int | None = threading.get_ident()
        note("made")

    def reset(self, seed: int) -> str:
        self.said: list[str] = []
        return f"game {seed}"

    def step(self, response: str) -> tuple[str, float, bool]:
        assert self.thread in (threading.get_ident(), None)
        self.said.append(response)
        if response == "hang":
            time.sleep(1000)
        if response == "exit":
            os._exit(3)
        if response == "boom":
            raise KeyError("boom")
        return (
            " ".join(self.said),
            0.0 if response == "stop" else float(response),
            response == "stop",
        )

    def close(self) -> None:
        assert self.thread in (threading.get_ident(), None)
        note("closed")


class AsyncGame(Game):
    """The same game with coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = None  # all coroutines run in one loop

    async def reset(self, seed: int) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, response: str) -> tuple[str, float, bool]:  # type: ignore[override]
        if response == "hang":
            await asyncio.sleep(1000)
        return super().step(response)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class StartsWithOthers(Game):
    """Start once eight are starting, and never for every second seed."""

    _others = threading.Barrier(8)

    def __init__(self) -> None:
        super().__init__()
        self._others.wait(timeout=300)

    def reset(self, seed: int) -> str:
        if seed % 2:
            raise OSError("no server")
        return super().reset(seed)
