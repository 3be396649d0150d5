"""Measure the dashboard's cost for a run, and the time until it shows a large run.

    python benchmarks/bench_view.py
    python benchmarks/bench_view.py --steps 80 --block 4

Prints JSON: the seconds per step of the default job with the page open in Chromium and without it
(every few steps, the page's server and the browser are stopped with SIGSTOP or continued, and the
step in which that happens is not counted), and the seconds until a run of 100,000 responses is
painted. Needs Debian's Chromium and playwright (`make install-dev`).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
from machine import report, surroundings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browsers import chromium  # noqa: E402
from tests.support.view_runs import make_large, served  # noqa: E402
from torchrl_grpo.host.files import read_jsonl  # noqa: E402

WARM_UP = 8
OFF = ("evaluation.num_prompts=0", "train.checkpoint_frequency=0", "logging.tensorboard=false")


def steps_of(folder: Path, process: subprocess.Popen[str]) -> Iterator[int]:
    """Yield each step when it is logged, until the run ends."""
    seen = 0
    while process.poll() is None:
        rows = read_jsonl(folder / "metrics.jsonl")
        if rows and rows[-1]["step"] > seen:
            seen = rows[-1]["step"]
            yield seen
        time.sleep(0.01)


def family(pids: Sequence[int]) -> list[psutil.Process]:
    """Return these processes and all their descendants."""
    return [
        child
        for pid in pids
        for child in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    ]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(child.cpu_times()[:2]) for child in processes)


def browser_pids() -> list[int]:
    """Return the root processes of Chromium, which playwright started for this process."""
    below = psutil.Process().children(recursive=True)
    return [
        child.pid
        for child in below
        if "--headless" in child.cmdline() and "--type=" not in " ".join(child.cmdline())
    ]


def measure(folder: Path, steps: int, block: int) -> dict[str, object]:
    """Run the job and return its steps' seconds with and without the page."""
    command = [
        sys.executable,
        "-u",
        str(ROOT / "sota" / "grpo" / "grpo.py"),
        "--config-name",
        "grpo_arithmetic",
        *OFF,
    ]
    command += [
        "logging.page=true",
        f"train.total_dialog_turns={128 * steps}",
        f"hydra.run.dir={folder}",
    ]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdout is not None
    address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
    switched, used = set[int](), {"server": 0.0, "browser": 0.0}
    on_s, on_since, on = 0.0, time.monotonic(), True
    steps_on: set[int] = set()
    with chromium() as browser, browser.new_page() as page:
        page.goto(address)
        page.wait_for_selector("main *")
        children = psutil.Process(process.pid).children()
        parts = {
            "server": [
                child.pid for child in children if "serve_beside" in " ".join(child.cmdline())
            ]
        }
        parts["browser"] = browser_pids()
        before = {name: cpu_s(family(pids)) for name, pids in parts.items()}
        for step in steps_of(folder, process):
            if on:
                steps_on.add(step)
            if step % block == 0:
                on = not on
                switched.add(step + 1)
                for child in family(parts["server"] + parts["browser"]):
                    child.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                on_s, on_since = (
                    (on_s, time.monotonic()) if on else (on_s + time.monotonic() - on_since, 0.0)
                )
            if step >= steps - 1:  # before the server ends with the run
                used = {name: cpu_s(family(pids)) - before[name] for name, pids in parts.items()}
        for child in family(parts["browser"]):
            child.send_signal(signal.SIGCONT)
        process.wait()
    taken = {
        row["step"]: row["time/step_s"]
        for row in read_jsonl(folder / "metrics.jsonl")
        if row["step"]
    }
    counted = [step for step in taken if step > WARM_UP and step not in switched]
    with_page = [taken[step] for step in counted if step in steps_on]
    without = [taken[step] for step in counted if step not in steps_on]
    medians = statistics.median(with_page), statistics.median(without)
    return {
        "steps": {"with": len(with_page), "without": len(without)},
        "median_step_s": {"with": round(medians[0], 4), "without": round(medians[1], 4)},
        "ratio": round(medians[0] / medians[1], 4),
        "cpu_share_of_one_core": {name: round(seconds / on_s, 4) for name, seconds in used.items()},
        "step_s": {
            "with": [round(value, 4) for value in with_page],
            "without": [round(value, 4) for value in without],
        },
    }


def first_paint(folder: Path, groups: int) -> dict[str, float]:
    """Return the seconds from the server's start to its first answer, and from the opening of the
    page to the first paint of a large run.
    """
    run, start = make_large(folder / "large", groups), time.perf_counter()
    with served(run) as address, chromium() as browser, browser.new_page() as page:
        while True:
            with suppress(OSError), urlopen(address):
                break
        answered = time.perf_counter() - start
        page.goto(f"{address}#groups")
        page.wait_for_selector("section")
        entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
        painted, groups_s = page.evaluate(f"[{entry}, performance.now() / 1000]")
        page.get_by_text(f"{8 * groups + 7:,} responses").wait_for(timeout=60_000)
        start = time.perf_counter()
        page.get_by_label("text in prompt").fill("nobody wrote this")
        page.wait_for_selector("text=0 of")
        searched = time.perf_counter() - start
    found = {
        "answered_s": answered,
        "first_paint_s": painted,
        "groups_shown_s": groups_s,
        "text_searched_s": searched,
    }
    return {name: round(seconds, 3) for name, seconds in found.items()}


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=160, help=f"the first {WARM_UP} are not counted"
    )
    parser.add_argument("--block", type=int, default=5, help="steps between two changes")
    parser.add_argument("--responses", type=int, default=100_000, help="of the run to paint")
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large = first_paint(Path(folder), args.responses // 8)
        found = measure(Path(folder), args.steps, args.block) | {"large_run": large}
    setting = {"setting": {"steps": args.steps, "block": args.block, "responses": args.responses}}
    report(
        surroundings(("torch", "starlette", "uvicorn", "playwright")) | setting | found, args.out
    )


if __name__ == "__main__":
    main()
