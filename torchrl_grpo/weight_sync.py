"""How the trainer's weights reach an engine in another process of the same machine.

The trainer writes all weights into one block of shared memory (``SharedWeights``) and tells the engine's workers to
load them from there (``WeightSyncExtension``, which vLLM mixes into its worker class). Names and shapes are checked
before anything is sent, so a bad update leaves the engine as it was. Nothing here imports vLLM: the extension is given
its worker by vLLM itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


class SharedWeights:
    """A block of shared memory with a place for each weight of a model.

    The block is a file in ``/dev/shm`` (in the temporary folder where that is missing or full). Once every worker has
    mapped it, ``unlink`` takes its name away: the memory then lives exactly as long as the processes that use it, and
    nothing is left behind however they end.

    Args:
        shapes: name to shape of each weight.
        tied: further names that ``fill`` accepts and ignores, because they share the memory of another weight.
        dtype: dtype in which the weights travel: the engine's.

    Raises:
        OSError: neither place has room for the block.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], tied: Iterable[str], dtype: torch.dtype) -> None:
        self.layout: Layout = [(name, tuple(shape)) for name, shape in shapes.items()]
        self.tied = frozenset(tied)
        self.dtype = dtype
        size = sum(torch.Size(shape).numel() for _, shape in self.layout)
        self.path = _reserve_file(size * dtype.itemsize)
        flat = torch.from_file(self.path, shared=True, size=size, dtype=dtype)
        self._views = dict(_views(flat, self.layout))

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

    def unlink(self) -> None:
        """Takes the block's name away; who has mapped it keeps it. May be called again."""
        if os.path.exists(self.path):
            os.unlink(self.path)


def _reserve_file(nbytes: int) -> str:
    """A new file of the given size whose space is really there (a sparse one would end the process when it is not)."""
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(folder)]
    for folder in folders:
        handle, path = tempfile.mkstemp(prefix="torchrl_grpo_weights_", dir=folder)
        try:
            os.posix_fallocate(handle, 0, max(nbytes, 1))
            return path
        except OSError:
            os.unlink(path)
            if folder == folders[-1]:
                raise
        finally:
            os.close(handle)
    raise AssertionError("there is always a temporary folder")


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

    def map_shared_weights(self, path: str, dtype: torch.dtype, layout: Layout) -> None:
        """Maps the trainer's block; see ``SharedWeights``."""
        size = sum(torch.Size(shape).numel() for _, shape in layout)
        flat = torch.from_file(path, shared=True, size=size, dtype=dtype)
        self._shared_weights = list(_views(flat, layout))

    @torch.no_grad()
    def load_shared_weights(self) -> None:
        """Loads what now stands in the block."""
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(self._shared_weights))
        # On a CPU vLLM keeps a packed copy of each linear weight. The reload remakes it for the layers that were sent,
        # but a tied head is not sent: it would go on with the copy of the old embedding.
        for module in worker.model_runner.get_model().modules():
            if type(module).__name__ == "ParallelLMHead" and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def seed_sampler(self, seed: int) -> None:
        """Seeds the generator that sampling draws from."""
        torch.manual_seed(seed)

    def sampler_state(self) -> Tensor:
        """The state of that generator."""
        device = self.device  # type: ignore[attr-defined]
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def set_sampler_state(self, state: Tensor) -> None:
        """Restores what ``sampler_state`` gave."""
        device = self.device  # type: ignore[attr-defined]
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


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
