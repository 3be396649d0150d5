"""Check the package on one CUDA device within a time limit, and measure its performance.

    sh tools/gpu_wheels.sh wheels python3.12                         # where there is a network
    python tools/gpu_check.py --wheels wheels --minutes 10 --out first
    python tools/gpu_check.py --wheels wheels --minutes 5 --out second --state first/results.json
    python tools/gpu_check.py --only gate tests options --out again  # what has passed on a GPU
    python tools/gpu_check.py --device cpu --minutes 300 --out rehearsal    # small shapes

Each stage is a process with its own time limit. If it fails or takes too long, that is recorded and
the next stage starts. A stage that might exceed ``--minutes`` is not started. Each stage updates
these files under ``--out``:

- ``results.json``: each stage's status, seconds, and figures;
- ``log.txt``: what the stages printed;
- ``tests.xml``: the tests, in JUnit's format;
- ``profile.txt``: the kernels of a training step, and how long the device was idle;
- ``vllm.log``: what vLLM's processes logged.

``--state`` takes the ``results.json`` of an earlier call: stages that passed are not repeated, and
stages that have not run yet come before failed ones. The exit code is 1 unless all passed; a stage
whose tests were all skipped has not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchrl_grpo.host.processes import descendants  # imports nothing heavy

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (
    *("-m", "pytest", "-sv", "-p", "no:cacheprovider", "-p", "gpu_stages.outcomes"),
    "--junitxml={tests}",
)
FIGURES = ("--device", "{device}", "--out", "{figures}")
CPU_SLOWDOWN = 10
"""Factor of the stages' limits in a rehearsal."""


@dataclass(frozen=True)
class Stage:
    """A process of the check.

    Attributes:
        name: in ``results.json``.
        limit_s: seconds after which it is killed.
        arguments: of Python, with the placeholders ``{device}``, ``{figures}`` and ``{tests}``; the
            last two are files that the stage may write.
    """

    name: str
    limit_s: float
    arguments: tuple[str, ...]


def _script(name: str, limit_s: float) -> Stage:
    return Stage(name, limit_s, ("-m", f"gpu_stages.{name}", *FIGURES))


def _tests(name: str, limit_s: float, *arguments: str) -> Stage:
    return Stage(name, limit_s, (*PYTEST, *arguments))


MENDED = "8_bits or peak_of_a_step or cpu_offload or sharded or waits_for_it or scorers_log_probs"
LAYERS = "tree or digest or 4_bits or qlora or cuda_graphs"
FIRST_USER, ENGINES = "tests/gpu/test_first_user.py", "tests/gpu/test_engines.py"
OPTIONS, ON_CUDA = "tests/gpu/test_options.py", "tests/gpu/test_gpu.py"
ONE_GPU = "tests/gpu/test_one_gpu.py"
STAGES = (
    _script("vllm_engine", 160),
    _tests("vllm_server", 110, ENGINES, "-k", "callers or ipc or slots"),
    _tests("vllm_run", 140, FIRST_USER, "-k", "sleeps"),
    _tests("layers", 70, "tests/gpu/test_layers.py", OPTIONS, ON_CUDA, "-k", LAYERS),
    _script("step_profile", 75),
    _script("training_step", 105),
    _script("lora_7b", 45),
    _script("rollout", 50),
    _tests("mended", 75, ON_CUDA, ONE_GPU, "-k", MENDED),
    _tests("ray", 100, FIRST_USER, "-k", "share_weights and auto and vllm"),
)
"""What has not run on a GPU, or has changed since, in the order of its importance."""
REPEATS = (
    _script("gate", 60),
    _tests("tests", 150, ON_CUDA),
    _tests("options", 150, OPTIONS),
    _tests("one_gpu", 100, ONE_GPU, "tests/unit/test_sharding_memory.py"),
    _tests("first_user", 120, FIRST_USER, "-k", "without_vllm or adapters"),
    _script("parts", 120),
    _script("publish", 60),
    _script("learning", 90),
)
"""What passed on an H200 (``benchmarks/results/gpu_h200.json``); it runs with ``--only``."""


