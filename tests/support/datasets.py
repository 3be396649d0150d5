"""Files of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from torchrl_grpo.tasks.dataset import DatasetTask

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1), "level": n % 3} for n in range(40)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".csv":
        lines = [
            ",".join(rows[0]),
            *(",".join(str(value) for value in row.values()) for row in rows),
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def error_of(task: DatasetTask, split: str = "train") -> str:
    with pytest.raises(ValueError) as caught:
        task.problems(split)  # type: ignore[arg-type]
    return str(caught.value)
