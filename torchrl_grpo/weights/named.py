"""A model's weights by the names of its Hugging Face checkpoint, the updates of LoRA adapters, and
the check that weights fit a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_grpo.weights.receipts import Digests, compare

NamedTensors = Iterable[tuple[str, Tensor]]
CRITIC = "critic"
"""Name of a critic among the modules of its policy, with which it is trained and saved."""
TensorStream = Iterator[tuple[str, Tensor]]
"""Tensors with their names, read once."""


@dataclass(frozen=True)
class LoraDelta:
    """Update of one weight by one adapter: ``scaling * b @ a`` (arXiv 2106.09685).

    Attributes:
        a: [r, in], or [experts, r, in] for the weights of all experts of a layer in one tensor.
        b: [out, r], or [experts, out, r].
        scaling: factor of the product.
    """

    a: Tensor
    b: Tensor
    scaling: float

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return the update in the weight's shape, computed in at least float32 and rounded."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        return (self.b.to(wide) @ self.a.to(wide) * self.scaling).to(dtype)


def is_critic(name: str) -> bool:
    """Return whether a parameter of a policy, with or without adapters, is its critic's."""
    return f".{CRITIC}." in f".{name}"


@torch.no_grad()
def merged(weight: Tensor, deltas: Sequence[LoraDelta]) -> Tensor:
    """Add updates to a weight, in its dtype; without any, return the weight itself."""
    total = sum(delta.tensor(weight.dtype) for delta in deltas)
    return weight + total if deltas else weight


def named_weights(model: nn.Module, dtype: torch.dtype | None = None) -> TensorStream:
    """Yield a causal language model's weights under the names of its Hugging Face checkpoint.

    A LoRA model yields its base model's weights with the active adapters merged in. The merged
    tensors are new ones, made one at a time; so are the dequantized weights of a quantized base. A
    critic (``TokenScorer.add_critic``) is left out. A sharded model
    gathers each weight when the iterator reaches it, so all ranks must exhaust the iterator.

    Args:
        model: a Hugging Face model, or a peft model around one; sharded or not.
        dtype: dtype in which several ranks gather them; None for the weights' own.

    Yields:
        (name, tensor). A parameter that several modules share comes once. The tensors are detached,
        and share the model's memory unless they were merged, gathered or split.

    Raises:
        ValueError: an adapter is not plain LoRA (DoRA, for example) and cannot be merged.
    """
    peft: Any = model
    base = peft.get_base_model() if hasattr(model, "peft_config") else model
    layers = {} if base is model else adapted_layers(base)
    return to_checkpoint(
        base,
        ((name, _full_tensor(weight, dtype)) for name, weight in _merged_weights(base, layers)),
    )


def weights_of(source: Any) -> TensorStream:
    """Return the weights from any source that TorchRL's collectors accept.

    Args:
        source: a model, a module that holds one (``TokenScorer``, a wrapper, a loss),
            ``TensorDict.from_module`` of either, a state dict, or pairs of name and tensor.

    Raises:
        TypeError: there are no weights.
    """
    from transformers import PreTrainedModel

    if isinstance(source, nn.Module):
        models = (
            module
            for module in source.modules()
            if isinstance(module, PreTrainedModel) or hasattr(module, "peft_config")
        )
        return named_weights(next(models, source))
    if isinstance(source, TensorDictBase | Mapping):
        source = TensorDict(source)
        source = source.get("actor_network", source)  # a loss has buffers beside it
        while len(nested := [v for v in source.values() if isinstance(v, TensorDictBase)]) == 1:
            source = nested[0]
        source = list(source.flatten_keys(".").items())
    if source is None or source == []:
        raise TypeError(
            "update_policy_weights_() needs the weights, because the engine has its own copy and "
            "no access to the trainer: use update_policy_weights_(model), or once "
            "register_model(model) of the GenerationPolicy, scheme or sender."
        )
    return iter(source)


def named_adapters(model: nn.Module) -> Iterator[tuple[str, LoraDelta]]:
    """Yield the updates that a LoRA model's active adapters add to its base model's parameters.

    Args:
        model: a peft model; sharded or not. All ranks must exhaust the iterator of a sharded one,
            which gathers each matrix.

    Yields:
        (parameter name in the base model, update), for each adapter of each layer.

    Raises:
        ValueError: an adapter is not plain LoRA, or is merged into the base weight.
    """
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    for name, layer in adapted_layers(base).items():
        if layer.merged:
            raise ValueError(
                f"{name}: its adapters are merged into the weight and cannot be sent separately: "
                "unmerge them."
            )
        for delta in _deltas(name, layer):
            yield name, LoraDelta(_full_tensor(delta.a), _full_tensor(delta.b), delta.scaling)


