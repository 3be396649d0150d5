"""Measure the memory of one machine's training ranks while they load and shard a model.

    python benchmarks/bench_loading.py
    python benchmarks/bench_loading.py --layers 4 --ranks 2

A random model of the shape of Llama 3.2 1B, bfloat16 on disk and float32 in training, is sharded
over 2 and 4 processes: once with only rank 0 loading it, as ``parts.make_trainer`` does, and once
with each rank loading all of it. The figure is the peak of the processes' summed unique set sizes,
sampled every 20 ms, over the size of the float32 weights. It takes about 5 minutes, and 24 GB if
all of 4 ranks load.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from machine import report, surroundings
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_grpo.models.loading import load_model
from torchrl_grpo.models.sharding import init_mesh, loading_device, shard_model

PACKAGES = ("torch", "transformers")
CPU = torch.device("cpu")


def make_model(folder: str, layers: int) -> int:
    """Save the model and return its number of parameters."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    state = {
        name: torch.full(value.shape, 1e-3, dtype=value.dtype)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run_rank(rank: int, ranks: int, model: str, meet: str, everywhere: bool) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(meet, ranks)  # type: ignore[attr-defined]
    mesh = init_mesh(rank, ranks, store, device=CPU, timeout_s=1800)
    device = CPU if everywhere else loading_device(mesh)
    shard_model(load_model(model, dtype=torch.float32, device=device), mesh)
    dist.barrier()
    os._exit(0)  # an orderly exit may abort in gloo's threads


def measure(ranks: int, model: str, everywhere: bool) -> tuple[float, float]:
    """Return the peak in bytes, and the seconds."""
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, model, f"{folder}/meet", everywhere)
        context = start_processes(run_rank, arguments, ranks, join=False, start_method="spawn")
        while not context.join(timeout=0.02):
            used = 0
            for pid in context.pids():
                with suppress(psutil.Error):
                    used += psutil.Process(pid).memory_full_info().uss
            peak = max(peak, used)
    return peak, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = surroundings(PACKAGES) | {"cases": []}
    with tempfile.TemporaryDirectory() as folder:
        size = 4 * make_model(folder, args.layers)
        for ranks in args.ranks:
            for everywhere in (False, True):
                peak, seconds = measure(ranks, folder, everywhere)
                case = {
                    "ranks": ranks,
                    "who loads": "each rank" if everywhere else "rank 0",
                    "weights_gib": round(size / 2**30, 2),
                    "peak_gib": round(peak / 2**30, 2),
                    "peak_over_weights": round(peak / size, 2),
                    "seconds": round(seconds, 1),
                }
                print(json.dumps(case), file=sys.stderr, flush=True)
                result["cases"].append(case)
    report(result, args.out)


if __name__ == "__main__":
    main()
