"""Time a training step of ours, packed and padded, of plain PyTorch and of TRL, after comparing
gradients.
"""

from __future__ import annotations

from gpu_stages.common import Stage

BATCH = "--prompts 256 --groups 8 --sequences 64 --responses 64 512 --at-once 8"
FEW = "--prompts 64 --groups 2 --sequences 8 --responses 32 64 --at-once 4 --repeats 1"
SETTINGS = (  # in float32 only for the gradients
    f"--models qwen05 --dtypes float32 --micro-batch-tokens 512 {FEW} --sides padded plain trl",
    f"--models qwen05 --dtypes bfloat16 --repeats 3 {BATCH} --sides padded plain trl",
    f"--models qwen15 --dtypes bfloat16 --repeats 2 --micro-batch-tokens 8192 {BATCH} --sides plain",
)
REHEARSAL = (
    f"--models tiny --dtypes float32 --micro-batch-tokens 512 {FEW} --sides padded plain trl",
)


def main() -> None:
    """Run the stage."""
    stage = Stage()
    for setting in REHEARSAL if stage.is_rehearsal else SETTINGS:
        arguments = setting.split()
        with stage.part(" ".join(arguments[1:4:2])) as figures:
            figures |= stage.benchmark("bench_train_step.py", *arguments, out="--output")
    stage.end()


if __name__ == "__main__":
    main()
