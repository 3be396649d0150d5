"""The environments of TRL's guides to ``environment_factory`` (grpo_trainer.md, openenv.md; Apache 2.0), as they are
written there, and what reads them. Free of torch, because reward workers import it."""

import random


class IncrementEnv:
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class TargetEnv:  # IncrementEnv of "Providing an external dataset"
    def reset(
        self, target, **kwargs
    ) -> None:  # the row's `target` column arrives as a keyword argument
        self.counter = 0
        self.target = target

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    increment = IncrementEnv.increment


class GameEnv:
    def reset(self, **kwargs) -> str:
        return "Reach the goal tile."

    def move(self, action: str) -> str:  # exposed as a tool only for "game" examples
        """Apply an action to the game and return the new observation.

        Args:
            action: One of "up", "down", "left", "right".

        Returns:
            The observation after the move.
        """
        return f"moved {action}"


class WordleEnv:  # without its server
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        self.done = False
        return "Guess a word."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        self.reward, self.done = float(guess == "[house]"), guess == "[house]"
        return "GGGGG" if self.done else "XXXXX"


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


def format_reward(completions, **kwargs):
    return [0.25 * ("tool_call" in str(completion)) for completion in completions]


def steady(environments, **kwargs):
    return [1.0 for env in environments]
