"""Make the tool starter: a model that can call a calculator but rarely does.

    python tools/make_tool_starter.py --out DIR     # about 2 minutes of CPU time

It is the starter, trained further on the *train* split of ``ArithmeticTask(difficulty=4)``: sums and
differences of three-digit numbers, and a tool ``calculator(expression)``. Its demonstrators

- sometimes call the calculator, copy one digit wrong in 20% of these cases, and then answer with its
result;
- otherwise give up (``#### ?``).

So the model has seen calls, and answers that follow results. Reinforcement learning must discover
that calling the calculator, and copying with care, pay off.

The same seed gives the same weights on the same machine with the same number of threads. The
shipped weights were made with the defaults and two threads (``OMP_NUM_THREADS=2``).
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path

import torch
from make_starter import CHAT_TEMPLATE, build_tokenizer, padded, train
from torch import Tensor
from torchrl import torchrl_logger
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from torchrl_grpo.chat.template import TurnTemplate
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.tools import tool_message

TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
"""The template writes only the names of tools."""
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "?"}}</tool_call>'
CONTENT = (
    "{{ '%-8s' | format(m['content']) if m['role'] == 'tool' else m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}"
)
"""Results are at least 8 characters wide. So an answer of fewer digits is always the same number of
tokens behind the result, and so small a model learns to copy it in minutes.
"""
TOOL_TEMPLATE = CHAT_TEMPLATE.replace("{{ m['content'] }}", CONTENT)
P_MISCOPY = 0.2
P_CALLS = 0.8
"""Share of demonstrations that call; the others give up."""
P_WHOLE = 1 / 16
"""Share of calls whose whole first turn has a loss, so that the model begins a call in one case of
five. In the others only the expression has one: the rest is the same in every call, and copying is
what takes long to learn.
"""
P_ENDS = 0.5
"""Share of batches of only results and answers, which are a fifth as long as whole dialogs."""
STEPS = 350
BATCH_SIZE = 32


def demonstration(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Return the expression that a demonstrator passes to the calculator, and its result: a random
    number, so that the answer can only be learned from it.
    """
    expression = problem.query.removesuffix("=?")
    if rng.random() < P_MISCOPY:
        i = rng.choice([i for i, character in enumerate(expression) if character.isdigit()])
        expression = expression[:i] + str(rng.randrange(1, 10)) + expression[i + 1 :]
    return expression, str(rng.randrange(2000))


def make_batch(
    task: ArithmeticTask, tokenizer: Qwen2Tokenizer, rng: random.Random
) -> dict[str, Tensor]:
    """Draw a batch of whole demonstrations, or of only their results and answers; see ``padded``."""
    template, tokens, labels = TurnTemplate(tokenizer, {}), [], []
    ends = rng.random() < P_ENDS
    for problem in rng.choices(task.problems("train"), k=BATCH_SIZE * (4 if ends else 1)):
        prompt = tokenizer.apply_chat_template(
            task.messages(problem), tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        pieces = [(tokenizer(prompt).input_ids, False)]  # tokens, and whether they have a loss
        answer = "#### ?"
        if ends or rng.random() < P_CALLS:
            expression, result = demonstration(problem, rng)
            whole = rng.random() < P_WHOLE
            before, after = CALL.split('?"')
            first = [(before, whole), (f'{expression}"', True), (f"{after}<|end|>", whole)]
            pieces += [(tokenizer(text).input_ids, said) for text, said in first]
            turn = [token for piece, _ in pieces[1:] for token in piece]
            between = template.tokens([tool_message("calculator", result)], turn).tolist()
            pieces = [*(() if ends else pieces), (between, False)]
            answer = f"#### {result}"
        pieces.append((tokenizer(f"{answer}<|end|>").input_ids, True))
        tokens.append(torch.tensor([token for piece, _ in pieces for token in piece]))
        labels.append(
            torch.tensor([token if said else -100 for piece, said in pieces for token in piece])
        )
    return padded(tokens, labels, tokenizer)


def main() -> None:
    """Train the tool starter and save model, tokenizer and generation config.

    The weights are stored in float16, half the size, and load in float32, as the config says.
    """
    parser = argparse.ArgumentParser(description="Make the tool starter.")
    parser.add_argument(
        "--out", type=Path, default=starter_path("tool_starter"), help="folder to save to"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(chat_template=TOOL_TEMPLATE)
    model = Qwen2ForCausalLM.from_pretrained(starter_path(), dtype=torch.float32)
    train(
        model, partial(make_batch, ArithmeticTask(difficulty=4), tokenizer), args.steps, args.seed
    )
    model.half().save_pretrained(args.out)
    model.config.dtype = torch.float32
    model.config.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    torchrl_logger.info("saved to %s", args.out)


if __name__ == "__main__":
    main()
