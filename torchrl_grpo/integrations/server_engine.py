"""The engine of a server that the run did not start: token ids go out over HTTP, token ids and
log-probs come back.

It supports vLLM's server (``vllm serve``) and SGLang's. Weights reach the server through a shared
folder: they are written to a temporary safetensors file, renamed, and read by the server's own
reload route. So trainer and server need no network between their GPUs, and no common packages.
LoRA adapters are written there in peft's format, each version under a name of its own, which
requests select: running requests keep the adapters that they began with.

A server labels each token, or each response, with the weights that sampled it. An unknown label
means that the server was restarted or that others update it: the engine is then lost, as if the
server did not answer, and the driver makes another one, which sends the published weights again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl import torchrl_logger
from transformers import PreTrainedModel

from torchrl_grpo.checks import InFlight, exact_context
from torchrl_grpo.errors import ReceiptError
from torchrl_grpo.generation.base import (
    Completion,
    Engine,
    EngineDeadError,
    EngineRequest,
    OnFinished,
    SamplingParams,
    cut_off,
    greedy,
)
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.images import Prompt, text_tokens
from torchrl_grpo.integrations.server_answers import SampleRequest
from torchrl_grpo.integrations.servers import AT_A_TIME, COMES_BACK_S, connect, require_httpx2
from torchrl_grpo.weights import WeightHandle, named_adapters, named_weights
from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.handle import on_host
from torchrl_grpo.weights.named import LoraDelta, expected_weights
from torchrl_grpo.weights.receipts import Digests, compare

_PROBE = [1] * 16
"""Prompt that shows whether a server's weights have changed."""
_ABORTS = 5
"""Consecutive answers that may be aborts although no update caused them."""


