"""Guess a number from 1 to 7: three guesses, each is told higher, lower or right, and the last one
counts.

One game, written in the four forms that a run takes. ``docs/tutorials/games.md`` trains a model
that plays it, and has the command of each form.
"""

import random

from torchrl_grpo.tasks import Problem, Score, Task
from torchrl_grpo.tools import ToolCall

PROMPT = "Guess 1-7."
GUESSES = 3


def told(guess, number):
    """Return what is said to a guess; None ends the game, because it was none."""
    if len(guess) != 1 or guess not in "1234567":
        return None
    return "right" if int(guess) == number else "higher" if int(guess) < number else "lower"


class TextGame:
    """A text game: the policy's text is the guess."""

    def reset(self, seed):
        self.number, self.left = 1 + seed % 7, GUESSES
        return PROMPT

    def step(self, response):
        said, self.left = told(response, self.number), self.left - 1
        done = said is None or self.left == 0
        return said, float(done and said == "right"), done


class ToolGame:
    """A class as TRL's ``environment_factory`` takes it: the guess is the call of a tool."""

    def reset(self, seed):
        self.number, self.guesses = 1 + seed % 7, []
        return "Guess"  # the chat template adds the tool's description

    def guess(self, number: int) -> str:
        """1-7.

        Args:
            number: from 1 to 7.
        """
        self.guesses.append(number)
        return told(str(number), self.number)

    def get_reward(self):
        return float(len(self.guesses) == GUESSES and self.guesses[-1] == self.number)


def bare_digit(text):
    """A parser (``env.tool_parser``) to which a digit is a call of ``guess``, for a model that
    writes no JSON.
    """
    digit = text.removesuffix("<|end|>")
    return [] if told(digit, 0) is None else [ToolCall("guess", {"number": int(digit)})]


async def play(client, problem):
    """An agent: it asks the policy for each guess with an OpenAI client."""
    chat = list(problem["messages"])
    for _ in range(GUESSES):
        completion = await client.chat.completions.create(model="policy", messages=chat)
        message = completion.choices[0].message
        said = told(message.content, problem["answer"])
        if said is None:
            return 0.0
        chat += [message, {"role": "user", "content": said}]
    return float(said == "right")


class GuessTask(Task):
    """A task: the problems, the answers to the policy, the score, and demonstrations for
    ``algo=sft``.
    """

    name = "guess"

    def problems(self, split):
        seeds = range(1000, 1250) if split == "test" else range(1000)
        return [Problem(PROMPT, 1 + seed % 7, {"seed": seed}) for seed in seeds]

    def next_turn(self, problem, responses):
        return None if len(responses) == GUESSES else told(responses[-1], problem.answer)

    def demonstration(self, problem):
        """A dialog of someone who guesses at random: it shows the form alone."""
        rng, chat = random.Random(problem.extra["seed"]), []
        for _ in range(GUESSES):
            guess = str(rng.randint(1, 7))
            chat += [
                {"role": "assistant", "content": guess},
                {"role": "user", "content": told(guess, problem.answer)},
            ]
        return chat[:-1]

    def score(self, problem, responses):
        right = len(responses) == GUESSES and told(responses[-1], problem.answer) == "right"
        return Score(float(right), right)
