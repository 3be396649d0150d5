"""Guess a number from 1 to 7: three guesses, each answered by higher, lower or right, and the last
one counts.

One game in the four forms that a run accepts. ``docs/tutorials/games.md`` trains a model that plays
it, and has the command of each form.
"""

import random

from torchrl_grpo.tasks import Problem, Score, Task
from torchrl_grpo.tools import ToolCall

PROMPT = "Guess 1-7."
GUESSES = 3


def hint(guess, number):
    """Return the answer to a guess; None, which ends the game, if the text is not a guess."""
    if len(guess) != 1 or guess not in "1234567":
        return None
    if int(guess) == number:
        return "right"
    return "higher" if int(guess) < number else "lower"


class TextGame:
    """A text game: the policy's text is the guess."""

    def reset(self, seed):
        self.number = 1 + seed % 7
        self.left = GUESSES
        return PROMPT

    def step(self, response):
        answer = hint(response, self.number)
        self.left -= 1
        done = answer is None or self.left == 0
        return answer, float(done and answer == "right"), done


class ToolGame:
    """A class for TRL's ``environment_factory``: the guess is the call of a tool."""

    def reset(self, seed):
        self.number = 1 + seed % 7
        self.guesses = []
        return "Guess"  # the chat template adds the tool's description

    def guess(self, number: int) -> str:
        """1-7.

        Args:
            number: from 1 to 7.
        """
        self.guesses.append(number)
        return hint(str(number), self.number)

    def get_reward(self):
        return float(len(self.guesses) == GUESSES and self.guesses[-1] == self.number)


def bare_digit(text):
    """A parser (``env.tool_parser``) that reads a digit as a call of ``guess``, for a model that
    does not write JSON.
    """
    digit = text.removesuffix("<|end|>")
    return [] if hint(digit, 0) is None else [ToolCall("guess", {"number": int(digit)})]


async def play(client, problem):
    """An agent: it asks the policy for each guess with an OpenAI client."""
    chat = list(problem["messages"])
    for _ in range(GUESSES):
        completion = await client.chat.completions.create(model="policy", messages=chat)
        message = completion.choices[0].message
        answer = hint(message.content, problem["answer"])
        if answer is None:
            return 0.0
        chat += [message, {"role": "user", "content": answer}]
    return float(answer == "right")


class GuessTask(Task):
    """A task: the problems, the answers to the policy, the score, and demonstrations for
    ``algo=sft``.
    """

    name = "guess"

    def problems(self, split):
        seeds = range(1000, 1250) if split == "test" else range(1000)
        return [Problem(PROMPT, 1 + seed % 7, {"seed": seed}) for seed in seeds]

    def next_turn(self, problem, responses):
        return None if len(responses) == GUESSES else hint(responses[-1], problem.answer)

    def demonstration(self, problem):
        """A dialog of random guesses, which shows only the form."""
        rng = random.Random(problem.extra["seed"])
        chat = []
        for _ in range(GUESSES):
            guess = str(rng.randint(1, 7))
            chat += [
                {"role": "assistant", "content": guess},
                {"role": "user", "content": hint(guess, problem.answer)},
            ]
        return chat[:-1]

    def score(self, problem, responses):
        right = len(responses) == GUESSES and hint(responses[-1], problem.answer) == "right"
        return Score(float(right), right)
