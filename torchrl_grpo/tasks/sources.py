"""Rows of a data set from a file, a folder of files, or the Hugging Face hub.

Text files are read here, row by row, so that errors name the line of a malformed row and no value
changes: ``datasets`` would turn text into dates, and the answers in a csv file into numbers. The
rows are then a ``datasets.Dataset``, as from parquet files and the hub.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.checks import REASONING_GYM
from torchrl_grpo.host.extras import load_extra

_SHARD = re.compile(r"[-_.]\d+-of-\d+$")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int | None, Row]]
"""Rows of a file, each with its line."""
Origin = tuple[int, str, Sequence[int | None]]
"""A file: the index of its first row, its name, and the line of each row, or its index in the file
where there are no lines.
"""


@dataclass(frozen=True)
class Table:
    """Rows and their locations.

    Attributes:
        data: the rows, a ``datasets.Dataset``.
        origins: the files that the rows come from, in order.
        encoded: columns stored as JSON in ``data``, because their values have different types or
            are nested.
        rows: for each row, its index in ``origins``; None if these are the same.
        aligned: columns whose nested values are read without the keys that are None, because Arrow
            gives each row the keys of all rows; what is ``encoded`` has its own.
    """

    data: Any
    origins: Sequence[Origin] = ()
    encoded: frozenset[str] = frozenset()
    rows: Sequence[int] | None = None
    aligned: frozenset[str | None] = frozenset()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Row:
        return self._decode(self.data[index])

    def __iter__(self) -> Iterator[Row]:
        return map(self._decode, self.data)

    def select(self, indices: Sequence[int]) -> Table:
        """Return some of the rows of a whole table."""
        return replace(self, data=self.data.select(indices), rows=indices)

    def with_files(self, column: str) -> Table:
        """Return the table with the files of a column's images, which are not decoded."""
        from datasets import Image

        feature = self.data.features[column]
        if isinstance(feature, Image):
            feature = Image(decode=False)
        elif isinstance(getattr(feature, "feature", None), Image):
            feature = replace(feature, feature=Image(decode=False))
        else:
            return self
        return replace(self, data=self.data.cast_column(column, feature))

    def first(self, limit: int | None) -> Table:
        """Return a table of the first rows."""
        if limit is None or limit >= len(self):
            return self
        return replace(self, data=self.data.take(limit))

    def where(self, index: int) -> str:
        """Return the location of a row, such as ``data.jsonl:7`` or ``openai/gsm8k train[6]``."""
        index = index if self.rows is None else self.rows[index]
        firsts = [origin[0] for origin in self.origins]
        first, name, lines = self.origins[bisect_right(firsts, index) - 1]
        line = lines[index - first] if lines else None
        return f"{name}[{index - first}]" if line is None else f"{name}:{line}"

    def _decode(self, row: Row) -> Row:
        for name in row:
            if name in self.encoded and row[name] is not None:
                row[name] = json.loads(row[name])
            elif name in self.aligned:
                row[name] = _without_nones(row[name])
        return row

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows themselves, because another machine does not have the files."""
        return _unpickle, (
            self.data[:],
            self.data.features,
            self.origins,
            self.encoded,
            self.rows,
            self.aligned,
        )


def _unpickle(columns: dict[str, list[Any]], features: Any, *rest: Any) -> Table:
    from datasets import Dataset

    return Table(Dataset.from_dict(columns, features), *rest)


def _without_nones(value: Any) -> Any:
    """Return a nested value without the keys whose value is None.

    >>> _without_nones({"arguments": {"city": "Rome", "x": None}, "name": None})
    {'arguments': {'city': 'Rome'}}
    """
    if isinstance(value, dict):
        return {key: _without_nones(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nones(entry) for entry in value]
    return value


class UnknownSplitError(ValueError):
    """A split does not exist; the message ends before the fix."""


def data_name(dataset: str) -> str:
    """Return the name of a data set: the name of its file or folder, or its name without the
    library or the owner on the hub.

    >>> data_name("data/a.jsonl"), data_name("org/set-1.5"), data_name("reasoning_gym:chain_sum")
    ('a', 'set-1.5', 'chain_sum')
    """
    path = Path(dataset.removeprefix(REASONING_GYM))
    return path.stem if path.suffix in _SUFFIXES else path.name


def find_source(dataset: str, config: str | None, revision: str | None, what: str) -> Files | Hub:
    """Return the file, folder or hub data set with a name.

    Args:
        dataset: the name.
        config: on the hub, the configuration.
        revision: on the hub, the branch, tag or commit.
    """
    path = Path(dataset).expanduser()
    if path.exists():
        if config is not None or revision is not None:
            raise ValueError(
                f"{what} is on this machine, but dataset_config and revision are for the hub: "
                "leave them out."
            )
        return Files(path, what)
    if path.suffix in _SUFFIXES or not _HUB_NAME.fullmatch(dataset):
        near = path.parent if path.parent.is_dir() else Path()
        close = difflib.get_close_matches(path.name, [other.name for other in near.iterdir()], 1)
        hint = (
            f"did you mean {near / close[0]}?"
            if close
            else f"paths are relative to {Path().absolute()}."
        )
        raise ValueError(f"{what} must be a file or folder that exists, but it does not: {hint}")
    close = difflib.get_close_matches(dataset, [*checks.GENERATED, *checks.PRESETS], 1)
    instead = (
        f"use {close[0]}"
        if close
        else "use a file (jsonl, json, csv, parquet) or a folder on this machine"
    )
    return Hub(dataset, config, revision, what, instead)


class Hub:
    """A data set on the Hugging Face hub, or in its cache.

    Args:
        name: name such as ``openai/gsm8k``.
        config: its configuration; None if it has only one.
        revision: branch, tag or commit.
        what: how messages begin.
        instead: what to do if it cannot be reached.
    """

    fix = ""
    """First suggestion for a missing split."""

    def __init__(
        self, name: str, config: str | None, revision: str | None, what: str, instead: str
    ) -> None:
        self.name = name
        self.config = config
        self.revision = revision
        self.what = what
        self.instead = instead

    def read(self, split: str, limit: int | None) -> Table:
        """Return the first ``limit`` rows of a split, or all.

        Raises:
            UnknownSplitError: there is no such split.
            ValueError: the data cannot be read.
        """
        try:
            load_extra("check_hub")(self.name, "dataset")
            from datasets import load_dataset

            options = {} if self.revision is None else {"revision": self.revision}
            data = load_dataset(*filter(None, (self.name, self.config)), split=split, **options)
        except Exception as error:  # no network, not in the cache, a broken download: any type
            reason = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
            if "Unknown split" in reason:
                raise UnknownSplitError(
                    f"{self.what} must have the split {split!r}, got {reason:.300}"
                ) from error
            raise ValueError(
                f"{self.what} must reach {self.name} on Hugging Face or in its cache, got "
                f"{reason:.300}: connect once, or {self.instead}."
            ) from error
        return Table(data, [(0, f"{self.name} {split}", ())]).first(limit)

    def file(self, path: str) -> Path | None:
        """Return the path of a file that ``datasets`` downloaded with the rows; None for others,
        because whoever wrote the rows may name any file of this machine.
        """
        from datasets import config
        from huggingface_hub import constants

        name = f"datasets--{self.name.replace('/', '--')}"
        folders = (Path(constants.HF_HUB_CACHE) / name, Path(config.EXTRACTED_DATASETS_PATH))
        real = Path(path).resolve()
        return real if any(real.is_relative_to(one.resolve()) for one in folders) else None


class Files:
    """A file, which is one split, or a folder of them.

    In a folder, the split is the file's name without suffix and shard number
    (``train-00000-of-00002.parquet``), or the name of its subfolder. If there is neither train nor
    test, all files are one split, train, in the order of their names.

    Args:
        path: the file or folder, which exists.
        what: how messages begin.
        layout: description of the required folder for messages, if known.
    """

    def __init__(self, path: Path, what: str, layout: str = "") -> None:
        self.path = path
        self.what = what
        self.layout = layout
        self.fix = "use the folder with both files, or " if layout else ""

    def read(self, split: str, limit: int | None) -> Table:
        """Return the first ``limit`` rows of a split, or all.

        Raises:
            UnknownSplitError: there is no such split.
            ValueError: the data cannot be read, or a row is malformed.
        """
        by_split = self._paths_by_split()
        paths = by_split.get(split)
        if paths is None and split == "train" and "test" not in by_split:
            paths = [path for part in by_split.values() for path in part]
        if not paths:
            must = self.layout or f"a file or folder with the split {split!r}"
            files: Any = "no folder"
            if self.path.is_file():
                files = [self.path.name]
            elif self.path.is_dir():
                files = sorted(file.name for file in self.path.iterdir())[:10]
            raise UnknownSplitError(
                f"{self.what} must be {must}, but {split}.jsonl is missing (found: {files})"
            )
        kinds = {path.suffix for path in paths}
        if ".parquet" in kinds:
            return self._read_parquet(paths, limit)
        rows: list[Row] = []
        origins: list[Origin] = []
        for path in paths:
            remaining = None if limit is None else limit - len(rows)
            numbered_rows = list(islice(_READERS[path.suffix](path), remaining))
            origins.append((len(rows), str(path), [line for line, _ in numbered_rows]))
            rows += [row for _, row in numbered_rows]
        return _table(rows, origins)

    def file(self, path: str) -> Path:
        """Return the path of a file that a row names, relative to the data's file or folder."""
        folder = self.path.parent if self.path.is_file() else self.path
        return folder.absolute() / path

    def _paths_by_split(self) -> dict[str, list[Path]]:
        if self.path.is_file():
            if self.path.suffix not in _SUFFIXES:
                raise ValueError(
                    f"{self.what} must be a file of the kind {', '.join(_SUFFIXES)}, but it ends "
                    f"with {self.path.suffix or 'none of them'!r}: convert or rename it."
                )
            return {"train": [self.path]}
        by_split: dict[str, list[Path]] = {}
        for path in sorted(self.path.rglob("*")) if self.path.is_dir() else []:
            inner = path.relative_to(self.path)
            if path.suffix in _SUFFIXES and not any(part.startswith(".") for part in inner.parts):
                folder = inner.parts[0] if len(inner.parts) > 1 else None
                stem = _SHARD.sub("", path.stem)
                split = folder if folder and stem not in ("train", "test") else stem
                by_split.setdefault(split, []).append(path)
        return by_split

    def _read_parquet(self, paths: Sequence[Path], limit: int | None) -> Table:
        others = [path.name for path in paths if path.suffix != ".parquet"]
        if others:
            raise ValueError(
                f"{self.what} must have one kind of file in a split, but it has parquet and "
                f"{others}: use one kind."
            )
        from datasets import concatenate_datasets, load_dataset

        tables: list[Any] = []
        origins: list[Origin] = []
        for path in paths:
            origins.append((sum(len(table) for table in tables), str(path), ()))
            try:
                tables.append(
                    load_dataset("parquet", data_files={"train": [str(path)]}, split="train")
                )
            except Exception as error:  # pyarrow and datasets may raise any type
                reason = " ".join(str(error.__cause__ or error).split())
                raise ValueError(
                    f"{path} must be a parquet file, got {reason:.200}: write it again."
                ) from error
        return Table(concatenate_datasets(_same_types(tables, paths)), origins).first(limit)


