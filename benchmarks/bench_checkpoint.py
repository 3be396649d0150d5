"""Time and memory of a checkpoint of several ranks, each of which writes its part.

    python benchmarks/bench_checkpoint.py
    python benchmarks/bench_checkpoint.py --layers 16 --hidden 2048 --dtype bfloat16

A random model (by default Llama's shape with 0.25 billion weights, float32), its AdamW and 2 or 4
processes on a CPU. ``waits_s`` is how long training waits, ``on_disk_s`` how long until the
checkpoint is complete, ``more_gib`` the peak growth of the processes' summed unique set sizes,
sampled every 20 ms. ``load_s`` is a load by as many ranks.
The default takes 2 to 5 minutes, 8 GB of memory and 4 GB of disk. The second line is the shape of
Llama 3.2 1B with weights and moments of 2 bytes: 18 GB of memory, 9 GB of disk.
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
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from machine import report, surroundings
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_grpo.host.checkpoint_files import check_whole
from torchrl_grpo.learner.checkpoint import Checkpointer, read_checkpoint
from torchrl_grpo.learner.shards import read_parts
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.models.sharding import init_mesh, shard_model

PACKAGES = ("torch", "safetensors", "transformers")
CPU = torch.device("cpu")


def make_trainer(rank: int, ranks: int, folder: str, hidden: int, layers: int, dtype: str) -> Any:
    """Return the parts of a trainer that a checkpoint stores, after one step."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meet", ranks)  # type: ignore[attr-defined]
    mesh = init_mesh(rank, ranks, store, device=CPU, timeout_s=1800)
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    if rank == 0:
        model.to_empty(device="cpu")
        model.tie_weights()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 1e-3)
    shard_model(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return SimpleNamespace(
        model=model, optimizer=optimizer, version=1, progress=lambda: {"version": 1}
    )


def run_rank(rank: int, ranks: int, folder: str, hidden: int, layers: int, dtype: str) -> None:
    """Run one rank."""
    trainer = make_trainer(rank, ranks, folder, hidden, layers, dtype)
    checkpointer = Checkpointer(f"{folder}/made", {})
    dist.barrier()
    if rank == 0:
        Path(folder, "begin").touch()
    time.sleep(1.0)  # what is held before is sampled
    dist.barrier()
    start = time.perf_counter()
    writer = CheckpointWriter()
    path = writer.start(checkpointer, trainer, {})
    waits_s = time.perf_counter() - start
    writer.finish()
    dist.barrier()
    out: dict[str, float] = {"waits_s": waits_s, "on_disk_s": time.perf_counter() - start}
    if rank == 0:
        Path(folder, "end").touch()
        start = time.perf_counter()
        check_whole(path)
        out["check_s"] = time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    stored = read_checkpoint(path, trusted=True)["trainer"]
    read_parts(path, trainer.model, trainer.optimizer, stored["optimizer"])
    dist.barrier()
    out["load_s"] = time.perf_counter() - start
    if rank == 0:
        Path(folder, "out.json").write_text(json.dumps(out))
    dist.barrier()
    os._exit(0)  # an orderly exit may abort in gloo's threads


def measure(ranks: int, hidden: int, layers: int, dtype: str) -> dict[str, float]:
    """Return the seconds, and the growth of memory in GiB."""
    before = peak = 0
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, hidden, layers, dtype)
        context = start_processes(run_rank, arguments, ranks, join=False, start_method="spawn")
        while not context.join(timeout=0.02):
            used = 0
            for pid in context.pids():
                with suppress(psutil.Error):
                    used += psutil.Process(pid).memory_full_info().uss
            if Path(folder, "begin").exists() and not Path(folder, "end").exists():
                before, peak = before or used, max(peak, used)
        out: dict[str, float] = json.loads(Path(folder, "out.json").read_text())
    return {name: round(seconds, 2) for name, seconds in out.items()} | {
        "more_gib": round((peak - before) / 2**30, 2)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = surroundings(PACKAGES) | {
        "hidden": args.hidden,
        "layers": args.layers,
        "dtype": args.dtype,
        "cases": [],
    }
    for ranks in args.ranks:
        case = {"ranks": ranks} | measure(ranks, args.hidden, args.layers, args.dtype)
        print(json.dumps(case), file=sys.stderr, flush=True)
        result["cases"].append(case)
    report(result, args.out)


if __name__ == "__main__":
    main()
