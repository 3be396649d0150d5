"""``trace.json.gz``: what all roles computed in some steps, and the timeline, for Perfetto."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile
from torchrl import torchrl_logger

from torchrl_grpo.compat.torch import ProfilerConfig
from torchrl_grpo.host import clock
from torchrl_grpo.host.files import TIMELINE_FILE, TRACE_FILE, read_jsonl
from torchrl_grpo.loop import Observer

_BASE = "baseTimeNanoseconds"


@dataclass
class Tracer(Observer):
    """Profiles all roles and writes ``trace.json.gz``, with all steps profiled so far. A trace that
    fails does not end the run.

    A step's profile begins with the weight sync before it, because samplers then start to play, and
    ends when the step is recorded. Consecutive steps have one profile.

    Roles in this process share a profiler; each actor has its own. Processes of an engine, such as
    vLLM's, are not profiled, only the calls to the engine.

    Args:
        steps: steps to profile.
        directory: folder of the run, with its ``timeline.jsonl``.
        learner: a ``Learner`` or ``RayLearner``.
        rollouts: the ``Rollouts`` with the other workers.
    """

    steps: list[int]
    directory: Path
    learner: Any
    rollouts: Any
    _is_on: bool = False
    _actors: dict[str, Any] = field(default_factory=dict)
    _traces: list[tuple[str, bytes]] = field(default_factory=list)

    def stage(self, kind: str, step: int, what: str) -> None:
        if self._is_on or kind != "publish" or step + 1 not in self.steps:
            return
        self._is_on = True
        ranks = getattr(self.learner, "ranks", None)
        if ranks is None:
            _start(self)
            return
        self._actors = {f"learner {i}": rank for i, rank in enumerate(ranks)}
        self._actors |= {each.name: each.actor for each in self.rollouts.workers if each.ready}
        for actor in self._actors.values():
            actor.__ray_call__.remote(_start)

    def checked(self, step: int) -> None:
        if step + 1 not in self.steps:
            self.ended(step)

    def ended(self, step: int) -> None:
        if not self._is_on:
            return
        self._is_on = False
        path = self.directory / TRACE_FILE
        try:
            if self._actors:
                stopped = [actor.__ray_call__.remote(_stop) for actor in self._actors.values()]
                traces = [reference.future().result() for reference in stopped]
                self._traces += zip(self._actors, traces, strict=True)
            else:
                self._traces.append(("all roles", _stop(self)))
            with gzip.open(path, "wt") as file:
                file.write('{"traceEvents": [\n')
                file.write(",\n".join(map(json.dumps, self._events())))
                file.write("\n]}")
        except Exception as error:  # an actor may be lost, or the disk full
            torchrl_logger.warning(f"There is no trace of step {step} in {path}: {error}")
        else:
            torchrl_logger.info(
                f"The trace up to step {step} is in {path}, for https://ui.perfetto.dev. Profiled "
                "steps are slower than others."
            )

    def interrupted(self) -> None:
        if self._is_on and not self._actors:
            _stop(self)

    def _events(self) -> Iterator[dict[str, Any]]:
        """Return the events of all processes and of the timeline, in microseconds since a common
        time. The names and ids of processes do not collide.
        """
        base: Any = None
        for number, (name, text) in enumerate(self._traces):
            trace = json.loads(text)
            base = base or trace[_BASE]
            for event in trace["traceEvents"]:
                event["ts"] += (trace[_BASE] - base) / 1e3
                event["pid"] = f"{name} {event['pid']}"
                if "id" in event:
                    event["id"] += number << 40
                yield event
        # Profilers use the time of day, by which the clock of a long run may be wrong.
        base_s = base / 1e9 + clock.now() - time.time()
        for number, span in enumerate(read_jsonl(self.directory / TIMELINE_FILE)):
            if span["step"] not in self.steps:
                continue
            start = span["start"] - base_s
            name = f"{span['actor']}: {span['kind']}"
            # A local id keeps the tracks in the group of their process.
            event = {"cat": "timeline", "name": name, "id2": {"local": hex(number)}}
            for phase, at in (("b", start), ("e", start + span["seconds"])):
                yield {**event, "ph": phase, "ts": at * 1e6, "pid": "timeline", "args": span}


def _start(owner: Any) -> None:
    """Start a profiler of all threads and accelerators of this process."""
    owner.profiler = profile(experimental_config=ProfilerConfig(profile_all_threads=True))
    owner.profiler.start()


def _stop(owner: Any) -> bytes:
    """Stop the profiler; return its trace in Chrome's JSON format."""
    owner.profiler.stop()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        owner.profiler.export_chrome_trace(str(path))
        return path.read_bytes()
