"""Show samples of a run in the terminal: filtered, sorted, or before and after training.

Text that a model wrote is never trusted: it is not interpreted as markup, and unprintable
characters are escaped.

    python -m torchrl_grpo samples outputs/DATE/TIME --split test --max-reward 0 --limit 5
    python -m torchrl_grpo samples outputs/DATE/TIME --text "####" --sort length
    python -m torchrl_grpo samples outputs/DATE/TIME --group 784
    python -m torchrl_grpo samples outputs/DATE/TIME --compare --step 0 500 --sort change
    python -m torchrl_grpo samples --compare outputs/DATE/TIME outputs/DATE/OTHER
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchrl_grpo.extras.report.comparison import compare_tests, tests_of
from torchrl_grpo.extras.report.records import passes, problem_of, read_samples, valid_reward
from torchrl_grpo.extras.run_files import read_thumbnail
from torchrl_grpo.host.files import SAMPLES_FILE, thumbnail_name
from torchrl_grpo.host.text import number, percent, printable_lines, reward_text

Row = Mapping[str, Any]
Pair = tuple[Row, Row]


def main(
    arguments: Sequence[str] | None = None, file: IO[str] | None = None, width: int | None = None
) -> None:
    """Print the samples that the command line asks for.

    Args:
        arguments: arguments on the command line; by default this process's.
        file: where to print; standard output by default.
        width: number of columns; by default the terminal's.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None and len(options.compare or ()) == 1:  # --compare RUN
        options.run = options.compare.pop()
    compared = 2 if options.run is None else 0
    if len(options.compare or ()) != compared:
        parser.error("give either RUN, or --compare A B with two runs or checkpoints.")
    names = [options.run] if options.run is not None else options.compare
    paths = [_samples_file(name, parser) for name in names]
    if options.sort == "change" and options.compare is None:
        parser.error(
            "--sort=change needs two samples of a problem: add --compare, or sort by reward."
        )
    rows = [*read_samples(paths[-1])]
    prompt = partial(_prompt, paths[-1].parent)
    matches = [row for row in rows if _belongs(row, options)]
    console = Console(file=file, width=width, highlight=False)
    if options.compare is not None:
        found = compare(matches)
        if options.compare:
            old, new = (
                tests_of(read_samples(path), _step_of(name))
                for name, path in zip(names, paths, strict=True)
            )
            common = [problem for problem in old if problem in new]
            sizes = (
                f"of the {len(old):,} and {len(new):,} test problems, {len(common):,} are in both"
            )
            if not common:
                parser.error(
                    f"--compare {' '.join(names)} must have test problems in common, but {sizes}: "
                    "evaluate both with the same data and env settings."
                )
            if len(common) < max(len(old), len(new)):
                _line(sizes, console)
            found = [
                (old[problem], new[problem])
                for problem in common
                if options.dataset in (None, old[problem].get("dataset"))
            ]
        pairs = [pair for pair in found if _passes(pair[1], options)]
        shown = _first(pairs, options, partial(_pair_key, last=not options.reverse))
        _show_pairs(shown, prompt, console)
        _line(_summary(pairs), console)
        tests = [pair for pair in found if pair[1].get("split") == "test"]
        for sampled in (False, True):
            before, after = (dict(enumerate(pair[end] for pair in tests)) for end in (0, 1))
            comparison = compare_tests(before, after, sampled=sampled)
            if comparison is not None:
                decoding = "sampled" if sampled else "greedy"
                _line(f"test accuracy, {decoding}: {comparison.text}", console)
    else:
        matches = [row for row in matches if _passes(row, options)]
        for row in _first(matches, options, _key):
            _show(row, prompt(row), console)
        num_shown = min(options.limit, len(matches))
        counts = f"{num_shown:,} of {len(matches):,} matching samples, {len(rows):,} in total"
        _line(counts, console)
    if not matches:
        steps = {row["step"] for row in rows if "step" in row}
        datasets = {row["dataset"] for row in rows if "dataset" in row}
        and_datasets = f" and data sets {sorted(datasets)}" if datasets else ""
        _line(f"available: steps {sorted(steps)}{and_datasets}", console)


