"""Compare the transformers engine with Hugging Face's ``generate``, and its log-probs with the
training step's.
"""

from __future__ import annotations

from gpu_stages.common import Stage

SIZE = ("--prompts", "8", "--responses", "8", "--prompt-tokens", "256", "--new-tokens", "256")
FEW = ("--prompts", "2", "--responses", "2", "--prompt-tokens", "16", "--new-tokens", "8")
SETTINGS = (("qwen05", "bfloat16", "2", SIZE),)
REHEARSAL = (("tiny", "float32", "1", FEW),)


def main() -> None:
    """Run the stage."""
    stage = Stage()
    for model, dtype, repeats, size in REHEARSAL if stage.is_rehearsal else SETTINGS:
        arguments = ("--model", model, "--dtype", dtype, "--repeats", repeats, *size)
        with stage.part(f"{model} {dtype}") as figures:
            figures |= stage.benchmark("bench_rollout.py", *arguments, out="--out")
    stage.end()


if __name__ == "__main__":
    main()
