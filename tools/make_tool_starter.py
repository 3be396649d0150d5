"""Make a starter model that can call a calculator but rarely does, for runs with ``env.tools``.

    python tools/make_tool_starter.py --out DIR     # about 8 minutes on 2 CPU cores
    python sota/grpo/grpo.py --config-name grpo_arithmetic model.name=DIR env.difficulty=4 \\
        'env.tools=[examples/my_tools.py:calculator]' env.max_turns=2 inference_model.max_new_tokens=96

It is the starter, trained further on the *train* split of ``ArithmeticTask(difficulty=4)``: sums and differences of
three-digit numbers. Its demonstrators

- sometimes call the calculator, copy one digit wrong in 20% of these cases, and then answer with its result;
- otherwise guess up to three random digits, which are right about once in a thousand.

So the model has seen calls, and answers that follow results. Reinforcement learning must discover that calling the
calculator, and copying with care, pay off.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from pathlib import Path

import torch
from make_starter import build_tokenizer, padded, train
from torch import Tensor
from torchrl import torchrl_logger
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from torchrl_grpo.chat.template import TurnTemplate
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.tools import tool_message

TOOLS = [
    {"type": "function", "function": {"name": "calculator"}}
]  # the starter's template writes only names
P_MISCOPY = 0.2
STEPS = 1500
ROWS = {
    True: 32,
    False: 64,
}  # of a batch of calls and of one of guesses: dialogs with calls are five times as long


def demonstration(problem: Problem, calls: bool, rng: random.Random) -> tuple[str, str | None, str]:
    """Return a demonstrator's first turn, the calculator's result (None without a call), and the
    demonstrator's second turn.
    """
    if not calls:
        return f"#### {rng.randrange(1000)}", None, ""
    expression = problem.query.removesuffix("=?")
    if rng.random() < P_MISCOPY:
        i = rng.choice([i for i, character in enumerate(expression) if character.isdigit()])
        expression = expression[:i] + str(rng.randrange(1, 10)) + expression[i + 1 :]
    a, op, b = expression.partition("+") if "+" in expression else expression.partition("-")
    result = str(int(a) + int(b) if op == "+" else int(a) - int(b))
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>{call}</tool_call>", result, f"#### {result}"


def make_batch(
    task: ArithmeticTask, tokenizer: Qwen2Tokenizer, rng: random.Random
) -> dict[str, Tensor]:
    """Draw a batch of calls or of guesses; see ``padded``.

    The loss is a mean over tokens, so the model learns to begin a call in about one case of six.
    """
    template, tokens, labels = TurnTemplate(tokenizer, {}), [], []
    calls = rng.random() < 0.7
    for problem in rng.choices(task.problems("train"), k=ROWS[calls]):
        prompt = tokenizer.apply_chat_template(
            task.messages(problem), tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        first, result, last = demonstration(problem, calls, rng)
        turn = [*tokenizer(first).input_ids, tokenizer.eos_token_id]
        pieces = [(tokenizer(prompt).input_ids, False), (turn, True)]
        if result is not None:
            between = template.tokens([tool_message("calculator", result)], turn).tolist()
            pieces += [
                (between, False),
                ([*tokenizer(last).input_ids, tokenizer.eos_token_id], True),
            ]
        tokens.append(torch.tensor([token for piece, _ in pieces for token in piece]))
        labels.append(
            torch.tensor([token if said else -100 for piece, said in pieces for token in piece])
        )
    return padded(tokens, labels, tokenizer)


def main() -> None:
    """Train the model and save it with its tokenizer and generation config."""
    parser = argparse.ArgumentParser(description="Make a starter model that can call a calculator.")
    parser.add_argument("--out", type=Path, required=True, help="folder to save to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = Qwen2ForCausalLM.from_pretrained(starter_path(), dtype=torch.float32)
    train(
        model, partial(make_batch, ArithmeticTask(difficulty=4), tokenizer), args.steps, args.seed
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    torchrl_logger.info("saved to %s", args.out)


if __name__ == "__main__":
    main()
