"""vLLM's worker is killed or stopped while it samples: one message in a bounded time, and the
engine still closes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.models import make_tiny_model
from tests.support.processes import alive, command_line, worker_processes
from torchrl_grpo.errors import RunLostError
from torchrl_grpo.generation.base import EngineDeadError, SamplingParams
from torchrl_grpo.generation.vllm import VLLMEngine


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_one_message_in_time(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the user saw a traceback of 70 lines, or nothing in 100 s."""
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "5")
    make_tiny_model(0, hidden_size=128, initializer_range=0.1).save_pretrained(tmp_path)
    before = set(worker_processes())
    engine = VLLMEngine(str(tmp_path), max_model_len=512, enforce_eager=True, kv_cache_gib=0.25)
    workers = [process for process in worker_processes() if process not in before]
    [worker] = [
        process
        for process in workers
        if "Worker" in process.name() or "Worker" in command_line(process)
    ]
    timer = threading.Timer(1.0, os.kill, (worker.pid, number))
    timer.start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="vLLM's worker process") as raised:
        for _ in range(1000):
            engine.generate([torch.tensor([5, 6, 7])], 8, SamplingParams(max_new_tokens=400))
    assert time.monotonic() - start < 240
    assert isinstance(
        raised.value, RunLostError
    )  # a script's output without a traceback, with exit status 1
    engine.close()
    assert alive(workers) == []
