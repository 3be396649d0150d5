"""Sharding a model over processes with FSDP2: each rank holds a part of every parameter, and of the
optimizer's state.

Optionally, groups of ranks also compute each layer together (tensor parallelism), by the plan in
the model's config, or several groups hold a sharded copy each (HSDP). In that case layers are
gathered within a group, and gradients are summed over all groups.

A frozen image encoder and its projector stay whole on each rank, so that a rank computes the
features of its own images, if any, without the others.

Each rank calls ``init_mesh`` once, loads the whole model on its ``loading_device`` (which takes
memory only on rank 0, if possible), and passes both to ``shard_model``. Afterwards the parameters
are DTensors. Layers are gathered when they run. Parameters outside of layers (embedding, last norm,
LM head) are gathered when ``call_gathered`` runs a function of the model. Gradients are summed over
the ranks, not averaged.

All functions here that gather are collective: all ranks must call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from torchrl_grpo.checks import check_heads
from torchrl_grpo.compat.torch import pin_exact_sizes
from torchrl_grpo.images.families import vision_parameters
from torchrl_grpo.models.loading import base_model_of
from torchrl_grpo.models.recurrent import pack_recurrent

WEIGHTS = "weights/"
"""Prefix of the names of weights in ``own_parts``."""
_MOMENTS = "moments/"
_OWN = StateDictOptions(ignore_frozen_params=True)
_LONE_TIMEOUT_S = 60.0
"""Timeout of a single rank, which never waits for others."""


def init_mesh(
    rank: int,
    world_size: int,
    store: Store,
    *,
    device: torch.device,
    timeout_s: float,
    tensor_parallel_size: int = 1,
    replicas: int = 1,
) -> DeviceMesh:
    """Join the process group of the trainer's ranks. Call this once per process, before sharding.

    Args:
        rank: 0 to ``world_size - 1``, different in each process.
        world_size: number of processes.
        store: store through which the processes find each other; new, and the same for all.
        device: device on which this rank computes. On a CPU the ranks communicate through gloo, on
            CUDA through NCCL (and through gloo for tensors on the CPU).
        timeout_s: how long a rank waits for the others, here and in each collective call, before it
            raises. With tensor parallelism, this holds for calls of all ranks; others have torch's
            own timeout of minutes.
        tensor_parallel_size: number of ranks that compute the same sequences together, each a part
            of every layer.
        replicas: number of sharded copies of the model, each on consecutive ranks.

    Returns:
        a mesh with the dimensions ``"shard"`` and ``"tensor"``, preceded by ``"replicate"`` if
        there are several copies.

    Raises:
        ValueError: ``world_size`` is not a multiple of ``tensor_parallel_size`` or of
            ``replicas``, or both are above 1.
    """
    if replicas > 1 and (world_size % replicas or tensor_parallel_size > 1):
        raise ValueError(
            f"replicas={replicas} must divide world_size={world_size}, without tensor parallelism: "
            "use replicas=1."
        )
    if world_size % tensor_parallel_size:
        raise ValueError(
            f"world_size={world_size} must be a multiple of "
            f"tensor_parallel_size={tensor_parallel_size}: use {tensor_parallel_size} or "
            f"{2 * tensor_parallel_size} ranks."
        )
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _all_ranks.cache_clear()
    if replicas > 1:
        _all_ranks(device.type)
        names = ("replicate", "shard", "tensor")
        return init_device_mesh(
            device.type, (replicas, world_size // replicas, 1), mesh_dim_names=names
        )
    shape = (world_size // tensor_parallel_size, tensor_parallel_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("shard", "tensor"))


@cache
def _all_ranks(device_type: str) -> DeviceMesh:
    """Return a one-dimensional mesh of all ranks of the process group."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def lone_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of a single rank, for a model that is offloaded but not sharded. The process
    must not have another mesh.
    """
    return init_mesh(0, 1, HashStore(), device=device, timeout_s=_LONE_TIMEOUT_S)


def leave_mesh() -> None:
    """Leave the process group, if this process has joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def loading_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which a rank loads a model for ``shard_model``: the CPU on rank 0, and
    the meta device, which takes no memory, on the others. With tensor parallelism all ranks load on
    the CPU.
    """
    needs_weights = dist.get_rank() == 0 or mesh["tensor"].size() > 1
    return torch.device("cpu" if needs_weights else "meta")


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> nn.Module:
    """Shard a model in place over the ranks of a mesh, layer by layer.

    Call this after adding adapters and before making the optimizer. With a mesh of one rank and no
    offload, the model does not change.

    Along the mesh's ``"tensor"`` dimension the linear layers are split by the model's own plan
    (``base_model_tp_plan`` of its config); modules outside of the layers are not split. Those ranks
    must get the same data.

    Args:
        model: a Hugging Face causal LM or a peft model around one, on the CPU or the mesh's device.
            All ranks get rank 0's weights and buffers, tensor by tensor, so the others' may be on
            the meta device (``loading_device``). With tensor parallelism it must be the same on all
            ranks.
        mesh: mesh from ``init_mesh``.
        param_dtype: dtype in which parameters are gathered and used; gradients are summed in
            float32. None for the parameters' own dtype.
        cpu_offload: whether parameters, gradients and optimizer state are kept on the CPU when they
            are not in use. Has no effect if the model computes on the CPU.

    Returns:
        the model.

    Raises:
        ValueError: the model cannot be split along ``"tensor"``: it has adapters, no plan, or heads
            that cannot be divided.
    """
    if mesh.size() == 1 and not cpu_offload:
        return model
    base = base_model_of(model)
    if mesh["tensor"].size() > 1:
        _split_layers(base, mesh["tensor"], adapters=base is not model)
    reduce_dtype = torch.float32 if param_dtype else None
    # A cast of inputs would round the ids in a teacher's states, and copy the layout of a pass for
    # each layer.
    mixed = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    offload = OffloadPolicy()
    if cpu_offload and mesh.device_type != "cpu":
        offload = CPUOffloadPolicy()
        pin_exact_sizes()
    whole = {parameter for _, parameter in vision_parameters(base) if not parameter.requires_grad}
    layers = [
        module
        for module in base.modules()
        if isinstance(module, GradientCheckpointingLayer)
        and not whole.issuperset(module.parameters())
    ]
    # Aliases of the CPU's memory, because fully_shard moves the Parameters themselves to the
    # device.
    filled = mesh["tensor"].size() == 1
    tensors = (
        {name: tensor.detach() for name, tensor in _tensors(model)}
        if filled and dist.get_rank() == 0
        else {}
    )
    copied = "replicate" in (mesh.mesh_dim_names or ())
    over = mesh["replicate", "shard"] if copied else mesh["shard"]
    known = type(base)
    for module in [*layers, base]:
        fully_shard(
            module, mesh=over, mp_policy=mixed, offload_policy=offload, ignored_params=whole
        )
    sum_gradients(model)
    device = torch.device("cpu" if cpu_offload else mesh.device_type)
    # Transformers finds the names of a checkpoint's weights by these, which fully_shard changes.
    type(base).__name__, type(base).__module__ = known.__name__, known.__module__
    for parameter in whole:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    if filled:
        _fill(model, tensors, device, mesh)
    # From rank 0's TokenScorer, because those on the meta device could not check anything
    recurrent = pack_recurrent(base)
    checked = [getattr(base, "unpacked_because", None), all(layer.forks for layer in recurrent)]
    dist.broadcast_object_list(checked, 0, device=torch.device(mesh.device_type))
    base.unpacked_because, forks = checked
    for layer in recurrent:
        layer.forks = bool(forks)
    return model


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 sum gradients over the ranks instead of averaging them, because the trainer
    normalizes the loss over the batch of all ranks.

    Raises:
        ValueError: the model is in a ``DistributedDataParallel``, which always averages.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model=DistributedDataParallel must be the model itself, because the trainer divides "
            "each batch among the ranks: shard it with fully_shard or shard_model, or train the "
            "loss in a loop of your own."
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # The factor alone would need an operation that gloo lacks.
            module.set_force_sum_reduction_for_comms(True)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _fill(
    model: nn.Module, tensors: dict[str, Tensor], device: torch.device, mesh: DeviceMesh
) -> None:
    """Copy rank 0's tensors to all ranks of a sharded model, one at a time, allocating tensors on
    the meta device.
    """
    if any(tensor.is_meta for _, tensor in _tensors(model)):
        places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, []).append((module, name))
        model.to_empty(device=device)
        for (first, named), *tied in places.values():  # tied ones have separate tensors now
            for module, name in tied:
                module.register_parameter(name, getattr(first, named))
    for name, tensor in _tensors(model):
        if tensors:
            whole = tensors.pop(name).to(mesh.device_type).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device_type)
        dist.broadcast(whole, 0)
        if isinstance(tensor, DTensor):
            tensor = (
                tensor.to_local()
            )  # FSDP2 gives the ranks chunks of the first dimension, the last ones none
            shard = mesh["shard"]
            whole = dict(enumerate(whole.chunk(shard.size()))).get(
                shard.get_local_rank(), whole[:0]
            )
        tensor.copy_(whole)


def _split_layers(base: Any, mesh: DeviceMesh, *, adapters: bool) -> None:
    """Split the linear layers over the ranks of a one-dimensional mesh."""
    from transformers.distributed.tensor_parallel import (
        apply_tensor_parallelism,
    )  # as new as this plan's styles

    field = f"tensor_parallel_size={mesh.size()}"
    if adapters:
        raise ValueError(f"{field} must be 1 with LoRA adapters: shard over more ranks instead.")
    # The head, which log-probs read in chunks, is not split, nor is the embedding, which may be
    # tied to it.
    outside = (base.get_input_embeddings(), base.get_output_embeddings())
    whole = {name for name, module in base.named_modules() if module in outside}
    plan = {name: style for name, style in base.tp_plan.items() if name not in whole}
    if not plan:
        raise ValueError(
            f"{field} must be 1 for {type(base).__name__}, which has no plan for splitting its "
            "layers."
        )
    check_heads("tensor_parallel_size", mesh.size(), base.config.get_text_config())
    apply_tensor_parallelism(base, mesh, plan)


def call_gathered(model: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` as if it were the forward of a model that may be sharded, with FSDP2
    by ``shard_model`` or by hand, or be in a ``DistributedDataParallel``.

    The function may use the parameters of the model outside of layers (such as the weight of the LM
    head), and the gradients of its results reach them.

    Args:
        model: the Hugging Face model, or a wrapper around it (peft, ``DistributedDataParallel``).
        function: function that returns tensors.
        args: its arguments, which a cast of the model's inputs does not reach.
    """
    call = partial(function, *args)
    if isinstance(model, DistributedDataParallel):
        return _call_as_forward(model, call)
    root: nn.Module = model if isinstance(model, FSDPModule) else base_model_of(model)
    if not isinstance(root, FSDPModule):
        return call()
    if not hasattr(root, "call_gathered"):
        root.call_gathered = lambda function: function()  # type: ignore[assignment]
        register_fsdp_forward_method(root, "call_gathered")
    out = root.call_gathered(call)  # type: ignore[operator]
    if not torch.is_grad_enabled():
        root.reshard()  # with gradients, backward does it
    return out


