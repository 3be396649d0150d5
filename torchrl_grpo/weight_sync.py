"""How the trainer's weights reach an engine in another process of the same machine.

The trainer writes all weights into one block of shared memory (``SharedWeights``) and tells the engine's workers to
load them from there (``WeightSyncExtension``, which vLLM mixes into its worker class). Names and shapes are checked
before anything is sent, so a bad update leaves the engine as it was. Nothing here imports vLLM: the extension is given
its worker by vLLM itself.
"""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_grpo.processes import die_with_parent

Layout = list[tuple[str, tuple[int, ...]]]


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a causal language model under the names of its Hugging Face checkpoint.

    A LoRA model gives its base model's weights with the active adapters merged in; the model itself is left unchanged
    and the merged tensors are made one at a time. So are those of a sharded model: each is gathered when it is asked
    for, which all of its ranks must do.

    Args:
        model: a Hugging Face model, or a peft model around one; sharded or not.

    Yields:
        (name, tensor); a parameter that several modules share comes once. The tensors are detached, and are the
        model's own memory where nothing had to be merged or gathered.

    Raises:
        ValueError: an adapter is not plain LoRA (DoRA, for example), so that it cannot be added to the base weight.
    """
    for name, weight in _merged_weights(model):
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def _merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As ``named_weights``, with sharded weights merged part by part and not yet gathered."""
    if not hasattr(model, "peft_config"):
        for name, weight in model.named_parameters():
            yield name, weight.detach()
        return
    from peft.tuners.lora import LoraLayer

    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    for name, weight in base.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(".base_layer")
        if owner != path and owner in layers:
            delta = _lora_delta(owner, layers[owner]) if leaf == "weight" else None
            yield f"{owner}.{leaf}", weight.detach() if delta is None else weight.detach() + delta
        elif not any(path.startswith(f"{layer}.") for layer in layers):
            yield name, weight.detach()


@torch.no_grad()
def _lora_delta(name: str, layer: Any) -> Tensor | None:
    """What the active adapters add to a layer's base weight, None when nothing is to be added."""
    if layer.merged:
        return None
    delta = None
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A and adapter not in layer.lora_embedding_A:
            continue
        if adapter in layer.lora_variant:
            raise ValueError(
                f"{name}: only plain LoRA can be sent to an engine, adapter {adapter!r} is a "
                f"{type(layer.lora_variant[adapter]).__name__}: train without it."
            )
        update = layer.get_delta_weight(adapter).to(layer.get_base_layer().weight.dtype)
        delta = update if delta is None else delta + update
    return delta


