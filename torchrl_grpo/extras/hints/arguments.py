"""Hints for arguments of reward functions that neither the data nor the response has."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

_OTHER_NAMES = {
    "response": ("completion", "generation", "output", "pred", "prediction", "generated_text", "text"),
    "answer": ("reference", "ground_truth", "gold", "label", "target", "solution", "expected", "truth"),
    "prompt": ("question", "query", "problem", "instruction", "input"),
    "completions": ("responses", "outputs", "generations", "predictions"),
}  # fmt: skip
"""Our names of arguments, and names that other libraries have for them."""
_OF_ANSWERS = ("answer", *_OTHER_NAMES["answer"], "result", "correct")


def explain_arguments(missing: Sequence[str], known: Collection[str]) -> str:
    """Return which arguments to rename, or which column to name; empty without an idea.

    Args:
        missing: arguments that do not exist.
        known: arguments that exist, columns of the data among them.

    >>> explain_arguments(["completion", "reference"], ["response", "answer"])
    'rename completion to response and reference to answer'
    >>> explain_arguments(["answer"], ["response", "final_answer"])
    'name its column, env.columns.answer=final_answer'
    """
    if "answer" in missing:
        columns = [name for name in known if any(word in name.lower() for word in _OF_ANSWERS)]
        return f"name its column, env.columns.answer={columns[0]}" if columns else ""
    renamed = []
    for name in missing:
        close = difflib.get_close_matches(name, known, 1, 0.8)
        close += [ours for ours, others in _OTHER_NAMES.items() if name in others and ours in known]
        renamed += [f"{name} to {close[0]}"] if close else []
    return f"rename {' and '.join(renamed)}" if renamed else ""