def _same_types(tables: Sequence[Any], paths: Sequence[Path]) -> list[Any]:
    """Return tables whose columns have the same types: the widest ones, such as int64 for int32 and
    int64.

    Raises:
        ValueError: two tables have a column of types that cannot be unified.
    """
    import pyarrow
    from datasets import Features

    schemas = [pyarrow.schema(list(table.features.arrow_schema)) for table in tables]
    common = schemas[0]
    if all(schema.equals(common) for schema in schemas):
        return list(tables)
    for schema, path in zip(schemas, paths, strict=True):
        try:
            common = pyarrow.unify_schemas([common, schema], promote_options="permissive")
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"{path} must have columns of the types of {paths[0]}, got "
                f"{' '.join(str(error).split()):.200}: write both with the same types."
            ) from error
    return [
        table.cast(
            Features.from_arrow_schema(
                pyarrow.schema([common.field(name) for name in schema.names])
            )
        )
        for table, schema in zip(tables, schemas, strict=True)
    ]


def _table(rows: Sequence[Row], origins: Sequence[Origin]) -> Table:
    """Convert rows to columns. A column of text, or of numbers of one type, is unchanged; all
    others become JSON.
    """
    from datasets import Dataset

    columns = {}
    encoded = set()
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        large = int in kinds and any(
            isinstance(value, int) and abs(value) >= 2**63 for value in values
        )
        if large or len(kinds) > 1 or not kinds <= {str, int, float, bool}:
            values = [None if value is None else json.dumps(value) for value in values]
            encoded.add(name)
        columns[name] = values
    return Table(Dataset.from_dict(columns), origins, frozenset(encoded))


