"""Private names of vLLM."""

from __future__ import annotations

from typing import Any


def adapter_manager(worker: Any) -> Any:
    """Return the manager of a worker's adapter slots."""
    return worker.model_runner.lora_manager._adapter_manager
