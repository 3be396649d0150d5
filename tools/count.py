"""Count the package: Python tokens without comments and docstrings, by folder, and the density of
its lines.

Tokens, unlike lines, do not change with formatting. CONTRIBUTING.md states the budget of the core,
which is everything but ``extras/`` and ``integrations/``; ``tests/unit/test_budget.py`` checks it.

    python tools/count.py
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "torchrl_grpo"
NOT_CORE = ("extras", "integrations")
LONG = 100
"""Lines with more characters count as long."""
_IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)


def count_tokens(source: str) -> int:
    """Return the number of Python tokens of a file's text, without comments, docstrings, and line
    structure.
    """
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add((first.lineno, first.col_offset))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        depth -= name == "FSTRING_END"
        is_docstring = token.type == tokenize.STRING and token.start in docstrings
        # An f-string is one token, as it is before Python 3.12.
        count += depth == 0 and token.type not in _IGNORED | {_FSTRING_END} and not is_docstring
        depth += name == "FSTRING_START"
    return count


def tokens_by_folder(package: Path = PACKAGE) -> Counter[str]:
    """Return the tokens of each folder of the package; files at its top count as ``.``."""
    counts: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        counts[parts[0] if len(parts) > 1 else "."] += count_tokens(path.read_text())
    return counts


def core_tokens(counts: Counter[str]) -> int:
    """Return the tokens of the folders that belong to the core."""
    return sum(count for folder, count in counts.items() if folder not in NOT_CORE)


def main() -> None:
    """Print the table."""
    counts = tokens_by_folder()
    for folder, count in sorted(counts.items()):
        print(f"{folder:<14} {count:>8,}")
    print(f"{'core':<14} {core_tokens(counts):>8,}\n{'package':<14} {counts.total():>8,}")
    lines = [
        line
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.strip()
    ]
    length = sum(len(line.strip()) for line in lines) / len(lines)
    long = sum(len(line) > LONG for line in lines) / len(lines)
    print(
        f"{length:.1f} characters per non-blank line without indentation, {long:.1%} of the lines above {LONG}"
    )


if __name__ == "__main__":
    main()
