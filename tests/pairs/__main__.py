"""Run two steps of the starter model for each row of a covering array of options, and check all
files of each run.

    python -m tests.pairs                    # all runs (about 130), each in a process of its own
    python -m tests.pairs --first 20         # the runs that cover the most pairs
    python -m tests.pairs --local            # the runs without Ray, which are the fast ones
    python -m tests.pairs --only 7 12        # some runs, by number

This is not part of the test suite, because it takes longer than all of it. Exit status 1 means that
a run failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.pairs.factors import Options, all_pairs, covering_array, is_local, overrides_of, pairs_of
from tests.pairs.recompute import problems_of, problems_of_resumed
from tests.support import forks
from tests.support.configs import compose_config
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config.rules import staleness_bound
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.checkpoint_files import checkpoints_in
from torchrl_grpo.models.loading import add_lora
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import named_adapter_weights

STEPS, LONGEST_S = 2, 600
COMMON = (
    "env.num_envs=16", "env.repeats=4", f"train.total_dialog_turns={16 * STEPS}", "optimizer.lr=3e-4",
    "evaluation.num_prompts=4", "evaluation.k=2", "logging.sample_rows=all", "logging.sample_frequency=1",
    "logging.tensorboard=false",
)  # fmt: skip


def write_data(folder: Path) -> None:
    """Write three files of sums, a teacher whose weights differ slightly from the starter's, and
    adapters for the starter.
    """
    rng = random.Random(0)
    for name, count in (("one", 40), ("two", 40), ("test", 8)):
        pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(count)]
        rows = [
            {
                "question": f"{a}+{b}=?",
                "answer": str(a + b),
                "demo": f"#### {a + b}",
                "level": a % 3,
            }
            for a, b in dict(pairs).items()
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(starter_path())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.01 * torch.randn_like(parameter) * parameter.std()
    teacher.save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(starter_path()).save_pretrained(folder / "teacher")
    adapted: Any = add_lora(AutoModelForCausalLM.from_pretrained(starter_path()), r=3)
    with torch.no_grad():
        for _, weight in named_adapter_weights(adapted):
            weight += 0.01 * torch.randn_like(weight)
    adapted.save_pretrained(folder / "adapters")


def _goes_on_exactly(options: Options) -> bool:
    """Return whether the resumed run must equal the uninterrupted one: not if it depends on time or
    on a server.
    """
    with_time = options["samplers"] == "two" and options["dynamic"] == "on"
    return options["script"] != "bound_1" and options["engine"] != "server" and not with_time


def play(options: Options, folder: Path, data: Path) -> list[str]:
    """Run the options, resume from the first checkpoint where the options ask for it, and return
    all problems found.
    """
    server = None
    if options["engine"] == "server":
        from tests.support.sglang_stub import SGLangStub

        server = SGLangStub(str(starter_path()))
    texts = overrides_of(options, str(data), "" if server is None else server.address)
    asynchronous = options["script"] != "sync"
    common = [
        text
        for text in COMMON
        if text.partition("=")[0] not in {one.partition("=")[0] for one in texts}
    ]
    if options["tests"] == "off":
        common = [text for text in common if not text.startswith("evaluation.")]
    if options["algo"] == "sft":
        texts.append("env.repeats=1")

    def one(name: str, first: int, *more: str) -> list[str]:
        config = compose_config(*common, *texts, *more)
        training_run = build(config, folder / name, asynchronous=asynchronous)
        try:
            training_run.fit()
        finally:
            training_run.close()
        return list(
            problems_of(folder / name, config, STEPS, first, staleness_bound(config, asynchronous))
        )

    try:
        problems = one("run", 0)
        if options["resume"] == "on":
            start = checkpoints_in(folder / "run" / "checkpoints")[-1]
            problems += one("resumed", 1, f"train.resume={start}")
            if _goes_on_exactly(options):
                problems += problems_of_resumed(folder / "run", folder / "resumed", 1)
    except ConfigError as error:
        return [f"refused: {error}"]
    except BaseException:
        return [traceback.format_exc()]
    finally:
        if server is not None:
            server.stop()
    return problems


def _in_process(options: Options, folder: Path, data: Path) -> None:
    with (folder / "printed.txt").open("w") as printed:
        sys.stdout = sys.stderr = printed
        problems = play(options, folder, data)
    (folder / "problems.json").write_text(json.dumps(problems))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="pairs-"))
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    # A run that is forked from a process with threads of OpenMP would wait for them forever.
    writer = multiprocessing.get_context("fork").Process(target=write_data, args=(data,))
    writer.start()
    writer.join()
    runs = covering_array(arguments.seed)
    numbers = arguments.only or [
        number for number, run in enumerate(runs) if is_local(run) or not arguments.local
    ]
    numbers = numbers[: arguments.first]
    if not all(is_local(runs[number]) for number in numbers):
        forks.start()
    covered = set[frozenset[tuple[str, str]]]()
    wrong = 0
    start = time.monotonic()
    for number in numbers:
        own = folder / f"{number:03d}"
        began = time.monotonic()
        own.mkdir(exist_ok=True)
        process = multiprocessing.get_context("fork").Process(
            target=_in_process, args=(runs[number], own, data)
        )
        process.start()
        process.join(LONGEST_S)
        if process.is_alive():
            process.terminate()
            process.join()
        result = own / "problems.json"
        problems = (
            json.loads(result.read_text())
            if result.exists()
            else [f"no result, status {process.exitcode}"]
        )
        if problems:
            wrong += 1
            print(f"{number}: {json.dumps(runs[number])}")
        else:
            covered |= pairs_of(runs[number])
        print(
            f"{number}: {time.monotonic() - began:.0f} s, {'; '.join(problems) or 'ok'}", flush=True
        )
    minutes = (time.monotonic() - start) / 60
    print(
        f"{len(numbers)} runs in {minutes:.0f} minutes, {wrong} went wrong; {len(covered)} of {len(all_pairs())} pairs"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