def named_adapter_weights(model: nn.Module) -> TensorStream:
    """Return the parameters of a LoRA model's adapters under their names in the model. All ranks of
    a sharded model must exhaust the iterator.
    """
    return (
        (name, _full_tensor(weight).detach())
        for name, weight in model.named_parameters()
        if ".lora_" in name
    )


def expected_weights(model: nn.Module) -> tuple[dict[str, torch.Size], set[str]]:
    """Return the shapes of a model's checkpoint by name, and the names of weights that may be
    absent: those tied to another weight, and buffers.
    """

    def shapes(remove_duplicate: bool) -> dict[str, torch.Size]:
        parameters = model.named_parameters(remove_duplicate=remove_duplicate)
        on_meta = ((name, parameter.detach().to("meta")) for name, parameter in parameters)
        return {name: weight.shape for name, weight in to_checkpoint(model, on_meta)}

    all_shapes = shapes(remove_duplicate=False)
    buffers = {name for name, _ in model.named_buffers()}
    return all_shapes, (all_shapes.keys() - shapes(remove_duplicate=True).keys()) | buffers


def to_checkpoint(model: nn.Module, weights: NamedTensors) -> TensorStream:
    """Convert a model's parameters to the names and shapes in its checkpoint, which vLLM reads.

    Most models need no conversion. Since transformers 5, some do: Mixtral has the weights of all
    experts of a layer in one parameter, while its checkpoints have one weight per expert.
    """
    return _convert(model, weights, reverse=True)


def from_checkpoint(model: nn.Module, weights: NamedTensors) -> TensorStream:
    """Undo ``to_checkpoint``. The weights of all experts of a layer must be present."""
    from transformers.core_model_loading import dot_natural_key

    return _convert(
        model, sorted(weights, key=lambda item: dot_natural_key(item[0])), reverse=False
    )


def _convert(model: nn.Module, weights: NamedTensors, *, reverse: bool) -> TensorStream:
    """Apply the rules of ``from_pretrained`` and ``save_pretrained`` for a model's checkpoints.

    transformers applies them to a whole state dict. Here weights come one at a time, and most do
    not have to wait for other ones.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, rename_source_key

    rules: list[Any] = []
    if isinstance(model, PreTrainedModel):
        rules = get_model_conversion_mapping(model, add_legacy=False)
    # Some checkpoints of a model have a prefix; ``save_pretrained`` writes none.
    rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    if reverse:
        rules = [rule.reverse_transform() for rule in reversed(rules)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    waiting: dict[str, Any] = {}

    def converted(name: str) -> TensorStream:
        tensors = waiting.pop(name).convert(name, model=model, config=model.config)
        for target, value in tensors.items():
            yield target, value[0] if isinstance(value, list) else value

    for name, weight in weights:
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=reverse)
        if pattern is None:
            yield renamed, weight
            continue
        rule = waiting.setdefault(renamed, deepcopy(converter_of[pattern]))
        rule.add_tensor(renamed, name, pattern, weight)
        if reverse and len(rule.source_patterns) == 1:
            yield from converted(renamed)
    for name in list(waiting):
        yield from converted(name)


def _full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gather a sharded tensor. Parts on the CPU are first copied to the ranks' devices and
    converted there, because gathering on the CPU would go through gloo.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.size() > 1:
        shape, stride = tensor.shape, tensor.stride()
        part = tensor.to_local().to(mesh.device_type, non_blocking=True).to(dtype or tensor.dtype)
        tensor = DTensor.from_local(
            part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride
        )
    return tensor.full_tensor()


def _dense(weight: Any) -> Tensor:
    """Return a parameter's values, dequantized if its layer is quantized."""
    dense: Tensor = getattr(weight, "dequantized", weight.detach)()
    return dense


