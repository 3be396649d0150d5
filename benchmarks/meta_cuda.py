"""A CUDA device without a card, to count what a real one would be asked to do: tensors that report
``meta:0`` as their device. Integers and bools have values; floats have only shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from torchrl_grpo.functional import head_logits
from torchrl_grpo.generation import fused_decoder
from torchrl_grpo.models import attention, compiled, head

aten = torch.ops.aten
DEVICE = torch.device("meta", 0)
_CPU = torch.device("cpu")
_ALLOCATIONS = (
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten._unsafe_view,
)  # fmt: skip
_FILLED_FIRST = (aten.slice_backward, aten.select_backward)
"""Operations of two kernels: they fill a tensor with zeros and copy a part."""
_COPIES = (aten._to_copy, aten.copy_)
_READS = (
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount,
    aten._unique2, aten.unique_dim, aten.unique_consecutive,
)  # fmt: skip
"""Operations that wait for the device, besides copies, and indices that are masks."""
_INDEXING = (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_)
_WRITES_AT = (aten.index_put_, aten._index_put_impl_)
"""Operations that write no more than the values they get, whatever tensor these are in."""
_FILLS: dict[Any, int] = {aten.ones_like: 1, aten.new_ones: 1}
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors that a launch of an operation on lists of tensors takes, by the number of lists."""
_CHUNKS_PER_LAUNCH, _CHUNK = 320, 65536
"""Chunks that such a launch takes, and elements of a chunk."""


class MetaCuda(TorchDispatchMode):
    """Context in which the device ``meta:0`` stands for a card with flash attention, and which
    counts the work that it is given.

    Integers and bools that follow from floats are 0 and False, and a float that is read is 1: a
    norm is finite, the token 0 is sampled.

    Attributes:
        launches: kernels and copies, by operation. An operation of PyTorch is one, except that
            allocations and views are none, and that an operation on lists of tensors is as many
            as PyTorch's CUDA kernel makes of it, and that a function that our code compiles is one,
            which reads its arguments and writes its results.
        traffic: bytes, by operation, as if each read its inputs and wrote its outputs once.
        waits: times that the CPU waits for the device, by operation.
        flops: floating-point operations of matrix products and attention, by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        self.launches: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()

    def totals(self) -> dict[str, float]:
        """Return the sums over all operations."""
        return {
            "launches": self.launches.total(),
            "gigabytes": self.traffic.total() / 1e9,
            "waits": self.waits.total(),
            "teraflops": self.flops.total() / 1e12,
        }

    def __enter__(self) -> Any:
        enabled, autocast = torch.is_autocast_enabled, torch.autocast
        optimizer = import_module("torch.optim.optimizer")
        on_lists = [*_foreach_utils._foreach_supported_types, _OnCard]
        self._stack = ExitStack()
        for owner, name, value in (
            (attention, "_has_varlen", lambda query: query.itemsize == 2),
            (fused_decoder.FusedDecoder, "logits", _head_logits),
            (torch.cuda, "CUDAGraph", partial(_Graph, self)),
            (torch.cuda, "graph", self._capture),
            (torch, "sparse_coo_tensor", _SparseOnCard.make),
            (compiled.Compiled, "__call__", lambda *args: self._run_compiled(*args)),
            (head, "MAX_CHUNK_ELEMENTS", dict.fromkeys(head.MAX_CHUNK_ELEMENTS, 2**27)),
            (torch, "is_autocast_enabled", lambda kind=None: kind != "meta" and enabled(kind)),
            (
                torch,
                "autocast",
                lambda kind, *a, **k: nullcontext() if kind == "meta" else autocast(kind, *a, **k),
            ),
            (optimizer, "_foreach_supported_types", on_lists),
            (_foreach_utils, "_foreach_supported_types", on_lists),
            *(
                (module, f"_get_{kind}_kernels_supported_devices", lambda: ["meta"])
                for module in (_foreach_utils, optimizer)
                for kind in ("foreach", "fused")
            ),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, value))
        self._stack.enter_context(_ChooseAttention())
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        to = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not any(isinstance(x, _OnCard) for x in tensors) and (to is None or to.type != "meta"):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if _waits(packet, to, args, kwargs):
            self.waits[str(packet)] += 1
        out = _run(func, to, args, kwargs)
        if not (func.is_view or packet in _ALLOCATIONS):
            self._count(packet, [*tensors, *_tensors(out)], args)
            if packet in flop_registry:
                values, options = tree_map(_held, (args, kwargs))
                self.flops[str(packet)] += flop_registry[packet](
                    *values, **options, out_val=tree_map(_held, out)
                )
        return out

    @contextmanager
    def _capture(self, graph: _Graph, *args: Any, **kwargs: Any) -> Iterator[None]:
        before = self.launches, self.traffic, self.flops
        self.launches, self.traffic, self.flops = Counter(), Counter(), Counter()
        yield
        graph.traffic, graph.flops = self.traffic, self.flops
        self.launches, self.traffic, self.flops = before

    def _run_compiled(self, function: compiled.Compiled, *args: Any) -> Any:
        launches, traffic = self.launches.copy(), self.traffic.copy()
        nbytes = sum(tensor.nbytes for tensor in _tensors(args))
        out = function.function(*args)
        name = f"compiled.{function.function.__name__}"
        self.launches, self.traffic = launches, traffic
        self.launches[name] += 1
        self.traffic[name] += nbytes + sum(tensor.nbytes for tensor in _tensors(out))
        return out

    def _count(self, packet: Any, tensors: list[Tensor], args: Any) -> None:
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and _tensors(arg)]
        on_lists = lists and str(packet).startswith(("aten._foreach_", "aten._fused_"))
        of_one = 2 if packet in _FILLED_FIRST else 1
        self.launches[str(packet)] += _launches_on_lists(lists) if on_lists else of_one
        if packet in _WRITES_AT:
            tensors = [args[2], *tensors[1:-1]]
        self.traffic[str(packet)] += sum(tensor.nbytes for tensor in tensors)


class _Graph:
    """A CUDA graph, whose replay is one launch."""

    def __init__(self, card: MetaCuda) -> None:
        self.card = card
        self.traffic, self.flops = Counter[str](), Counter[str]()

    def replay(self) -> None:
        """Count the launch, and what the kernels read, write and compute."""
        self.card.launches["CUDA graph"] += 1
        self.card.traffic.update(self.traffic)
        self.card.flops.update(self.flops)

    def pool(self) -> None:
        """Return no pool."""


class _OnCard(Tensor):
    """A tensor that reports ``meta:0`` as its device."""

    held: Tensor
    """The values on the CPU or, of floats, a tensor on PyTorch's own device ``meta``."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        tensor.held = held.detach()
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"_OnCard({self.held!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} outside of MetaCuda")


