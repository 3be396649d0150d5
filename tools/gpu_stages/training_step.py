"""Time a training step of ours and of TRL with models of 0.5B and 1.5B parameters, after comparing
gradients. The host has one thread for it, as in a run on a GPU.
"""

from __future__ import annotations

import os

from gpu_stages.common import Stage

BATCH = "--prompts 256 --groups 8 --sequences 64 --responses 64 512 --at-once 8"
FEW = "--prompts 64 --groups 2 --sequences 8 --responses 32 64 --at-once 4 --repeats 1"
SETTINGS = (
    f"--models qwen05 --dtypes bfloat16 --repeats 3 {BATCH} --sides trl",
    f"--models qwen15 --dtypes bfloat16 --repeats 2 --micro-batch-tokens 8192 {BATCH} --sides trl",
)
REHEARSAL = tuple(
    f"--models tiny --dtypes {dtype} --micro-batch-tokens 512 {FEW} --sides trl"
    for dtype in ("float32", "bfloat16")
)


def main() -> None:
    """Run the stage."""
    stage = Stage()
    os.environ["OMP_NUM_THREADS"] = "1"
    for setting in REHEARSAL if stage.is_rehearsal else SETTINGS:
        arguments = setting.split()
        with stage.part(" ".join(arguments[1:4:2])) as figures:
            figures |= stage.benchmark("bench_train_step.py", *arguments, out="--output")
    stage.end()


if __name__ == "__main__":
    main()
