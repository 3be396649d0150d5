"""Make the pictures of the dashboard in ``docs/images`` from real runs, which it starts if they do
not exist.

python tools/make_view_images.py outputs/pictures
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browsers import chromium  # noqa: E402
from tests.support.view_runs import served  # noqa: E402
from torchrl_grpo.host.files import read_jsonl  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SAMPLES = ("logging.sample_frequency=10", "logging.sample_rows=32")
RUNS = {
    "first": ("grpo.py", "train.total_dialog_turns=10240"),
    "faster": ("grpo.py", "train.total_dialog_turns=10240", "optimizer.lr=2e-4"),
    "async": ("grpo-async.py", "train.total_dialog_turns=2560"),
}
TIMELINE_STEPS = range(11, 19)
"""Of the asynchronous run: no evaluation is among them."""
DESK = {"width": 1280, "height": 800}
MARKS = {"curves": "figure", "groups": "section", "tokens": ".token", "timeline": ".lanes"}


def command(folder: Path, name: str) -> list[str]:
    """Return the command line of a run."""
    script, *arguments = RUNS[name]
    start = [
        sys.executable,
        str(ROOT / "sota" / "grpo" / script),
        "--config-name",
        "grpo_arithmetic",
    ]
    return [*start, *SAMPLES, *arguments, f"hydra.run.dir={folder / name}"]


def save(picture: bytes, path: Path) -> None:
    """Save a picture as a PNG with 256 colors, which is small."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def shoot(
    browser: Any, address: str, name: str, view: str, size: Any, scheme: str = "light"
) -> None:
    """Take one picture."""
    with browser.new_page(viewport=size, color_scheme=scheme) as page:
        page.goto(f"{address}#{view}")
        page.wait_for_selector(MARKS[view.partition("?")[0]])
        if name == "compare":
            page.get_by_role("slider").first.hover(position={"x": 200, "y": 80})
        if name == "tokens":
            page.get_by_role("listbox").focus()
            page.keyboard.press("ArrowRight")
        page.wait_for_timeout(500)
        save(page.screenshot(), IMAGES / f"view_{name}.png")


def live(folder: Path, browser: Any) -> None:
    """Make the first run, and a picture in the middle of it."""
    metrics = folder / "first" / "metrics.jsonl"
    run = subprocess.Popen(command(folder, "first"), cwd=ROOT)
    while len(read_jsonl(metrics)) < 45:
        time.sleep(0.2)
    with served(folder / "first") as address:
        shoot(browser, address, "live", "curves", DESK)
    if run.wait():
        raise SystemExit(run.returncode)


def main() -> None:
    """Make the runs and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the runs, made if missing")
    folder = parser.parse_args().folder.resolve()
    with chromium() as browser:
        if not (folder / "first").exists():
            live(folder, browser)
        for name in RUNS:
            if not (folder / name).exists():
                subprocess.run(command(folder, name), cwd=ROOT, check=True)
        rows = read_jsonl(folder / "first" / "samples.jsonl")
        # A wrong response in a group with right ones, so that its advantage is not 0.
        wrong = [at for at, row in enumerate(rows) if row.get("advantage") and not row["reward"]]
        at = next(at for at in wrong if rows[at]["length"] > 24)
        spans = read_jsonl(folder / "async" / "timeline.jsonl")
        trained = [
            span for span in spans if span["kind"] == "train" and span["step"] in TIMELINE_STEPS
        ]
        began = min(span["start"] for span in spans)
        first = min(span["start"] for span in trained) - began
        last = max(span["start"] + span["seconds"] for span in trained) - began
        with served(*(folder / name for name in RUNS)) as address:
            shoot(browser, address, "compare", "curves?hide=2", DESK)
            shoot(browser, address, "groups", "groups?split=train&to=20", DESK)
            shoot(browser, address, "tokens", f"tokens?row={at}", {"width": 1280, "height": 600})
            shoot(
                browser,
                address,
                "timeline",
                f"timeline?run=2&from={first:.0f}&to={last:.0f}",
                {"width": 1280, "height": 640},
                "dark",
            )
            shoot(
                browser,
                address,
                "phone",
                "groups?split=train&to=20",
                {"width": 360, "height": 740},
                "dark",
            )


if __name__ == "__main__":
    main()
