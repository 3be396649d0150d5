"""Compare the transformers engine with Hugging Face's ``generate``, its log-probs with the training
step's, and token steps as CUDA graphs with plain ones.
"""

from __future__ import annotations

from typing import Any

import torch
from bench_rollout import make_model

from gpu_stages.common import MEAN_GAP, Stage, log_prob_gaps
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.generation.fused_decoder import FusedDecoder

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
    with stage.part("CUDA graphs") as figures:
        compare_graphs(stage, figures)
    stage.end()


def compare_graphs(stage: Stage, figures: dict[str, Any]) -> None:
    """Compare the engine's log-probs with the scorer's, and its tokens per second, with graphs and
    without.
    """
    name, length, new = ("tiny", 16, 8) if stage.is_rehearsal else ("qwen05", 256, 256)
    model = make_model(name, stage.dtype, stage.device)
    engine = TransformersEngine(model)
    decoder, params = engine.decoder, SamplingParams(new)
    assert isinstance(decoder, FusedDecoder)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, model.config.vocab_size, (8, length), generator=generator).unbind()
    for way, static in (("graphs", not stage.is_rehearsal), ("plain", False)):
        if static and not decoder.static:
            raise RuntimeError("no graph could be captured: log.txt has the reason")
        decoder.static = static
        groups = engine.generate(prompts, 8, params)
        gaps = log_prob_gaps(stage, model, prompts, groups)
        figures[f"{way}, mean gap"] = gaps.mean().item()
        seconds = stage.seconds(lambda: engine.generate(prompts, 8, params), 2)
        figures[f"{way}, tokens_per_s"] = len(prompts) * 8 * new / seconds
        if not gaps.mean() < MEAN_GAP[stage.dtype] or decoder.static != static:
            raise RuntimeError(f"{way}: {figures}")


if __name__ == "__main__":
    main()