@dataclass(frozen=True)
class SharedBlock:
    """Where the weights are: all that another process of this machine needs to read them. Small, and may be pickled.

    Attributes:
        path: the block, as every process of this machine and user can open it.
        name: what must be found there, so that nothing else is taken for the block when its maker is gone.
        dtype: of all weights, such as ``"float32"``.
        layout: name and shape of each weight, in the order in which they lie in the block.
    """

    path: str
    name: str
    dtype: str
    layout: Layout

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Maps the block and gives the named weights; they are the block's own memory and hold it.

        Raises:
            RuntimeError: the process that made the block dropped it or has ended.
        """
        if not os.path.exists(self.path) or self.name not in os.readlink(self.path):
            raise RuntimeError(f"the shared weights at {self.path} are gone: the process that made them dropped them.")
        size = sum(torch.Size(shape).numel() for _, shape in self.layout)
        flat = torch.from_file(self.path, shared=True, size=size, dtype=getattr(torch, self.dtype))
        return _views(flat, self.layout)


class SharedWeights:
    """A block of shared memory with a place for each weight of a model.

    One process makes and fills it, and any number of others on the same machine read it through ``block``. It has no
    name in any file system (it is a ``memfd``, Linux only): it can be opened as long as this object lives, and its
    memory is gone with the last process that uses it, however these processes end.

    ``fill`` does not know who is reading: fill again only after everyone who was told of the last weights has them.

    Attributes:
        block: what the readers need.

    Args:
        shapes: name to shape of each weight.
        tied: further names that ``fill`` accepts and ignores, because they share the memory of another weight.
        dtype: dtype in which the weights travel, best the engine's.

    Raises:
        OSError: there is not enough memory for the block.

    Examples:
        >>> shared = SharedWeights({"norm": (3,)}, (), torch.float32)
        >>> shared.fill([("norm", torch.ones(3))])
        >>> list(shared.block.weights())
        [('norm', tensor([1., 1., 1.]))]
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], tied: Iterable[str], dtype: torch.dtype) -> None:
        self.tied = frozenset(tied)
        layout = [(name, tuple(shape)) for name, shape in shapes.items()]
        nbytes = sum(torch.Size(shape).numel() for _, shape in layout) * dtype.itemsize
        name = f"torchrl_grpo_weights_{uuid.uuid4().hex}"
        self._file = open(os.memfd_create(name), "r+b")  # noqa: SIM115  closed with this object
        os.posix_fallocate(self._file.fileno(), 0, max(nbytes, 1))  # a lack of memory shows here, not as a SIGBUS later
        self.block = SharedBlock(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", name, dtype_name(dtype), layout)
        self._views = dict(self.block.weights())

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the weights into the block.

        Raises:
            RuntimeError: a name is unknown, missing or comes twice, or a shape differs.
        """
        seen: set[str] = set()
        for name, weight in weights:
            if name in self.tied:
                continue
            view = self._views.get(name)
            if view is None:
                raise RuntimeError(
                    f"weight {name!r} is not among the {len(self._views)} weights of the engine's model."
                )
            if name in seen:
                raise RuntimeError(f"weight {name!r} was sent twice in one update.")
            if view.shape != weight.shape:
                raise RuntimeError(
                    f"weight {name!r} has shape {list(weight.shape)}, the engine's model has {list(view.shape)}."
                )
            view.copy_(weight)
            seen.add(name)
        missing = [name for name in self._views if name not in seen]
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(self._views)} weights are missing from the update, first {missing[:3]}."
            )


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _views(flat: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Cuts a flat tensor into the named weights, in order."""
    start = 0
    for name, shape in layout:
        size = torch.Size(shape).numel()
        yield name, flat[start : start + size].view(shape)
        start += size


class WeightSyncExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called by name through ``collective_rpc``.

    ``self`` is the vLLM worker. The weights are read on the CPU and copied to wherever the model is, so the same path
    serves every device and every tensor-parallel rank (on CUDA it has not been run yet).
    """

    @torch.no_grad()
    def load_shared_weights(self, path: str, name: str, dtype: str, layout: Layout) -> None:
        """Loads what now stands in the ``SharedBlock`` that has these attributes."""
        worker: Any = self
        worker.reload_weights(weights_iterator=SharedBlock(path, name, dtype, layout).weights())
        # On a CPU vLLM keeps a packed copy of each linear weight. The reload remakes it for the layers that were sent,
        # but a tied head is not sent: it would go on with the copy of the old embedding.
        for module in worker.model_runner.get_model().modules():
            if type(module).__name__ == "ParallelLMHead" and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def seed_sampler(self, seed: int) -> None:
        """Seeds the generator that sampling draws from."""
        torch.manual_seed(seed)

    def sampler_state(self) -> bytes:
        """The state of that generator."""
        device = self.device  # type: ignore[attr-defined]
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return state.numpy().tobytes()

    def set_sampler_state(self, state: bytes) -> None:
        """Restores what ``sampler_state`` gave."""
        device = self.device  # type: ignore[attr-defined]
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensor, device)
        else:
            torch.set_rng_state(tensor)

    def die_with_parent(self) -> int:
        """Makes the worker end with the process that started it; returns the worker's process id."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
        return os.getpid()


class _Generates(Protocol):
    def generate(self, prompts: Sequence[Tensor], n: int, params: Any) -> list[list[Any]]: ...


ScoreFn = Callable[[list[Tensor], list[int]], list[Tensor]]


Probe = list[tuple[Tensor, Tensor, Tensor]]


def sample_probe(engine: _Generates, prompts: Sequence[Tensor], params: Any) -> Probe:
    """Samples one response to each prompt: (prompt [P], sampled tokens [R], their log-probs [R]) for each."""
    completions = [group[0] for group in engine.generate(prompts, 1, params)]
    return [(prompt, done.tokens, done.log_probs) for prompt, done in zip(prompts, completions, strict=True)]


def log_prob_gap(probe: Probe, score_fn: ScoreFn) -> tuple[float, float]:
    """How far an engine's log-probs are from the trainer's.

    Args:
        probe: as ``sample_probe`` gives it, at least one response.
        score_fn: takes the full sequences ([T] int64 each) and their prompt lengths, returns for each the trainer's
            log-probs of the response's tokens, at the temperature that they were sampled with.

    Returns:
        mean and largest absolute difference over all sampled tokens, in nats.

    Raises:
        RuntimeError: ``score_fn`` gave another number of log-probs than there are sampled tokens.
    """
    full = [torch.cat([prompt, tokens]) for prompt, tokens, _ in probe]
    scored = score_fn(full, [len(prompt) for prompt, _, _ in probe])
    lengths = [len(tokens) for _, tokens, _ in probe]
    if [len(row) for row in scored] != lengths:
        raise RuntimeError(f"score_fn gave {[len(row) for row in scored]} log-probs for {lengths} sampled tokens.")
    sampled = torch.cat([log_probs for _, _, log_probs in probe])
    gap = (sampled - torch.cat([row.detach().float().cpu() for row in scored])).abs()
    return gap.mean().item(), gap.max().item()


def sync_gap(engine: _Generates, score_fn: ScoreFn, prompts: Sequence[Tensor], params: Any) -> tuple[float, float]:
    """``log_prob_gap`` of freshly sampled tokens.

    Args:
        engine: samples one response to each prompt.
        score_fn: see ``log_prob_gap``.
        prompts: one [T] int64 tensor a prompt, at least one.
        params: the engine's ``SamplingParams``.
    """
    return log_prob_gap(sample_probe(engine, prompts, params), score_fn)
