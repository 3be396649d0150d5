"""A guessing game without end of tasks, as an environment of verifiers whose own code plays the user."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Warmer", "WarmerEnv"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class WarmerEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class WarmerEnv(vf.Env[WarmerEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        reward = 0.0
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            while not segment.terminated:
                guess = int(segment.last_reply or 0)
                if guess == task.data.number:
                    reward = 1.0 / game.trace.num_turns
                    break
                segment = await game.turn("higher" if guess < task.data.number else "lower")
        game.trace.record_reward("game", reward)


class WarmerConfig(vf.TasksetConfig):
    games: int = 10**9


class Warmer(vf.Taskset[GuessTask, WarmerConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        for number in itertools.count():
            seed = number % self.config.games
            yield GuessTask(
                GuessData(name=f"game {seed}", prompt="Guess 0-9.", number=seed % 10),
                self.config.task,
            )
