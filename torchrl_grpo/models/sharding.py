"""Sharding a model over processes with FSDP2: each rank holds a part of every parameter, and of the
optimizer's state.

Optionally, groups of ranks also compute each layer together (tensor parallelism), by the plan in
the model's config, or several groups hold a sharded copy each (HSDP): then layers are gathered
within a group, and gradients summed over all.

A rank of a group calls ``init_mesh`` once, loads the whole model on its ``loading_device`` (which
takes memory on rank 0 alone, where that will do), and gives both to ``shard_model``. Afterwards the
parameters are DTensors. Layers are gathered when they run, and what belongs to no layer (embedding,
last norm, LM head) when ``call_gathered`` runs a function of the model. Gradients are summed over
the ranks, not averaged.

Everything here that gathers is collective: all ranks must call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
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
from transformers.modeling_layers import GradientCheckpointingLayer

from torchrl_grpo.checks import check_heads
from torchrl_grpo.compat.torch import pin_exact_sizes
from torchrl_grpo.models.loading import base_model_of

WEIGHTS = "weights/"
"""Prefix of the names of weights in ``own_parts``."""
_OWN = StateDictOptions(ignore_frozen_params=True)
_LONE_TIMEOUT_S = 60.0
"""Timeout of a rank that waits for nobody."""


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
    """Join the process group of the trainer's ranks; call it once in each process, before sharding.

    Args:
        rank: 0 to ``world_size - 1``, another one in each process.
        world_size: number of processes.
        store: where they find each other; the same one in each process, and new.
        device: what this rank computes on. On a CPU the ranks talk through gloo, on CUDA through
            NCCL (and through gloo about what lies on the CPU).
        timeout_s: how long a rank waits for the others, here and in each collective call, before it
            raises; with tensor parallelism, in those of all ranks (the others have torch's own
            bound, of minutes).
        tensor_parallel_size: ranks that compute the same sequences together, each a part of every
            layer.
        replicas: sharded copies of the model, each on ranks that follow each other.

    Returns:
        a mesh of two dimensions, ``"shard"`` and ``"tensor"``, before which ``"replicate"`` comes
        with several copies.

    Raises:
        ValueError: ``world_size`` is no multiple of ``tensor_parallel_size``, or not of
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
    """A mesh of one dimension, of all ranks of the process group."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def lone_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of a single rank, for a model that is offloaded and not shared. It is this
    process' only mesh.
    """
    return init_mesh(0, 1, HashStore(), device=device, timeout_s=_LONE_TIMEOUT_S)


