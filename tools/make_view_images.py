"""Makes the pictures of the page in ``docs/images`` from real runs, which it makes first where there are none.

python tools/make_view_images.py outputs/pictures
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browsers import chromium  # noqa: E402
from tests.support.view_runs import served  # noqa: E402
from torchrl_grpo.records import read_jsonl  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SAMPLES = ("logging.sample_frequency=10", "logging.sample_rows=32")
RUNS = {
    "first": ("grpo.py", "train.total_dialog_turns=10240"),
    "faster": ("grpo.py", "train.total_dialog_turns=10240", "optimizer.lr=2e-4"),
    "async": ("grpo-async.py", "train.total_dialog_turns=3840"),
}
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}


def make(folder: Path) -> list[Path]:
    """The folders of the runs."""
    for name, (script, *arguments) in RUNS.items():
        if not (folder / name / "report.html").exists():
            command = [sys.executable, str(ROOT / "sota" / "grpo" / script), "--config-name", "grpo_arithmetic"]
            subprocess.run([*command, *SAMPLES, *arguments, f"hydra.run.dir={folder / name}"], cwd=ROOT, check=True)
    return [folder / name for name in RUNS]


def save(picture: bytes, path: Path) -> None:
    """As a PNG of 128 colors, which is small."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    """Makes the runs and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the runs are made, or lie")
    runs = make(parser.parse_args().folder.resolve())
    rows = read_jsonl(runs[0] / "samples.jsonl")
    row = next(
        at for at, one in enumerate(rows) if one["step"] >= 20 and one["split"] == "train" and one["reward"] == 0
    )
    shots = {
        "live": ("curves?hide=1,2", "figure", DESK, "light"),
        "compare": ("curves?hide=2", "figure", DESK, "light"),
        "groups": ("groups?split=train&to=20", "section", DESK, "light"),
        "tokens": (f"tokens?row={row}&by=log_prob", ".token", {"width": 1280, "height": 560}, "light"),
        "timeline": ("timeline?run=2&from=10&to=20", ".lanes", {"width": 1280, "height": 640}, "dark"),
        "phone": ("groups?split=train&to=20", "section", PHONE, "dark"),
    }
    with served(*runs) as address, chromium() as browser:
        for name, (view, mark, size, scheme) in shots.items():
            with browser.new_page(viewport=size, color_scheme=scheme) as page:  # type: ignore[arg-type]
                page.goto(f"{address}#{view}")
                page.wait_for_selector(mark)
                if name in ("live", "compare"):
                    page.locator("svg[role=slider]").first.hover(position={"x": 200, "y": 80})
                if name == "tokens":
                    page.get_by_role("listbox").focus()
                    page.keyboard.press("ArrowRight")
                page.wait_for_timeout(500)
                save(page.screenshot(), IMAGES / f"view_{name}.png")


if __name__ == "__main__":
    main()
