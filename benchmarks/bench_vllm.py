"""Measure the overhead of our collector over vLLM, with the same requests to the same engine.

    python benchmarks/bench_vllm.py                     # 30M parameters
    python benchmarks/bench_vllm.py --model qwen05

Prints JSON. Raw vLLM is `LLM.generate` with tokenized prompts, one request per group, log-probs of
the sampled tokens, and no text. The collector also decodes the responses, scores them, and builds
the batch. `share` is the collector's tokens per second over raw vLLM's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_rollout import make_model
from machine import report, surroundings
from shapes import MODELS
from transformers import AutoTokenizer

from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams
from torchrl_grpo.generation.vllm import VLLMEngine
from torchrl_grpo.images import tokens_of
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask


def main() -> None:
    """Measure both in turn and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", choices=("small", "qwen05"), default="small"
    )  # tiny has too few tokens
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    params = SamplingParams(
        args.new_tokens
    )  # nothing ends a response: all sides make the same number of tokens
    tokens = args.groups * args.responses * args.new_tokens
    with tempfile.TemporaryDirectory() as folder:
        make_model(args.model, getattr(torch, args.dtype)).save_pretrained(folder)
        engine = VLLMEngine(folder, dtype=args.dtype, max_model_len=1024, enforce_eager=True)
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    env = LLMEnv(
        ArithmeticTask(), tokenizer, num_envs=args.groups * args.responses, repeats=args.responses
    )
    collector = RolloutCollector(env, GenerationPolicy(engine, params))
    prompts = env.prompts.first(args.groups)

    def raw() -> None:
        from vllm import TokensPrompt

        requests = [TokensPrompt(prompt_token_ids=tokens_of(prompt).tolist()) for prompt in prompts]
        sampling = [
            engine._sampling_params(len(prompt), args.responses, params) for prompt in prompts
        ]
        engine._llm.generate(requests, sampling, use_tqdm=False)

    sides: dict[str, Callable[[], object]] = {"vllm": raw, "collector": collector.rollout}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    try:
        for repeat in range(args.repeats + 1):
            for side, run in sides.items():
                engine._llm.reset_prefix_cache()
                start = time.perf_counter()
                run()
                if repeat:  # the first one warms up
                    seconds[side].append(time.perf_counter() - start)
    finally:
        collector.shutdown()
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    setting = {name: value for name, value in vars(args).items() if name != "out"} | MODELS[
        args.model
    ]
    result = surroundings(("torch", "transformers")) | {
        "setting": setting,
        "tokens_per_s": {side: round(tokens / median, 1) for side, median in medians.items()},
        "share": round(medians["vllm"] / medians["collector"], 4),
        "seconds": seconds,
    }
    report(result, args.out)


if __name__ == "__main__":
    main()