class ServerEngine(Engine):
    """Samples with a server, for many threads at once.

    Args:
        address: of the server, such as ``http://127.0.0.1:8000``.
        folder: for the weights; the server must see it under the same path. None keeps the server's
            weights, for an evaluation.
        dtype: of the weights in the folder.
        tied: maps the name of a tied weight to the name of the weight that it shares memory with.
        in_flight: what an update does to running requests: ``"wait"`` for their end, ``"keep"``
            them and continue with the new weights, or ``"abort"`` and restart them.
        vocabulary: number of the model's token ids; None reads it from the weights of the head.
        base: loads the base model of adapters, which the server gets before the first ones: it may
            still have the weights of another run.
        starts_within_s: how long to wait for a server that does not answer.

    Raises:
        EngineDeadError: the server does not answer.
        ValueError: the server cannot be trained with.
    """

    concurrent = True

    def __init__(
        self,
        address: str,
        *,
        folder: Path | None = None,
        dtype: torch.dtype = torch.float32,
        tied: Mapping[str, str] | None = None,
        in_flight: InFlight = "wait",
        vocabulary: int | None = None,
        base: Callable[[], PreTrainedModel] | None = None,
        starts_within_s: float = COMES_BACK_S,
    ) -> None:
        self.address = address
        self._server = connect(address, starts_within_s)
        self.max_model_len = self._server.max_model_len
        self._folder = folder
        self._dtype = dtype
        self._tied = dict(tied or {})
        self._in_flight = in_flight
        self._label = uuid.uuid4().hex[:8]
        self._server.vocabulary = vocabulary or self._server.vocabulary
        self._labels: dict[str, int] = {}  # versions of the labels that the server received
        self._updates = threading.Lock()
        self._base = base
        self._attached: dict[str, Path] = {}  # folders of adapters
        self._in_use: list[str | None] = []  # adapters of each running request
        self._names = threading.Lock()
        self._threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="server")
        self._closed = False
        self._answer: dict[int, float] = {}  # its log-probs of the probe's next token

    @classmethod
    def require(cls, *, on_cpu: bool) -> None:
        require_httpx2("inference_model.backend=server")

    @classmethod
    def check(cls, request: EngineRequest) -> None:
        options = request.options
        for address in options.address:
            server = connect(address, 0)
            try:
                server.check_options(options.in_flight)
                server.check_sampling()
                server.check_context(request.max_dialog_tokens + options.max_new_tokens)
                limit = exact_context(request.model_config)
                if limit is not None and server.max_model_len > limit:
                    raise ValueError(
                        f"inference_model.address: the server at {address} must have a context of "
                        f"at most {limit} tokens, but has {server.max_model_len}, with which it "
                        f"and the trainer disagree: use vllm serve --max-model-len {limit}."
                    )
                server.check_vocabulary(request.model_config.get_text_config().vocab_size)
            finally:
                server.close()

    @classmethod
    def takes_adapters(cls, context: Any) -> bool:
        """See ``Engine``; each server must load adapters of zeros."""
        options, name = context.config.inference_model, f"probe-{uuid.uuid4().hex[:8]}"
        folder = _folder(options, context.folder) / name
        try:
            # The shapes of the run's own, on the meta device.
            _write_adapters(folder, named_adapters(context.on_meta))
            for address in options.address:
                server = connect(address, 0)
                try:
                    server.change_adapters("load", lora_name=name, lora_path=str(folder))
                    server.change_adapters("unload", lora_name=name)
                finally:
                    server.close()
        except (EngineDeadError, ValueError) as error:
            torchrl_logger.info(f"Servers get whole weights with the adapters merged: {error}")
            return False
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return True

    @classmethod
    def make(
        cls,
        request: EngineRequest,
        device: torch.device,
        load_model: Callable[[], PreTrainedModel],
        *,
        concurrent: bool = False,
    ) -> Engine:
        options = request.options
        address = options.address[request.number]
        folder = _folder(options, request.folder)
        return cls(
            address,
            # Several runs may share the folder.
            folder=folder / f"served_weights_{request.number}_{uuid.uuid4().hex[:8]}"
            if request.trains
            else None,
            dtype=getattr(torch, options.dtype),
            tied=_tied_weights(request),
            in_flight=options.in_flight,
            vocabulary=request.model_config.get_text_config().vocab_size,
            base=load_model,
        )

    def generate(
        self,
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """See ``Engine``; any number of threads may call it at the same time, even during an
        update.
        """
        if self._closed:
            raise RuntimeError("the engine is closed.")
        for prompt in prompts:
            if len(prompt) >= self.max_model_len:
                raise ValueError(
                    "a prompt must leave room for one token in the context of "
                    f"{self.max_model_len} tokens of the server at {self.address}, but this one "
                    f"has {len(prompt)}: drop it, or restart the server with a longer context."
                )

        def ask(number: int) -> list[Completion]:
            answers = self._ask(text_tokens(prompts[number]).tolist(), n, params)
            for index, completion in enumerate(answers if on_finished is not None else ()):
                on_finished(number, index, completion)  # type: ignore[misc]
            return answers

        return list(self._threads.map(ask, range(len(prompts))))

    def _ask(self, prompt: list[int], n: int, params: SamplingParams) -> list[Completion]:
        """Return the responses to a prompt; if an update aborts any, all are requested again."""
        room = self.max_model_len - len(prompt)
        samples = 1 if greedy(params) else n  # greedy responses are all the same
        aborts = 0
        while aborts < _ABORTS:
            with self._names:
                name, version = self._server.adapters, self.policy_version
                self._in_use.append(name)
            request = SampleRequest(
                prompt,
                samples,
                limit=min(params.max_new_tokens, room),
                room=room,
                params=params,
                vocabulary=self._server.vocabulary,
                # Answers of adapters have the label of the base weights.
                labels=(dict.fromkeys(self._labels, version) if name else self._labels) or None,
                oldest=version,
                adapters=name,
            )
            try:
                answers = self._server.complete(request)
            except ValueError as error:
                if name is None or isinstance(error, EngineDeadError):
                    raise
                raise EngineDeadError(str(error)) from error  # it was restarted without them
            finally:
                self._in_use.remove(name)
                self._detach_unused()
            completions = [_cut(answer, params.stop) for answer in answers if answer is not None]
            if len(completions) == samples:
                return [completions[index % samples] for index in range(n)]
            with self._updates:  # wait for the end of the update that aborted the request
                aborts = aborts + 1 if self.policy_version == version else 0
        raise EngineDeadError(
            f"inference_model.address: the server at {self.address} must not abort requests "
            f"without an update of its weights, but did so {_ABORTS} times: see its log."
        )

    def _detach_unused(self) -> None:
        """Unload the adapters that are neither current nor in use."""
        with self._names:
            for name in self._attached.keys() - {self._server.adapters, *self._in_use}:
                shutil.rmtree(self._attached.pop(name), ignore_errors=True)
                with suppress(ValueError):  # it was restarted without them
                    self._server.change_adapters("unload", lora_name=name)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See ``Engine``; the weights go through the folder. Without a folder, the server keeps its
        weights.

        Raises:
            EngineDeadError: the server did not load the weights.
        """
        if self._folder is None:
            self.policy_version = version
            return
        with self._updates:
            file = self._write(weights)
            try:
                self._server.pause(self._in_flight)
                label = f"{self._label}-{version}"
                self._labels[label] = version
                try:
                    self._server.load(file.parent, label)
                finally:
                    self._server.resume()
            finally:
                file.unlink(missing_ok=True)
            self.policy_version = version

    def load(self, handle: WeightHandle, version: int) -> None:
        """See ``Engine``. Trained weights must change what the server predicts, but not if they are
        the first that this engine loads: the server may have them from the sampler that this one
        replaces.

        Raises:
            ReceiptError: its predictions did not change.
        """
        changes = handle.changes and version != self.policy_version
        super().load(handle, version)
        if self._folder is None:
            return
        start, before = time.perf_counter(), self._answer
        self._answer = answer = self._server.candidates(_PROBE, 1.0)
        self.receipt_s += time.perf_counter() - start
        both = before.keys() & answer.keys()
        if changes and both and all(before[token] == answer[token] for token in both):
            raise ReceiptError(
                f"inference_model.address: the server at {self.address} reports that it loaded the "
                f"trained weights of version {version}, but its log-probs are those of the previous "
                "version: see its log."
            )

    def _load(self, handle: WeightHandle, version: int) -> None:
        if self._folder is None or not isinstance(handle, AdapterHandle):
            super()._load(handle, version)
            return
        if self._base is not None:
            self.update_weights(named_weights(self._base()), version)
            self._base, self._answer = None, self._server.candidates(_PROBE, 1.0)
        matrices = iter(self._received(handle.weights(), None).values())
        triples = zip(handle.layers, matrices, matrices, strict=True)
        deltas = ((name, LoraDelta(a, b, scaling)) for (name, scaling), a, b in triples)
        name = f"{self._label}-{version}-{uuid.uuid4().hex[:4]}"
        folder = self._folder / name
        with self._updates:
            _write_adapters(folder, deltas)
            self._server.change_adapters("load", lora_name=name, lora_path=str(folder))
            with self._names:
                self._attached[name] = folder
                self._server.adapters, self.policy_version = name, version
            if self._in_flight == "abort":
                self._server.pause(self._in_flight)
                self._server.resume()
        self._detach_unused()

    def _received(
        self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        """Return weights on the host, with their receipt compared."""
        known = getattr(weights, "receipt", None) or {}
        values, digests = dict[str, Tensor](), Digests()
        for name, weight in weights:
            values[name] = on_host(weight, dtype)
            if weight.dtype != values[name].dtype:
                known = {}
            digests.add(name, values[name])
        self.receipt, self.receipt_s = digests.receipt(), digests.seconds
        compare(known, self.receipt, f"the folder of the server at {self.address}")
        return values

    def _write(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Write a checkpoint for the server to a temporary file, and rename it."""
        from safetensors.torch import save_file

        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        values = self._received(weights, self._dtype)
        # Without them, a server with a packed copy of a tied head would not update the copy.
        values |= {
            name: values[other].clone() for name, other in self._tied.items() if name not in values
        }
        if "lm_head.weight" in values:
            self._server.vocabulary = len(values["lm_head.weight"])
        partial, file = self._folder / "model.partial", self._folder / "model.safetensors"
        save_file(values, partial, metadata={"format": "pt"})
        os.replace(partial, file)
        return file

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the version only: the server has its own random state."""
        super().load_state_dict(state)
        self._labels = {}

    def close(self) -> None:
        """Close the connections; the server keeps running with its current weights. May be called
        again.
        """
        if not self._closed:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._server.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _cut(completion: Completion, stop: StopStrings | None) -> Completion:
    """Return a response that ends with the token that completes its first stop string."""
    end = None if stop is None else stop.completed_at(completion.tokens.tolist())
    return cut_off(completion, None, end)


def _folder(options: Any, run: Path | None) -> Path:
    """Return the folder through which weights go."""
    return Path(options.weights_folder or run or tempfile.mkdtemp(prefix="served-")).absolute()


def _write_adapters(folder: Path, deltas: Iterable[tuple[str, LoraDelta]]) -> None:
    """Write adapters in peft's format, with a scaling of 1; those on the meta device as zeros."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors, rank = dict[str, Tensor](), 0
    for name, delta in deltas:
        rank = max(rank, len(delta.a))
        for side, matrix in (("A", delta.a), ("B", delta.b * delta.scaling)):
            value = torch.zeros_like(matrix, device="cpu") if matrix.is_meta else matrix
            tensors[f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight"] = value
    modules = sorted({name.split(".")[-3] for name in tensors})
    LoraConfig(
        r=rank, lora_alpha=rank, target_modules=modules, task_type="CAUSAL_LM"
    ).save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors")


def _tied_weights(request: EngineRequest) -> dict[str, str]:
    """Return the name of each tied weight, with the name of the weight that it shares memory
    with.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            request.model_config, trust_remote_code=request.trust_remote_code
        )
    shapes, tied = expected_weights(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not tied or head is None or head.weight is not embedding.weight:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    pair = (f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight")
    return {
        tie: next(name for name in pair if name != tie)
        for tie in tied
        if tie in pair and tie in shapes
    }
