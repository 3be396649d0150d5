"""A tracker that writes the names of the metrics of each step into a file of the run's folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrl_grpo.reporting.trackers import Tracker


class Lines(Tracker):
    """Writes ``file`` in the run's folder."""

    def __init__(self, folders: Sequence[Path], config: str, file: str = "lines.txt") -> None:
        self._path = folders[0] / file
        self._path.write_text(f"{len(config)}\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._path.open("a") as lines:
            lines.write(f"{step} {' '.join(values)}\n")
