"""Your own data and reward, from a file to a learning curve:

    python examples/my_data.py sums.csv        # your own may be any csv, json, jsonl or parquet file
    python sota/grpo/grpo.py --config-name grpo_arithmetic env.dataset=sums.csv env.columns.prompt=question \\
        env.columns.answer=sum 'env.prompt_template="{question} #### n"' env.test_fraction=0.2 \\
        env.reward=examples/my_data.py:exact_match

The reward's arguments are matched by name: ``response``, ``answer``, ``prompt``, ``messages``, ``finish_reason``,
``tokens``, and every column of the data. It returns a number, a bool, None, or named parts.
"""

import csv
import random
import sys


def exact_match(response, answer):
    return {
        "right": float(response.strip().endswith(f"#### {answer}")),
        "short": 0.1 * (len(response) < 40),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/my_data.py FILE.csv")
    with open(sys.argv[1], "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "sum"])
        for number in random.Random(0).sample(range(8100), 1000):
            a = 10 + number // 90
            b = 10 + number % 90
            writer.writerow([f"{a}+{b}=?", a + b])
