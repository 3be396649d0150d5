"""Guess a number from 0 to 9: three guesses, each is told higher, lower or right, and the last one counts.

One game, written in the four forms that a run takes. ``docs/tutorials/games.md`` trains a model that plays it:

    python examples/my_games.py games.jsonl      # demonstrations, by players who know the form
    python sota/grpo/grpo.py --config-name grpo_arithmetic env.environment=examples/my_games.py:TextGame env.max_turns=3
"""

import json
import random
import sys

from torchrl_grpo.tasks import Problem, Score, Task
from torchrl_grpo.tools import ToolCall

PROMPT = "Guess 0-9."
GUESSES = 3


def told(guess, number):
    """Return what is said to a guess; None ends the game, because it was none."""
    if len(guess) != 1 or guess not in "0123456789":
        return None
    return "right" if int(guess) == number else "higher" if int(guess) < number else "lower"


class TextGame:
    """A text game: the policy's text is the guess."""

    def reset(self, seed):
        self.number, self.left = seed % 10, GUESSES
        return PROMPT

    def step(self, response):
        said, self.left = told(response, self.number), self.left - 1
        done = said is None or self.left == 0
        return said, float(done and said == "right"), done


class ToolGame:
    """A class as TRL's ``environment_factory`` takes it: the guess is the call of a tool."""

    def reset(self, seed):
        self.number, self.guesses = seed % 10, []
        return PROMPT

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: from 0 to 9.
        """
        self.guesses.append(number)
        return told(str(number), self.number)

    def get_reward(self):
        return float(len(self.guesses) == GUESSES and self.guesses[-1] == self.number)


def bare_digit(text):
    """A parser (``env.tool_parser``) to which a digit is a call of ``guess``, for a model that writes no JSON."""
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
    """A task: the problems, the answers to the policy, and the score."""

    name = "guess"

    def problems(self, split):
        seeds = range(1000, 1250) if split == "test" else range(1000)
        return [Problem(PROMPT, seed % 10, {"seed": seed}) for seed in seeds]

    def next_turn(self, problem, responses):
        return None if len(responses) == GUESSES else told(responses[-1], problem.answer)

    def score(self, problem, responses):
        right = len(responses) == GUESSES and told(responses[-1], problem.answer) == "right"
        return Score(float(right), right)


def demonstration(rng):
    """A chat of someone who guesses at random."""
    number, chat, said = rng.randrange(10), [], PROMPT
    for _ in range(GUESSES):
        guess = str(rng.randrange(10))
        chat += [{"role": "user", "content": said}, {"role": "assistant", "content": guess}]
        said = told(guess, number)
    return chat


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/my_games.py FILE.jsonl")
    with open(sys.argv[1], "w") as file:
        rng = random.Random(0)
        file.writelines(json.dumps({"messages": demonstration(rng)}) + "\n" for _ in range(4000))