def _call_as_forward(model: DistributedDataParallel, call: Callable[[], Any]) -> Any:
    """Call a function in the place of the wrapped model's forward, because gradients are reduced
    only after the wrapper's own.
    """
    whole = model.module
    forward = whole.forward

    def run() -> Any:
        whole.forward = forward
        return call()

    whole.forward = run
    return model()


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the ranks that hold a sharded model and get different data, from its parameters,
    whatever the names of their mesh; None if not sharded.

    In FSDP2's meshes the copies of HSDP come first, and a tensor-parallel dimension comes last.
    """
    part = _first_part(model)
    if part is None:
        return None
    mesh = part.device_mesh
    if _replicates(part):
        return _all_ranks(mesh.device_type)
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[0]]  # type: ignore[index]


def num_replicas(model: nn.Module) -> int:
    """Return the number of sharded copies of a model that its ranks hold."""
    part = _first_part(model)
    return part.device_mesh.size(0) if part is not None and _replicates(part) else 1


def _first_part(model: nn.Module) -> DTensor | None:
    """Return a model's first sharded parameter, before which an image encoder's come; None if not
    sharded.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    return next((p for p in model.parameters() if isinstance(p, DTensor)), None)


def _replicates(part: DTensor) -> bool:
    return part.placements[0].is_replicate()


