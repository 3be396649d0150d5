"""An OpenEnv server of a guessing game, by an action under /actions and by an MCP tool under
/tools.

A guess of 500 makes the environment fail, and 9 ends the server. The first line that it prints is
its port.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from fastmcp.utilities.types import Audio, Image
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from tests.support.pictures import picture

PICTURE = picture(3).data


class GuessAction(Action):
    """Guess the number."""

    number: int = Field(description="from 1 to 7")


class GuessObservation(Observation):
    said: str = ""


class Game:
    def start(self, seed: int | None) -> None:
        self.number, self.reward = 1 + (seed or 0) % 7, 0.0

    def play(self, number: int) -> str:
        if number == 500:
            raise RuntimeError("the game is broken")
        if number == 9:
            os._exit(1)
        self.reward = 1.0 if number == self.number else -0.25
        return "right" if number == self.number else "higher" if number < self.number else "lower"


class Actions(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> GuessObservation:
        self.game = Game()
        self.game.start(seed)
        return GuessObservation(said="Guess 1-7.")

    def step(
        self, action: GuessAction, timeout_s: float | None = None, **_: Any
    ) -> GuessObservation:
        reply = self.game.play(action.number)
        return GuessObservation(said=reply, reward=self.game.reward, done=reply == "right")

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.game, server = Game(), FastMCP("guess")

        @server.tool()
        def guess(number: int) -> str:
            """Guess the number."""
            return self.game.play(number)

        @server.tool()
        def show(kind: str) -> Any:
            """Show a picture, or a sound."""
            return ["look", (Image if kind == "png" else Audio)(data=PICTURE, format=kind)]

        super().__init__(server)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        self.game.start(seed)
        return Observation(metadata={"note": "no text"})

    def _rewarded(self, observation: Observation) -> Observation:
        if isinstance(observation, CallToolObservation) and observation.error is None:
            observation.reward, observation.done = self.game.reward, self.game.reward == 1.0
        return observation

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._rewarded(super().step(action, timeout_s, **kwargs))

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **kwargs: Any
    ) -> Observation:
        return self._rewarded(await super().step_async(action, timeout_s, **kwargs))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = FastAPI()
    app.mount(
        "/actions",
        create_fastapi_app(Actions, GuessAction, GuessObservation, max_concurrent_envs=8),
    )
    app.mount(
        "/tools",
        create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=8),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
