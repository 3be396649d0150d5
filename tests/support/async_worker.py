"""A vLLM worker on a CPU that can be scheduled asynchronously; its process imports this file as its
extension.

The model runner then uses CUDA's streams and events. A CPU has finished the model's computation
when the call returns, so streams have nothing to order and events nothing to wait for.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from torchrl_grpo.weights.worker import WeightSyncExtension


class _Nothing:
    """An event or a stream."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


torch.cuda.Event = torch.cuda.Stream = _Nothing  # type: ignore[assignment, misc]
torch.cuda.current_stream = _Nothing  # type: ignore[assignment]
torch.cuda.stream = nullcontext  # type: ignore[assignment]


class AsyncWorker(WeightSyncExtension):
    """Our extension, which can also report how its worker is scheduled."""

    def schedules_asynchronously(self) -> bool:
        worker: Any = self
        return bool(worker.model_runner.use_async_scheduling)
