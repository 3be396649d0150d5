"""Names for the objects of a call, because a config can hold only names.

Data and models become files in ``inputs/`` of the run's folder, because engine, reference model,
Ray and a resumed run load them by name. Everything else gets a name, ``module:name``, by which
``host.objects.OBJECTS`` finds it while the run is built.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.checkpoint_files import sizes_and_sha256

FOLDER = "inputs"
_NAMELESS = ("env.task._target_",)
"""Keys whose objects need not be functions or classes."""


class Inputs:
    """The objects of a call.

    Args:
        folder: folder of the run.
        tokenizer: tokenizer of the model objects.

    Attributes:
        objects: functions, classes and tasks, by name.
        files: data and models, by the path of their folder.
    """

    def __init__(self, folder: Path, tokenizer: Any = None) -> None:
        self.folder = folder / FOLDER
        self.tokenizer = tokenizer
        self.objects: dict[str, Any] = {}
        self.files: dict[Path, Any] = {}

    def to_config(self, key: str, value: Any) -> Any:
        """Return a value as plain types, with names in place of objects.

        Raises:
            ConfigError: the key takes no such object.
        """
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "save_pretrained"):
            if self.tokenizer is None:
                raise ConfigError(
                    f"{key}={type(value).__name__}(...) must come with its tokenizer, which is "
                    "saved with it: give tokenizer too, or the name of a model."
                )
            return self._file("model", value)
        if key.rpartition(".")[2] == "dataset":
            splits = value if isinstance(value, Mapping) else {"train": value}
            return self._file("data", splits)
        if isinstance(value, Mapping):
            return {name: self.to_config(f"{key}.{name}", inner) for name, inner in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.to_config(f"{key}[]", inner) for inner in value]
        if callable(value) or key in _NAMELESS:
            return self._name(value)
        raise ConfigError(
            f"{key}={value!r:.80} must be text, a number, a list, a dict, a function or a class, "
            f"but it is {type(value).__name__}: use one of them."
        )

    def _file(self, stem: str, value: Any) -> str:
        path = self.folder / stem
        while path in self.files:
            path = path.with_name(f"{path.name}_2")
        self.files[path] = value
        return str(path)

    def _name(self, value: Any) -> str:
        source = value if hasattr(value, "__name__") else type(value)
        name = f"{source.__module__}:{source.__name__}"
        while self.objects.setdefault(name, value) is not value:
            name = f"{name}_2"
        return name

    def save(self, *, resumes: bool) -> None:
        """Write the files.

        Args:
            resumes: whether the run began with existing files, which must not change.

        Raises:
            ConfigError: a file would change, or data does not consist of rows.
        """
        if not resumes:
            shutil.rmtree(self.folder, ignore_errors=True)
        for path, value in self.files.items():
            target = path.with_name(f"{path.name}.tmp")
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            if isinstance(value, Mapping):
                for split, rows in value.items():
                    _write_rows(rows, target / split)
            else:
                value.save_pretrained(target)
                self.tokenizer.save_pretrained(target)
            if not path.exists():
                target.rename(path)
                continue
            is_same = _checksums(target) == _checksums(path)
            shutil.rmtree(target)
            if not is_same:
                raise ConfigError(
                    f"{path} must have what the run began with, but the call passes something else: "
                    "pass the same data and model, or their names, or use another folder."
                )


def _checksums(folder: Path) -> Mapping[str, Any]:
    """Return the checksums of a folder's data and weights."""
    kinds = (".jsonl", ".parquet", ".safetensors")
    return sizes_and_sha256([path for path in folder.iterdir() if path.suffix in kinds])


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    """Write the rows of a split: as JSON lines or, if JSON cannot hold them, as parquet.

    Raises:
        ConfigError: they are not rows.
    """
    if hasattr(rows, "to_parquet"):  # of datasets and pandas
        rows.to_parquet(path.with_suffix(".parquet"))
        return
    rows = list(rows)
    invalid_row = next((row for row in rows if not isinstance(row, Mapping)), None)
    if invalid_row is not None:
        raise ConfigError(
            f"env.dataset must have rows that are dicts, but one is {invalid_row!r:.80}: for "
            'example, [{"prompt": "1+1=?", "answer": "2"}].'
        )
    try:
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
    except TypeError:
        from datasets import Dataset

        Dataset.from_list([dict(row) for row in rows]).to_parquet(path.with_suffix(".parquet"))
    else:
        path.with_suffix(".jsonl").write_text(text, encoding="utf-8")