class _SparseOnCard(_OnCard):
    """A sparse tensor of coalesced rows, as the gradient of an embedding: no work of its own."""

    parts: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, places: Tensor, rows: Tensor, shape: tuple[int, ...], **_: Any) -> Tensor:
        tensor = cls(torch.empty(shape, dtype=rows.dtype, device="meta"))
        tensor.parts = places, rows
        return tensor

    def indices(self) -> Tensor:
        return self.parts[0]

    def values(self) -> Tensor:
        return self.parts[1]


def _held(value: Any) -> Any:
    return value.held if isinstance(value, _OnCard) else value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _waits(packet: Any, to: torch.device | None, args: Any, kwargs: Any) -> bool:
    """Return whether the CPU waits for the device in an operation."""
    if packet in _COPIES:
        source = args[0] if packet is aten._to_copy else args[1]
        target = to or args[0].device
        if source.device == target:
            return False
        free = kwargs.get("non_blocking") or args[2:] == (True,)
        return target.type == "cpu" or not free
    if packet in _INDEXING:
        return any(x is not None and x.dtype == torch.bool and not x.is_cpu for x in args[1])
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in _READS


def _run(func: Any, to: torch.device | None, args: Any, kwargs: Any) -> Any:
    """Run an operation on what its tensors hold: on values if all are integers, otherwise on shapes."""
    packet = func.overloadpacket
    tensors = _tensors((args, kwargs))
    if packet is aten._local_scalar_dense:
        return 1.0 if args[0].held.is_meta else args[0].held.item()
    if to == _CPU or (packet is aten.copy_ and args[0].is_cpu):
        held = _held(tensors[-1])
        values = torch.ones(held.shape) if held.is_meta else held
        if packet is aten.copy_:
            return args[0].copy_(values)
        return values.to(kwargs.get("dtype") or tensors[0].dtype, copy=True)
    if not tensors:
        out = func(*args, **kwargs | {"device": "meta"})
        return _OnCard(out if _is_float(out) else func(*args, **kwargs | {"device": "cpu"}))
    options = {
        name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")
    }
    if packet in _INDEXING:
        places = [place for index in args[1] for place in _places(index)]
        args = (args[0], places, *args[2:])
    with_values = all(_is_known(x) for x in tensors) and not (
        packet in _COPIES and _is_float(kwargs.get("dtype") or tensors[0])
    )
    own: dict[int, Tensor] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        held = _held(value)
        if not (with_values or held.is_meta or (value.is_cpu and held.dim() == 0)):
            held = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
        own[id(held)] = value
        return held

    def on_card(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in own and isinstance(own[id(value)], _OnCard):
            return own[id(value)]
        if _is_float(value) and not value.is_meta:
            value = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        if not _is_float(value) and value.is_meta:
            value = torch.full(value.shape, _FILLS.get(packet, 0), dtype=value.dtype)
        return _OnCard(value)

    return tree_map(on_card, func(*tree_map(plain, args), **tree_map(plain, options)))


def _is_float(value: Tensor | torch.dtype) -> bool:
    return (value.dtype if isinstance(value, Tensor) else value).is_floating_point


def _is_known(tensor: Tensor) -> bool:
    return not _held(tensor).is_meta


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Return an index without masks."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return list(_held(index).nonzero().unbind(1))


def _launches_on_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return the launches of an operation on lists of tensors, filled as PyTorch's
    ``multi_tensor_apply`` does.
    """
    launches = tensors = chunks = 0
    for tensor in lists[0]:
        tensors += 1
        left = -(-tensor.numel() // _CHUNK)
        while left:
            step = min(left, _CHUNKS_PER_LAUNCH - chunks)
            left, chunks = left - step, chunks + step
            full = not left and tensors == _TENSORS_PER_LAUNCH[len(lists)]
            if full or chunks == _CHUNKS_PER_LAUNCH:
                launches += 1
                chunks, tensors = 0, int(left > 0)
    return launches + (chunks > 0)


def _head_logits(decoder: Any, hidden: Tensor) -> Tensor:
    """Return the logits as ``FusedDecoder.logits`` does on a card."""
    head = decoder._lm_head
    return head_logits(hidden, head.weight, head.bias)


class _ChooseAttention(TorchFunctionMode):
    """Choose PyTorch's attention kernel as a card does: flash attention or, with a mask or in
    float32, the memory-efficient one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    if attn_mask is None and query.itemsize == 2:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    grad = query.requires_grad
    return efficient(query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale)[0]
