"""Rows of three-digit sums with worked solutions, one JSON object per line: ``docs/teaching.md``
trains on them.
"""

import json
import random

draw = random.Random(0)
for _ in range(4600):
    a = draw.randint(100, 999)
    b = draw.randint(100, 999)
    steps = []
    carry = 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' * carry}={total}")
        carry = total // 10
    solution = f"{', '.join(steps)} #### {a + b}"
    print(json.dumps({"question": f"{a}+{b}=? #### n", "solution": solution, "answer": str(a + b)}))
