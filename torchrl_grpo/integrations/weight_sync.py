"""TorchRL's weight synchronization between its collectors and a ``GenerationPolicy``.

``LLMCollector`` and ``RayLLMCollector`` get a scheme from the policy itself. For other collectors,
pass ``weight_sync_schemes={"policy": EngineWeightSyncScheme()}``.
"""

from __future__ import annotations

from queue import Empty
from typing import Any
from weakref import ref

from tensordict import TensorDict
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.weight_update import MultiProcessWeightSyncScheme

from torchrl_grpo.compat.torchrl import set_schemes
from torchrl_grpo.generation.policy import generation_of
from torchrl_grpo.weights.named import weights_of


def set_weight_sync(collector: Any) -> None:
    """Give a collector a scheme that brings weights to its policy, if it has no way yet."""
    ways = ("_weight_sync_schemes", "_weight_updater", "_receiver_schemes")
    if not any(getattr(collector, way, None) for way in ways):
        scheme = EngineWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", context=collector)
        set_schemes(collector, {"policy": scheme})


class EngineWeightSyncScheme(MultiProcessWeightSyncScheme):
    """Scheme that sends weights to the engine of a collector's ``GenerationPolicy``, in the
    collector's process or, with ``MultiSyncCollector`` and similar ones, in each worker. If an
    engine rejects the weights, ``send`` raises its error.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.collectors import Collector
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from torchrl_grpo.envs import LLMEnv
        >>> from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
        >>> from torchrl_grpo.starter import starter_path
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> model = AutoModelForCausalLM.from_pretrained(starter_path())
        >>> policy = GenerationPolicy(TransformersEngine(model), SamplingParams(max_new_tokens=4))
        >>> tokenizer = AutoTokenizer.from_pretrained(starter_path())
        >>> collector = Collector(
        ...     LLMEnv(ArithmeticTask(), tokenizer, num_envs=4, repeats=4), policy, frames_per_batch=4,
        ...     trust_policy=True, use_buffers=False, weight_sync_schemes={"policy": EngineWeightSyncScheme()},
        ... )
        >>> collector.update_policy_weights_(TensorDict.from_module(model))
        >>> policy.engine.policy_version
        1
    """

    _source: ref[nn.Module] | None = None

    def register_model(self, model: nn.Module) -> None:
        """Set the model whose weights ``send`` sends when it is given none. It is not kept alive."""
        self._source = ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_source": None}

    def create_sender(self) -> EngineWeightSender:
        """Return a sender for ``GRPOTrainer(weight_sync_sender=...)``."""
        return EngineWeightSender()

    def _init_on_sender_impl(
        self, *, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        if hasattr(context, "num_workers"):
            super()._init_on_sender_impl(model_id=model_id, context=context, **kwargs)
        else:  # the collector plays the policy itself
            self.model_id, self.context = model_id, context
            self.synchronized_on_sender = True

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Give the engines new weights, and return when all of them have loaded them.

        Args:
            weights: weights in any form that ``GenerationPolicy.update_weights`` takes; without any,
                the weights of the model of ``register_model``.
            worker_ids: workers whose engines get the weights; None for all.

        Raises:
            TypeError: there are no weights.
            RuntimeError: an engine rejected the weights, or its process ended.
        """
        if weights is None and self._source is not None:
            weights = self._source()
        if self._sender_transports is None:
            generation_of(self.model).update_weights(weights)
        else:
            super().send(TensorDict(dict(weights_of(weights))), worker_ids)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        """Begin to receive weights. Until then the engine has its own."""
        self._receiver_transport.setup_connection_and_weights_on_receiver(worker_idx=worker_idx)
        self._start_background_receiver()

    def _background_receive_loop(self) -> None:
        while not self._stop_event.is_set():
            if self._wait_for_instruction() != "receive":
                continue
            try:
                weights = self._receiver_transport.receive_weights()
                generation_of(self.model).update_weights(weights)
                if self.context is not None:
                    self.context.increment_version()
                self._send_ack()
            except Exception as error:
                self._send_ack(f"{type(error).__name__}: {error}")

    def _wait_for_ack(
        self, worker_ids: int | list[int] | None = None, timeout: float | None = None
    ) -> None:
        workers = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        for worker in self._ack_queues if workers is None else workers:
            answer = None
            while answer is None:
                alive = self.context.procs[worker].is_alive()
                try:
                    answer = self._ack_queues[worker].get(timeout=1)
                except Empty:
                    answer = None if alive else "its process ended"
            if answer != "updated":
                raise RuntimeError(f"worker {worker} did not take the weights: {answer}")


class EngineWeightSender:
    """Pushes a model's weights to the engines of collectors, like TorchRL's senders."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._collectors: list[BaseCollector] = []

    def register_model(self, model: nn.Module) -> None:
        """Set the source of the weights, as ``GenerationPolicy.update_weights`` takes it, also for
        updates of the collectors without weights.
        """
        self._model = model
        self._register()

    def register_collector(self, collector: BaseCollector) -> None:
        """Add a collector whose engine gets the weights."""
        self._collectors.append(collector)
        self._register()

    def _register(self) -> None:
        """Make the model known to the policies in this process."""
        for collector in self._collectors:
            policy = getattr(collector, "policy", None)
            if isinstance(policy, nn.Module) and isinstance(self._model, nn.Module):
                generation_of(policy).register_model(self._model)

    def update_weights(self, weights: Any = None) -> None:
        """Push weights, by default of the registered model."""
        named = TensorDict(dict(weights_of(self._model if weights is None else weights)))
        for collector in self._collectors:
            collector.update_policy_weights_(named)