def _samples_file(name: str, parser: argparse.ArgumentParser) -> Path:
    """Return the samples of a run, or of the run of a checkpoint."""
    path = Path(name) if _step_of(name) is None else Path(name).resolve().parents[1]
    path = path / SAMPLES_FILE if path.is_dir() else path
    if not path.is_file():
        problem = f"it has no {SAMPLES_FILE}" if Path(name).exists() else "it does not exist"
        parser.error(
            f"RUN={name} must be a run's folder, or its {SAMPLES_FILE}, but {problem}: use "
            "outputs/DATE/TIME."
        )
    return path


def _step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None for another one.

    >>> _step_of("outputs/mine/checkpoints/checkpoint_000050"), _step_of("outputs/mine")
    (50, None)
    """
    step = Path(name).name.removeprefix("checkpoint_")
    return int(step) if step.isdecimal() and "checkpoint_" in name else None


def compare(rows: Iterable[Row]) -> list[Pair]:
    """Pair the first and the last sample of each problem that was sampled at several steps.

    >>> [(before, after)] = compare([{"step": step, "split": "test", "query": "1+1"} for step in (50, 0, 100)])
    >>> before["step"], after["step"]
    (0, 100)
    """
    problems: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        problems.setdefault((row.get("split"), row.get("dataset"), problem_of(row)), []).append(row)
    pairs = []
    for samples in problems.values():
        before = min(samples, key=lambda row: row["step"])
        after = max(samples, key=lambda row: row["step"])
        if before["step"] < after["step"]:
            pairs.append((before, after))
    return pairs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo samples", description="Shows the samples of a run."
    )
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help=f"a run's folder, or its {SAMPLES_FILE}"
    )
    parser.add_argument(
        "--step", type=int, nargs="+", metavar="N", help="only samples of these steps"
    )
    parser.add_argument("--split", choices=("train", "test"), help="only samples of this split")
    parser.add_argument("--dataset", metavar="NAME", help="only samples of this data set")
    parser.add_argument(
        "--group", type=int, metavar="N", help="only this group: the responses to one prompt"
    )
    parser.add_argument(
        "--min-reward", type=float, metavar="X", help="only samples with at least this reward"
    )
    parser.add_argument(
        "--max-reward", type=float, metavar="X", help="only samples with at most this reward"
    )
    parser.add_argument(
        "--text", help="only samples with this text in prompt or response, ignoring case"
    )
    parser.add_argument(
        "--sort",
        choices=("step", "reward", "length", "change"),
        help="show the lowest first and, among equal ones, the newest step; change: by the change "
        "of the reward, with unchanged problems last",
    )
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="show the highest first or, without --sort, the newest",
    )
    parser.add_argument(
        "--limit", type=_count, default=20, metavar="N", help="show at most this many (20)"
    )
    parser.add_argument(
        "--compare",
        nargs="*",
        metavar=("A", "B"),
        help="compare each problem at its first and its last step, or two runs or checkpoints at "
        "their last evaluation; --min-reward, --max-reward and --text apply to the later sample",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 1")
    return int(text)


def _belongs(row: Row, options: argparse.Namespace) -> bool:
    """Return whether a sample is of the requested steps, split, data set and group."""
    return (
        (options.step is None or row.get("step") in options.step)
        and options.split in (None, row.get("split"))
        and options.dataset in (None, row.get("dataset"))
        and options.group in (None, row.get("group"))
    )


def _passes(row: Row, options: argparse.Namespace) -> bool:
    return passes(row, options.min_reward, options.max_reward, options.text)


def _key(row: Row, by: str) -> Any:
    if by == "reward":
        return float("-inf") if valid_reward(row) is None else valid_reward(row)
    return len(str(row.get("response"))) if by == "length" else row["step"]


def _pair_key(pair: Pair, by: str, *, last: bool) -> Any:
    """Key that sorts by change, with the pairs that did not change last or, to be reversed, first."""
    change = _change(pair)
    return ((change == 0) == last, change) if by == "change" else _key(pair[1], by)


def _change(pair: Pair) -> float:
    before, after = map(valid_reward, pair)
    return 0.0 if before is None or after is None else after - before


def _first(
    items: Sequence[Any], options: argparse.Namespace, key: Callable[[Any, str], Any]
) -> list[Any]:
    """Return the items to show, in order; of equal ones the last written first."""
    ordered = list(items)
    if options.sort not in (None, "step"):
        ordered.reverse()
        ordered.sort(key=lambda item: key(item, options.sort), reverse=options.reverse)
        return ordered[: options.limit]
    if options.sort == "step":
        ordered.sort(key=lambda item: key(item, "step"))
    if options.reverse:
        ordered.reverse()
    return ordered[: options.limit]


def _prompt(folder: Path, row: Row) -> str:
    """Return the query of a sample and, below it, the paths of its images' thumbnails."""
    images = [image for image in row.get("images") or [] if read_thumbnail(folder, image)]
    return "\n".join([str(row.get("query")), *(str(folder / thumbnail_name(i)) for i in images)])