def leave_mesh() -> None:
    """Leaves the process group, if this process joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def loading_device(mesh: DeviceMesh) -> torch.device:
    """Device on which a rank loads a model for ``shard_model``: the CPU on rank 0, the meta device,
    without memory, on the others. With tensor parallelism all ranks load on the CPU.
    """
    whole = dist.get_rank() == 0 or mesh["tensor"].size() > 1
    return torch.device("cpu" if whole else "meta")


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> nn.Module:
    """Shards a model in place over the ranks of a mesh, its layers one by one.

    Call it after adapters were added and before the optimizer is made. With a mesh of one rank and
    no offload the model stays as it is.

    Along the mesh's ``"tensor"`` dimension the linear layers are split as the model's own plan says
    (``base_model_tp_plan`` of its config); what is outside of the layers is not. Those ranks must
    see the same data.

    Args:
        model: a Hugging Face causal LM or a peft model around one, on the CPU or the mesh's device.
            All ranks get rank 0's weights and buffers, tensor by tensor, so the others' may be on
            the meta device (``loading_device``). With tensor parallelism it must be the same on all
            ranks.
        mesh: as ``init_mesh`` gives it.
        param_dtype: dtype in which parameters are gathered, which is then the one to compute in;
            gradients are summed in float32. None is the parameters' own.
        cpu_offload: whether parameters, gradients and optimizer state rest on the CPU when they are
            not used. On a CPU that is where they are anyway.

    Returns:
        the model.

    Raises:
        ValueError: the model cannot be split along ``"tensor"``: it has adapters, no plan, or heads
            that do not divide.
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
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    # Aliases of the CPU's memory: fully_shard moves the Parameters themselves to the device, each
    # until its last user is gone.
    filled = mesh["tensor"].size() == 1
    tensors = (
        {name: tensor.detach() for name, tensor in _tensors(model)}
        if filled and dist.get_rank() == 0
        else {}
    )
    over = mesh["replicate", "shard"] if _replicates(mesh) else mesh["shard"]
    for module in [*layers, base]:
        sharded = fully_shard(module, mesh=over, mp_policy=mixed, offload_policy=offload)
        sharded.set_gradient_divide_factor(
            1.0
        )  # a sum: the loss is normalized over the batch of all ranks
        sharded.set_force_sum_reduction_for_comms(
            True
        )  # the factor alone would ask for an operation gloo lacks
    base.call_gathered = lambda function, *args: function(*args)
    register_fsdp_forward_method(base, "call_gathered")
    if filled:
        _fill(model, tensors, torch.device("cpu" if cpu_offload else mesh.device_type), mesh)
    checked = [
        getattr(base, "unpacked_because", None)
    ]  # by rank 0's TokenScorer: on the meta device it saw nothing
    dist.broadcast_object_list(checked, 0, device=torch.device(mesh.device_type))
    base.unpacked_because = checked[0]
    return model


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, tied ones once."""
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
        for (first, named), *tied in places.values():  # each had a tensor of its own since
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
    """Splits the linear layers over the ranks of a mesh of one dimension."""
    from transformers.distributed.tensor_parallel import (
        apply_tensor_parallelism,
    )  # as young as this plan's styles

    field = f"tensor_parallel_size={mesh.size()}"
    if adapters:
        raise ValueError(f"{field} must be 1 with LoRA adapters: shard over more ranks instead.")
    # The head stays whole, and so does the embedding that may be tied to it: log-probs are taken
    # from it in chunks.
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


def call_gathered(base: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(*args)`` as if it were the forward of a model that may be sharded.

    The function may use the parameters of the model that are in no layer (the weight of the LM
    head), and the gradients of what it returns reach them.

    Args:
        base: the Hugging Face model, without peft's wrapper.
        function: returns tensors.
        args: tensors.
    """
    if not isinstance(base, FSDPModule):
        return function(*args)
    method: Any = base.call_gathered
    out = method(function, *args)
    if not torch.is_grad_enabled():
        base.reshard()  # otherwise backward does it
    return out


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The ranks that hold a sharded model and see different data, or None."""
    parameter = next(model.parameters())
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    return _all_ranks(mesh.device_type) if _replicates(mesh) else mesh["shard"]


def num_replicas(model: nn.Module) -> int:
    """How many sharded copies of a model its ranks hold."""
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    return mesh["replicate"].size() if mesh is not None and _replicates(mesh) else 1


def _replicates(mesh: DeviceMesh) -> bool:
    return "replicate" in (mesh.mesh_dim_names or ())


def is_shared(model: nn.Module) -> bool:
    """Whether several ranks hold the model together; a single rank with offload holds all of it."""
    return mesh_of(model) is not None and dist.get_world_size() > 1


def is_writer(model: nn.Module) -> bool:
    """Whether this process writes gathered results: the only one, or rank 0."""
    return mesh_of(model) is None or dist.get_rank() == 0


def clip_grad_norm(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down to a norm of at most ``max_norm`` over all ranks; return the norm
    before, scalar.
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
    """Device on which a model computes; with CPU offload its parameters are elsewhere."""
    parameter, mesh = next(model.parameters()), mesh_of(model)
    if mesh is None or mesh.device_type == parameter.device.type:
        return parameter.device
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@torch.no_grad()
def copy_parts(source: nn.Module, target: nn.Module) -> None:
    """Gives a model the weights of another one of the same shape and sharding; nothing is gathered."""
    of = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(of[name])


def own_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's part of the trained weights and of the optimizer's state, in the memory
    where they are.

    Nothing is gathered. An optimizer that made no step yet gets its state, as ``load_parts`` needs
    it.

    Returns:
        the tensors by ``weights/NAME`` and ``moments/KIND/NAME``, sharded ones as DTensors, and the
        optimizer's state without them.
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
                tensors[f"moments/{kind}/{name}"] = _as_float(value, parameters[name])
            else:
                rest[name][kind] = value
    return tensors, {**whole, "state": rest}


def _as_float(moment: Tensor, parameter: Tensor) -> Tensor:
    """A moment in numbers that any number of ranks can read: in 8 bits they stand in blocks of each
    rank's part.
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
    """The numbers of torchao's 8-bit moment, which give just its codes and scales when they are
    quantized again.

    A scale is the largest magnitude in a block, and the codes have 1 but not -1: so the lowest one
    counts as -1 here.
    """
    values = moment.qmap.clone()
    if moment.signed:
        values[values.argmin()] = -1.0
    floats: Tensor = type(moment)(moment.codes, moment.scale, values, moment.signed).dequantize()
    return floats


def load_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    rest: Mapping[str, Any],
) -> None:
    """Gives the optimizer a state whose tensors were read into those that ``own_parts`` gave.

    Args:
        model: whose weights have their values already.
        optimizer: of the model.
        tensors: of ``own_parts``.
        rest: what ``own_parts`` gave beside them where the state was saved.
    """
    state = {name: dict(values) for name, values in rest["state"].items()}
    own: Any = get_optimizer_state_dict(model, optimizer, options=_OWN)["state"]
    for path, tensor in tensors.items():
        if not path.startswith(WEIGHTS):
            _, kind, name = path.split("/", 2)
            moment = state[name][kind] = own[name][kind]
            # Nothing is done where they are the same tensor; moments of one byte are rounded.
            _local(moment).copy_(_local(tensor))
    whole: dict[str, Any] = {**rest, "state": state}
    set_optimizer_state_dict(model, optimizer, whole, options=_OWN)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