def _merged_weights(base: nn.Module, layers: dict[str, Any]) -> TensorStream:
    """Yield a model's parameters with its adapters merged in. Sharded parameters are merged part by
    part, without gathering.
    """
    for name, weight in base.named_parameters():
        if is_critic(name):
            continue
        if not layers:
            yield name, _dense(weight)
        elif ".lora_" not in name:
            name = name.replace(".base_layer", "")
            layer = layers.get(name)
            deltas = [] if layer is None or layer.merged else _deltas(name, layer)
            yield name, merged(_dense(weight), deltas)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return a peft model's layers with adapters, by the adapted parameter's name in its base
    model.
    """
    from peft.tuners.lora import LoraLayer

    return {
        f"{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', 'weight')}": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def _deltas(name: str, layer: Any) -> list[LoraDelta]:
    """Return the update of a parameter by each active adapter."""
    deltas = []
    for adapter in layer.active_adapters:
        if getattr(layer, "num_experts", 1) > 1:
            b, a, _ = layer.get_delta_factors(adapter)
            transposed, plain = False, True
        elif adapter in layer.lora_A:
            module = layer.lora_A[adapter]
            a, b = module.weight, layer.lora_B[adapter].weight
            transposed, plain = layer.fan_in_fan_out, isinstance(module, nn.Linear)
        elif adapter in layer.lora_embedding_A:
            a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
            transposed, plain = True, True
        else:
            continue
        if adapter in layer.lora_variant or not plain:
            kind = layer.lora_variant.get(adapter, layer)
            raise ValueError(
                f"{name}: only plain LoRA can be sent to an engine, but adapter {adapter!r} is a "
                f"{type(kind).__name__}: train without it."
            )
        a, b = a.detach(), b.detach()
        if transposed:
            a, b = b.T, a.T
        # Contiguous, as readers receive them, so that their products are equal to the last bit.
        deltas.append(LoraDelta(a.contiguous(), b.contiguous(), layer.scaling[adapter]))
    return deltas


def check_weights(
    layout: Iterable[tuple[str, Sequence[int]]],
    expected: Mapping[str, Sequence[int]],
    model: str,
    optional: Collection[str] = (),
) -> None:
    """Check that a model has these weights, each exactly once.

    Args:
        layout: name and shape of each weight.
        expected: shapes of the model's weights by name.
        model: name of the model in the message.
        optional: names that may be missing: a tied head shares another weight's memory.

    Raises:
        RuntimeError: names are unknown, missing or repeated, or shapes differ; the message lists
            all problems.
    """
    weights = [(name, tuple(shape)) for name, shape in layout]
    counts = Counter(name for name, _ in weights)
    problems = {
        "unknown": [name for name in counts if name not in expected],
        "missing": [name for name in expected if name not in counts and name not in optional],
        "sent twice": [name for name, count in counts.items() if count > 1],
        "of another shape": [
            f"{name} {shape} instead of {tuple(expected[name])}"
            for name, shape in weights
            if name in expected and shape != tuple(expected[name])
        ],
    }
    messages = [
        f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in problems.items() if names
    ]
    if messages:
        raise RuntimeError(
            f"the weights must be the {len(expected.keys() - optional)} of {model}, with the names "
            f"of its Hugging Face checkpoint, but got {'; '.join(messages)}: send the weights of "
            "the same model. No weight was changed."
        )


@torch.no_grad()
def load_weights(model: nn.Module, weights: NamedTensors) -> Digests:
    """Copy weights into a model if all are present and fit. Return digests of its parameters.

    Raises:
        RuntimeError: see ``check_weights``; the model is unchanged.
        ReceiptError: the model's parameters differ from these weights afterwards.
    """
    expected, optional = expected_weights(model)
    receipt = getattr(weights, "receipt", None) or {}
    weights = [entry for entry in weights if entry[0] in expected or entry[0] not in optional]
    layout = [(name, weight.shape) for name, weight in weights]
    check_weights(layout, expected, type(model).__name__, optional)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in from_checkpoint(model, weights):
        parameters[name].copy_(weight)
    sent, own, converted = dict(weights), Digests(), Digests()
    for name, parameter in to_checkpoint(model, model.named_parameters()):
        own.add(name, parameter)
        if name in sent and (name not in receipt or sent[name].dtype != parameter.dtype):
            converted.add(name, sent[name].to(parameter.dtype))
    received = own.receipt()
    receipt = {**receipt, **converted.receipt()}
    own.seconds += converted.seconds
    compare(
        {name: receipt[name] for name in received if name in sent},
        received,
        type(model).__name__,
    )
    return own