class Check:
    """The stages of one call, and their results.

    Args:
        out: folder of the results.
        device: ``cuda`` or ``cpu``.
        seconds: time of the whole call.
        stages: in the order in which they run.
        finished: results of stages that are not repeated.
        path: folders to import from, before all others.
    """

    def __init__(
        self,
        out: Path,
        device: str,
        seconds: float,
        stages: Sequence[Stage],
        finished: dict[str, Any],
        path: Sequence[Path] = (),
    ) -> None:
        self._out = out
        self._device = device
        self._start = time.monotonic()
        self._seconds = seconds
        self._stages = stages
        self._results = dict(finished)
        self._suites = ElementTree.Element("testsuites")
        folders = [str(folder) for folder in (*path, ROOT, ROOT / "benchmarks", ROOT / "tools")]
        if inherited := os.environ.get("PYTHONPATH"):
            folders.append(inherited)
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(folders),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "GPU_CHECK_DEVICE": device,
            # A stage finds there what an earlier one has compiled.
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), "gpu_check_compiled")),
        }
        out.mkdir(parents=True, exist_ok=True)
        for name in ("log.txt", "profile.txt", "tests.xml", "vllm.log"):
            (out / name).unlink(missing_ok=True)

    def run(self) -> bool:
        """Run the stages; return whether all have passed."""
        for stage in self._stages:
            left = self._seconds - (time.monotonic() - self._start)
            if stage.limit_s > left:
                reason = f"it may take {stage.limit_s:g} s, and {left:.0f} s are left"
                result: dict[str, Any] = {"status": "not started", "reason": reason}
            else:
                result = self._run(stage)
            self._results[stage.name] = result
            self._write()
            seconds = f"{result['seconds']:.0f} s" if "seconds" in result else result["reason"]
            sys.stdout.write(f"{stage.name}: {result['status']} ({seconds})\n")
            sys.stdout.flush()
        return all(self._results[stage.name]["status"] == "passed" for stage in self._stages)

    def _run(self, stage: Stage) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, (self._out / "log.txt").open("ab") as log:
            log.write(f"==== {stage.name}\n".encode())
            log.flush()
            files = {name: f"{folder}/{name}" for name in ("figures", "tests")}
            arguments = list(stage.arguments)
            for name, value in {"device": self._device, **files}.items():
                arguments = [text.replace(f"{{{name}}}", value) for text in arguments]
            start = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._environment | {"TMPDIR": folder},
                start_new_session=True,
            )
            try:
                status = "passed" if process.wait(stage.limit_s) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timed out"
            finally:
                _kill(process)
            result: dict[str, Any] = {
                "status": status,
                "seconds": round(time.monotonic() - start, 1),
                "limit_s": stage.limit_s,
                "exit_code": process.returncode,
            }
            if (figures := Path(files["figures"])).exists():
                result["figures"] = json.loads(figures.read_text())
            if (tests := Path(files["tests"])).exists():
                self._suites.extend(ElementTree.parse(tests).getroot())
            if (outcomes := Path(f"{files['tests']}.json")).exists():
                result["tests"] = json.loads(outcomes.read_text())
                if {test["outcome"] for test in result["tests"].values()} == {"skipped"}:
                    result["status"] = "skipped"
            if (profile := Path(folder, "profile.txt")).exists():
                shutil.copy(profile, self._out)
            with (self._out / "vllm.log").open("ab") as logs:
                for file in sorted(Path(folder).rglob("vllm.log")):
                    logs.write(file.read_bytes())
        return result

    def _write(self) -> None:
        """Write ``results.json`` and ``tests.xml``, each at once."""
        result = {
            "device": self._device,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "stages": self._results,
        }
        texts = {
            "results.json": json.dumps(result, indent=2),
            "tests.xml": ElementTree.tostring(self._suites, encoding="unicode"),
        }
        for name, text in texts.items():
            partial = self._out / f".{name}"
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self._out / name)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage with all that it has started, in groups of their own too."""
    for pid in descendants(process.pid) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    with suppress(ProcessLookupError):
        for _ in range(100):  # until all are gone, and the device's memory is free
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.1)


def install(wheels: Path, folder: str) -> Path:
    """Install wheels into a folder, without an index, in addition to Python's own packages."""
    files = sorted(map(str, wheels.glob("*.whl")))
    options = ["--no-index", "--no-deps", "--no-compile", "--target", folder]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *options, *files], check=True, cwd=ROOT
    )
    return Path(folder)


def remaining(stages: Sequence[Stage], earlier: dict[str, Any]) -> list[Stage]:
    """Return the stages that have not passed; those that have not run come first.

    Args:
        stages: of the check.
        earlier: results of an earlier call, by name.
    """
    states = {stage: earlier.get(stage.name, {"status": "not started"}) for stage in stages}
    left = [stage for stage, result in states.items() if result["status"] != "passed"]
    return sorted(left, key=lambda stage: states[stage]["status"] != "not started")


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="of the whole call")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--state", type=Path, help="results.json of an earlier call")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use for this call")
    names = [stage.name for stage in STAGES + REPEATS]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=[stage.name for stage in STAGES],
        metavar="STAGE",
        help=f"of {', '.join(names)}",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a stage does not outlive the check
    start = time.monotonic()
    earlier = json.loads(args.state.read_text())["stages"] if args.state else {}
    finished = {name: result for name, result in earlier.items() if result["status"] == "passed"}
    stages = remaining([s for s in STAGES + REPEATS if s.name in args.only], earlier)
    if args.device == "cpu":
        stages = [replace(stage, limit_s=CPU_SLOWDOWN * stage.limit_s) for stage in stages]
    with tempfile.TemporaryDirectory() as folder:
        path = [install(args.wheels, folder)] if args.wheels else []
        seconds = 60 * args.minutes - (time.monotonic() - start)
        check = Check(args.out, args.device, seconds, stages, finished, path)
        sys.exit(not check.run())


if __name__ == "__main__":
    main()
