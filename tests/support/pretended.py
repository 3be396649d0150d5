"""Simulated accelerators: tensors that report ``meta:N`` as their device and keep their values on
the CPU.

``torch``'s ``FakeTensorMode`` has no values, on which packing, sampling and skipping depend. This
mode has both: each operation runs on the CPU, and raises if its tensors are on different devices,
as on a GPU. It records where the CPU would wait for a GPU: where it reads values, or sends some
with a blocking copy.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from pytest import MonkeyPatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
_COPIES = (aten._to_copy, aten.copy_, aten.copy, aten.to)
_INDICES_MAY_BE_ON_THE_CPU = (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_)
_READS = (
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
)
_CPU = torch.device("cpu")


class OnDevice(torch.Tensor):
    """A tensor on the CPU that reports another device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor, device: torch.device) -> Any:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            device=device, requires_grad=real.requires_grad,
        )  # fmt: skip
        tensor.held = real.detach()
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held!r}, {self.device})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _indexed(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("meta", 0) if device.type == "meta" and device.index is None else device


def waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the CPU would wait for a device until the operation's result is there."""
    flat = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    there = [value for value in flat if value.device != _CPU]
    packet = func.overloadpacket
    if packet in _COPIES:
        to = flat[0].device if len(flat) == 2 else _indexed(kwargs.get("device") or flat[0].device)
        source = flat[-1].device
        free = kwargs.get("non_blocking") or (len(flat) == 2 and len(args) > 2 and args[2])
        return source != to and (to == _CPU or not free)
    if packet in _INDICES_MAY_BE_ON_THE_CPU:
        return any(
            index is not None and index.device != _CPU and index.dtype == torch.bool
            for index in args[1]
        )
    if packet is aten.repeat_interleave:
        return bool(there) and kwargs.get("output_size") is None
    return bool(there) and packet in _READS


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    packet = func.overloadpacket
    if packet in _INDICES_MAY_BE_ON_THE_CPU:
        flat = [value for value in flat if value.device == flat[0].device or value.device != _CPU]
    # A scalar on the CPU may be combined with any device, but not as a bound.
    takes_scalars = packet is not aten.clamp
    devices = {
        value.device
        for value in flat
        if value.device != _CPU or value.dim() > 0 or not takes_scalars
    }
    if len(devices) > 1 and packet not in _COPIES:
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found {sorted(map(str, devices))}"
        )
    device = next(iter(devices), flat[0].device if flat else _CPU)
    if packet in _COPIES and flat:
        device = flat[0].device
    if kwargs.get("device") is not None:
        device = _indexed(kwargs["device"])
        kwargs = kwargs | {"device": _CPU}
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}

    def unwrapped(value: Any) -> Any:
        return value.held if isinstance(value, OnDevice) else value

    result = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    own = {id(value.held): value for value in flat if isinstance(value, OnDevice)}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or device == _CPU:
            return value
        return own[id(value)] if id(value) in own else OnDevice(value, device)

    return tree_map(wrapped, result)


class PretendedCuda(TorchDispatchMode):
    """Context in which tensors can be on the devices ``meta:N``.

    ``waited`` lists the operations for which the CPU waited for one of them, in order.
    """

    def __enter__(self) -> Any:
        self.waited: list[str] = []
        # Autocast does not support this device type.
        self._patches, enabled, autocast = MonkeyPatch(), torch.is_autocast_enabled, torch.autocast
        self._patches.setattr(
            torch, "is_autocast_enabled", lambda kind=None: kind != "meta" and enabled(kind)
        )
        self._patches.setattr(
            torch,
            "autocast",
            lambda kind, *a, **k: nullcontext() if kind == "meta" else autocast(kind, *a, **k),
        )
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._patches.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args, kwargs or {}):
            self.waited.append(str(func.overloadpacket))
        return _run(func, args, kwargs or {})