def _show(row: Row, prompt: str, console: Console) -> None:
    group = f"group {row['group']}" if "group" in row else None
    where = [f"step {row.get('step')}", row.get("split"), row.get("dataset"), group]
    console.print(_outcome(row, console, " | ".join(str(item) for item in where if item)))
    for text, style in ((prompt, "dim"), (str(row.get("response")), "")):
        console.print(Padding(_text(text, console, style), (0, 0, 1, 2)))


def _outcome(row: Row, console: Console, before: str) -> Text:
    """Describe a sample in one line: its origin, and its reward."""
    parts = ", ".join(f"{name} {number(value)}" for name, value in (row.get("parts") or {}).items())
    if "reward" not in row:  # a demonstration
        return _text(before, console, "bold")
    description = f"{before} | reward {reward_text(row)}" + (f" ({parts})" if parts else "")
    if row.get("advantage") is not None:
        description += f" | advantage {number(row['advantage'])}"
    return _text(description, console, "bold green" if row.get("correct") else "bold red")


def _show_pairs(pairs: Sequence[Pair], prompt: Callable[[Row], str], console: Console) -> None:
    for before, after in pairs:
        table = Table(box=box.SIMPLE_HEAD, expand=True, title_justify="left", title_style="")
        table.title = _text(prompt(after), console, "dim")
        for row in (before, after):
            table.add_column(
                _outcome(row, console, f"step {row['step']}"), ratio=1, overflow="fold"
            )
        table.add_row(*(_text(str(row.get("response")), console) for row in (before, after)))
        console.print(table)


def _summary(pairs: Sequence[Pair]) -> str:
    """Return a summary of all pairs."""
    valid = [pair for pair in pairs if None not in map(valid_reward, pair)]
    changes = [_change(pair) for pair in valid]
    better = sum(change > 0 for change in changes)
    worse = sum(change < 0 for change in changes)
    same = len(valid) - better - worse
    text = f"{len(pairs):,} problems: {better:,} better, {worse:,} worse, {same:,} the same"
    for name, value, formatted in (
        ("reward", valid_reward, number),
        ("correct", lambda row: bool(row.get("correct")), percent),
    ):
        if valid:
            before, after = (fmean(value(pair[i]) for pair in valid) for i in (0, 1))
            text += f"; {name} {formatted(before)} -> {formatted(after)}"
    return text


def _line(text: str, console: Console) -> None:
    console.print(_text(text, console), soft_wrap=True)


def _text(text: str, console: Console, style: str = "") -> Text:
    """Return a text that keeps newlines and escapes other control characters."""
    return Text(printable_lines(text, console.encoding), style=style)