def is_shared(model: nn.Module) -> bool:
    """Return whether several ranks hold the model together; with a single rank, also if offloaded,
    they do not.
    """
    return mesh_of(model) is not None and dist.get_world_size() > 1


def is_writer(model: nn.Module) -> bool:
    """Return whether this process writes gathered results: it is rank 0 or the only one."""
    return mesh_of(model) is None or dist.get_rank() == 0


def clip_grad_norm(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down to a norm of at most ``max_norm`` over all ranks. Return the
    original norm, scalar.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:  # one operation cannot take tensors of different meshes
        groups.setdefault(
            parameter.device_mesh if isinstance(parameter, DTensor) else None, []
        ).append(parameter)
    norms = []
    for group in groups.values():
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def compute_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes, also if its parameters are offloaded; the CPU if
    it has none.
    """
    parameter = next(model.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    mesh = mesh_of(model)
    if mesh is None or mesh.device_type == parameter.device.type:
        return parameter.device
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@torch.no_grad()
def copy_parts(source: nn.Module, target: nn.Module) -> None:
    """Copy a model's weights to another one of the same shape and sharding, without gathering."""
    of = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(of[name])


def own_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's part of the trained weights and of the optimizer's state, without copies.

    Nothing is gathered. The state of an optimizer that has made no step yet is created, because
    ``load_parts`` needs it.

    Returns:
        the tensors by ``weights/NAME`` and ``moments/KIND/NAME``, sharded ones as DTensors, and the
        optimizer's state without tensors.
    """
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    tensors = {f"{WEIGHTS}{name}": parameter.detach() for name, parameter in parameters.items()}
    if optimizer is None:
        return tensors, {}
    whole: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OWN)
    rest: dict[str, dict[str, Any]] = {name: {} for name in whole["state"]}
    for name, state in whole["state"].items():
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                tensors[f"{_MOMENTS}{kind}/{name}"] = _as_float(value, parameters[name])
            else:
                rest[name][kind] = value
    return tensors, {**whole, "state": rest}


def _as_float(moment: Tensor, parameter: Tensor) -> Tensor:
    """Return a moment as floats that any number of ranks can read. Moments of 8 bits are stored in
    blocks of each rank's part.
    """
    if not hasattr(moment, "codes") and (
        isinstance(moment, DTensor) or not isinstance(parameter, DTensor)
    ):
        return moment
    local = exact_floats(moment) if hasattr(moment, "codes") else moment.float()
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements, stride = parameter.device_mesh, parameter.placements, parameter.stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride
    )


def exact_floats(moment: Any) -> Tensor:
    """Return the floats of torchao's 8-bit moment that give exactly its codes and scales when they
    are quantized again.

    A scale is the largest magnitude in a block. The codes include 1 but not -1, so the lowest code
    counts as -1 here.
    """
    values = moment.qmap.clone()
    if moment.signed:
        values[values.argmin()] = -1.0
    return type(moment)(moment.codes, moment.scale, values, moment.signed).dequantize()


def load_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    rest: Mapping[str, Any],
) -> None:
    """Load an optimizer's state, whose tensors have been read into those from ``own_parts``.

    Args:
        model: the model, which already has its weights.
        optimizer: optimizer of the model.
        tensors: tensors from ``own_parts``.
        rest: the other result of ``own_parts`` when the state was saved.
    """
    state = {name: dict(values) for name, values in rest["state"].items()}
    own: Any = get_optimizer_state_dict(model, optimizer, options=_OWN)["state"]
    for path, tensor in tensors.items():
        if path.startswith(_MOMENTS):
            _, kind, name = path.split("/", 2)
            moment = state[name][kind] = own[name][kind]
            # Does nothing if they are the same tensor; moments of one byte are rounded.
            local_part(moment).copy_(local_part(tensor))
    whole: dict[str, Any] = {**rest, "state": state}
    set_optimizer_state_dict(model, optimizer, whole, options=_OWN)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