def _lines(path: Path) -> NumberedRows:
    """Yield the rows of a jsonl file; empty lines are skipped."""
    # Bytes, so that a line that is not UTF-8 is reported like any other malformed line.
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).splitlines(), start=1):
        if line.strip():
            yield number, _row(line, f"{path}:{number}")


def _row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} must be one JSON object per line, got {line[:80]!r} ({error}): fix that line."
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{where} must be a JSON object, got {line[:80]!r}: write "
            '{"question": ..., "answer": ...}.'
        )
    return _encodable(row, where)


def _encodable(row: Row, where: str) -> Row:
    """Return the row if its text is Unicode: JSON can contain lone surrogates, which no tokenizer
    accepts.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise ValueError(
            f"{where} must be text in Unicode, got {str(error)!r}: fix that row."
        ) from error
    return row


def _json(path: Path) -> NumberedRows:
    """Yield the rows of a json file: a list of objects, one object, or one object per line."""
    text = path.read_bytes().removeprefix(BOM_UTF8)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith(b"["):
            yield from _lines(path)
            return
        line = getattr(error, "lineno", 1)
        raise ValueError(
            f"{path}:{line} must be a list of JSON objects, got invalid JSON ({error}): fix it."
        ) from error
    for index, row in enumerate(content if isinstance(content, list) else [content]):
        where = f"{path}[{index}]"
        if not isinstance(row, dict):
            raise ValueError(
                f"{where} must be a JSON object, got {row!r:.80}: write a list of objects."
            )
        yield None, _encodable(row, where)


def _csv(path: Path) -> NumberedRows:
    """Yield the rows of a csv file with a header. Values are text; missing ones are None."""
    line = 1
    try:
        text = path.read_bytes().removeprefix(BOM_UTF8).decode()
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise ValueError(f"got duplicate names in {names}")
        for fields in reader:
            line = reader.line_num - sum(field.count("\n") for field in fields)
            end = reader.line_num
            if fields and len(fields) != len(names):
                raise ValueError(
                    f"got {len(fields)} fields, but its first line has {len(names)} names"
                )
            if fields:
                yield line, {name: field or None for name, field in zip(names, fields, strict=True)}
            line = end + 1
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{line} must be UTF-8, {error}: save the file as UTF-8."
        ) from error
    except (csv.Error, ValueError) as error:
        raise ValueError(
            f"{path}:{line} must be a row of a csv file, {error}: fix that line (quote commas, and "
            "close quotes)."
        ) from error


# Each yields rows with their line, or None.
_READERS: dict[str, Callable[[Path], NumberedRows]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _csv,
}
_SUFFIXES = (*_READERS, ".parquet")
