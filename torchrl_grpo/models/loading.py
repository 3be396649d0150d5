"""Loading Hugging Face models and tokenizers, with checks before and settings afterwards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrl import torchrl_logger
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from torchrl_grpo.chat.template import render_chat
from torchrl_grpo.checks import STARTERS, adapter_settings, check_argument
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.images.families import FAMILIES, family_of, vision_parameters
from torchrl_grpo.models.memory import Shape, shape_of_config, vision_shape
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights.named import named_adapter_weights

# On some CPUs bitsandbytes, which peft imports, looks for a kernel on the hub that no model here needs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

STARTER = "starter"
"""Name of the model that the package includes."""

_PICKLES = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"]

FALLBACK_CHAT_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ m['content'] }}\n\n{% endif %}"
    "{% endfor %}"
)
"""Template for base models that have none: the text of the messages, without role names."""


def base_model_of(model: Any) -> Any:
    """Return the Hugging Face model itself, without the wrappers of peft and DDP."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def resolve_name(name: str) -> str:
    """Return the folder or hub name for ``from_pretrained`` from ``model.name``. For
    ``name@revision``, return the folder in the local cache, so that trainer, tokenizer and engine
    read the same files.
    """
    hub_name, _, revision = name.partition("@")
    if revision and not Path(name).exists():
        return snapshot_download(hub_name, revision=revision, ignore_patterns=_PICKLES)
    return str(starter_path(name)) if name in STARTERS else name


_ARGUMENTS = ("disable_mmap", "experts_implementation", "key_mapping", "variant")
_ARGUMENTS_SET_BY = {
    "attn_implementation": "model.attn_implementation",
    "dtype": "train_model.dtype",
    "revision": "model.revision",
    "torch_dtype": "train_model.dtype",
    "trust_remote_code": "model.trust_remote_code",
}


def check_model_kwargs(arguments: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Refuse arguments of ``from_pretrained`` that a user must not set.

    Args:
        arguments: arguments by name.
        config: config of the model, all of whose fields may be set.

    Raises:
        ValueError: an argument is refused.
    """
    names = sorted({*_ARGUMENTS, *config.to_dict()} - {"quantization_config"})
    what = f"a field of the model's config.json or one of {', '.join(_ARGUMENTS)}"
    for name, value in arguments.items():
        field = f"train_model.model_kwargs.{name}={value}"
        check_argument(field, name, names, _ARGUMENTS_SET_BY, what)


def load_config(
    name: str, *, trust_remote_code: bool = False, arguments: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """Load only the architecture, without weights.

    Args:
        name: folder or hub name.
        trust_remote_code: whether the repository's own code may run.
        arguments: arguments of ``from_pretrained``; fields of the config override it.

    Raises:
        ValueError: there is no such model, it cannot be reached, or it is not a causal language
            model.
    """
    load_extra("check_model_name")(name)
    try:
        config, _ = AutoConfig.from_pretrained(
            resolve_name(name),
            trust_remote_code=trust_remote_code,
            return_unused_kwargs=True,
            **(arguments or {}),
        )
    except (OSError, ValueError) as error:
        raise ValueError(load_extra("explain_model_error")(name, "config", error)) from error
    auto_map = getattr(config, "auto_map", None) or {}
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or family_of(config) is not None
    if not is_known and "AutoModelForCausalLM" not in auto_map:
        raise ValueError(
            f"model.name={name} must be a causal language model, but AutoModelForCausalLM has none "
            f"of the type {config.model_type}: use a text-only model, or a vision-language model "
            f"of the type {', '.join(FAMILIES)}."
        )
    return config


def _auto_class(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM if family_of(config) is None else AutoModelForImageTextToText


def load_image_encoder(
    name: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ImageEncoder:
    """Load the image processor of a vision-language model.

    Raises:
        ValueError: the model reads no images, or has no processor.
    """
    if family_of(config) is None:
        raise ValueError(
            f"model.name={name} must be a vision-language model of the type {', '.join(FAMILIES)} "
            f"for problems with images (env.columns.images), but it is of the type "
            f"{config.model_type}: use one of these, such as Qwen/Qwen2.5-VL-3B-Instruct."
        )
    return ImageEncoder.load(resolve_name(name), config, tokenizer)


def load_tokenizer(
    name: str, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a chat template and a pad token.

    Without a pad token, the end-of-sequence token is used: padding is masked everywhere, so its id
    has no effect. Without a chat template, the plain text of the messages is used. Each is logged
    in one line.

    Args:
        name: folder or hub name.
        chat_template: a Jinja template, or the path of one, to use instead of the tokenizer's own.
        trust_remote_code: whether the repository's own code may run.

    Raises:
        ValueError: the tokenizer cannot be loaded, or has no end-of-sequence token.
    """
    try:
        # If mistral_common is installed (vLLM depends on it), Mistral's models would get its
        # tokenizer by default, which accepts no chat template and lacks the attributes read here.
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_name(name), trust_remote_code=trust_remote_code, mistral_format=False
        )
    except (OSError, ValueError) as error:
        raise ValueError(load_extra("explain_model_error")(name, "tokenizer", error)) from error
    return prepare_tokenizer(tokenizer, name, chat_template)


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, name: str, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Add a missing pad token and chat template as ``load_tokenizer`` does."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.name={name} must have a tokenizer with an end-of-sequence token, but eos_token "
            "is None: responses could never end; set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        torchrl_logger.info(
            f"The tokenizer of {name} has no pad token: using {tokenizer.eos_token!r}, masked."
        )
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = FALLBACK_CHAT_TEMPLATE
        torchrl_logger.warning(
            f"The tokenizer of {name} has no chat template: prompts are the plain text of the "
            "messages. Set model.chat_template to a Jinja template to change this."
        )
    return tokenizer


def _template_text(template: str) -> str:
    """Return a Jinja template, read from a file if the text is the path of one."""
    if "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"model.chat_template={template} must be a Jinja template or the path of one "
            f"({error}): use a path that exists, or leave it out for the tokenizer's own."
        ) from error


def check_vocabulary(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Refuse a model without an embedding for a token in use.

    The tokens in use are the tokenizer's own vocabulary and the added tokens that occur in a chat.
    Other added tokens do no harm: Gemma 3's tokenizer has one for images that the text-only models
    lack.
    """
    size, added = config.get_text_config().vocab_size, tokenizer.get_added_vocab()
    used = {token_id for token, token_id in tokenizer.get_vocab().items() if token not in added}
    used.update({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id} - {None})
    used.update(tokenizer(_chat_text(tokenizer), add_special_tokens=False)["input_ids"])
    if max(used) >= size:
        raise ValueError(
            f"model.name={name} must have an embedding for each token, but the model has {size} "
            f"and the tokenizer uses ids up to {max(used)}: use the tokenizer the model was "
            "trained with, or resize the model's embeddings (resize_token_embeddings) and save it "
            "again."
        )


_MARKER = "0"


def _chat_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short chat rendered by the template; both turns are ``_MARKER``."""
    chat = [{"role": role, "content": _MARKER} for role in ("user", "assistant")]
    return render_chat(tokenizer, chat)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> tuple[int, ...]:
    """Return the tokens that end a response: the end-of-sequence token, those of the model's
    generation config, and the end of an assistant's turn in the chat template.
    """
    ids = {tokenizer.eos_token_id}
    configured = getattr(generation_config, "eos_token_id", None)
    if configured is not None:
        ids.update(configured if isinstance(configured, list) else [configured])
    text = _chat_text(tokenizer)
    if _MARKER not in text:  # the template leaves the assistant's text out
        return tuple(sorted(ids))
    after = tokenizer(text[text.rindex(_MARKER) + len(_MARKER) :], add_special_tokens=False)[
        "input_ids"
    ]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids.update([token for token in after if token in special][:1])
    return tuple(sorted(ids))


def load_generation_config(name: str) -> GenerationConfig | None:
    """Return the model's generation config; None without one."""
    try:
        return GenerationConfig.from_pretrained(resolve_name(name))
    except OSError:
        return None


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    arguments: Mapping[str, Any] | None = None,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Load a causal LM in eval mode (dropout off) on a device; on the meta device, without weights.

    Args:
        name: folder or hub name.
        dtype: dtype of the weights.
        device: device of the model.
        attn_implementation: attention, by Transformers' name, or ``FA3`` or ``FA4``.
        trust_remote_code: whether the repository's own code may run.
        arguments: further arguments of ``from_pretrained``.
        quantization: ``nf4`` quantizes the ``inner_linears``, each as it moves to the device; None
            leaves them as they are.

    Raises:
        ValueError: the weights cannot be loaded, are incomplete, or are not finite.
    """
    arguments = arguments or {}
    config = load_config(name, trust_remote_code=trust_remote_code, arguments=arguments)
    if device.type == "meta":
        options = {
            key: value for key, value in arguments.items() if key == "experts_implementation"
        }
        return _shapes(
            config, attn_implementation, trust_remote_code, dtype=dtype, **options
        ).eval()
    try:
        model, info = _auto_class(config).from_pretrained(
            resolve_name(name),
            dtype=dtype,
            attn_implementation=_activate(attn_implementation),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # the other format is pickled
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **arguments,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(load_extra("explain_model_error")(name, "weights", error)) from error
    model = model.to("cpu" if quantization else device).eval()
    if family_of(config) is not None:
        # transformers reads the first, and some other programs that load an export the second.
        model.config.text_config.tie_word_embeddings = model.config.tie_word_embeddings
    parameters = dict(model.named_parameters())
    # A sum needs no memory, and is not finite if a weight is not.
    sums = torch.stack(
        [parameter.detach().sum(dtype=torch.float32) for parameter in parameters.values()]
    )
    wrong = {
        "not in its files": info["missing_keys"] & parameters.keys(),
        "of a different shape there": {key for key, *_ in info["mismatched_keys"]},
        "not finite": {
            key for key, ok in zip(parameters, sums.isfinite().tolist(), strict=True) if not ok
        },
        "not those that tie_word_embeddings=true names": (untied := _untied(model)),
    }
    problems = [
        f"{len(keys)} are {what} ({', '.join(sorted(keys)[:3])})"
        for what, keys in wrong.items()
        if keys
    ]
    if problems:
        raise ValueError(
            f"model.name={name} must have the {len(parameters)} weights of {type(model).__name__}, "
            f"but {'; '.join(problems)}: "
            f"{'set tie_word_embeddings=false in its config.json' if untied else 'download'}, or "
            "save the model again."
        )
    if quantization:
        make = load_extra("quantized_linear")
        for module_name, linear in inner_linears(model).items():
            model.set_submodule(module_name, make(linear, device))
        model.to(device)
    return model


def inner_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return a model's linear layers by name, except LM head, image encoder and adapters."""
    head, vision = model.get_output_embeddings(), {p for _, p in vision_parameters(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not (module is head or module.weight in vision or ".lora_" in name)
    }


def _untied(model: PreTrainedModel) -> set[str]:
    """Return the weights that the config ties to others, but that have values of their own."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {a for a, b in tied.items() if parameters.get(a) is not parameters.get(b)}


def shape_of(model: Any) -> Shape:
    """Return the shape of a causal LM, counting its parameters and linear layers. The model may be
    sharded or have adapters.
    """
    base = base_model_of(model)
    shape = shape_of_config(base.config.get_text_config())
    linears = inner_linears(base).values()
    linear = sum(module.in_features * module.out_features for module in linears)
    count = sum(parameter.numel() for parameter in model.parameters())
    count += linear - sum(module.weight.numel() for module in linears)  # those in 4 bits are packed
    adapters = getattr(model, "peft_config", None)
    if adapters:
        trained = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        adapted = trained // adapters["default"].r
        count -= trained
    else:
        adapted = sum(module.in_features + module.out_features for module in linears)
    vision = _vision_shape(base)
    count -= 0 if vision is None else int(vision.parameters)
    active = count - (shape.parameters - shape.active)
    shape = replace(shape, parameters=count, active=active, adapted=adapted, linear=linear)
    return shape.with_vision(vision, *_patches(base.config))


def _vision_shape(base: Any) -> Shape | None:
    """Return the shape of a model's image encoder and projector; None without them."""
    count = sum(parameter.numel() for _, parameter in vision_parameters(base))
    if not count:
        return None
    config = base.config.vision_config
    layers = getattr(config, "depth", None) or config.num_hidden_layers
    is_gated = config.hidden_act == "silu"
    return vision_shape(
        count, layers, config.hidden_size, config.intermediate_size, is_gated=is_gated
    )


def _patches(config: Any) -> tuple[int, int]:
    """Return the number of patches in a token of an image, and of levels of deep features."""
    vision = getattr(config, "vision_config", None)
    if vision is not None and (count := getattr(config, "mm_tokens_per_image", None)):
        return (vision.image_size // vision.patch_size) ** 2 // count, 0
    side = getattr(config, "scale_factor", getattr(vision, "spatial_merge_size", 1))
    return int(side) ** 2, len(getattr(vision, "deepstack_visual_indexes", ()))


def config_shape(config: PretrainedConfig, *args: Any, **options: Any) -> Shape:
    """Return the shape of a config's causal LM, counted without allocating it; see ``on_meta``."""
    return shape_of(on_meta(config, *args, **options))


def on_meta(
    config: PretrainedConfig,
    attn_implementation: str = "sdpa",
    *,
    trust_remote_code: bool = False,
    **lora: Any,
) -> nn.Module:
    """Return a config's causal LM without allocating its weights.

    Args:
        config: of the model.
        attn_implementation: attention, by Transformers' name, or ``FA3`` or ``FA4``.
        trust_remote_code: whether the repository's own code may run.
        **lora: arguments of ``add_lora``, for a model with adapters.

    Raises:
        ValueError: the attention is not available here, or ``add_lora`` refuses the model.
    """
    model = _shapes(config, attn_implementation, trust_remote_code)
    return add_lora(model, **lora) if lora else model


def _activate(attn_implementation: str) -> str:
    """Return Transformers' name of an attention. ``FA3`` and ``FA4`` are ``sdpa`` with the kernels
    that PyTorch then uses for all flash attention in this process.
    """
    majors = {"FA3": (9,), "FA4": (9, 10)}.get(attn_implementation)
    if majors is None:
        return attn_implementation
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in majors:
        raise ValueError(f"the GPU must have compute capability {majors[0]}.0 to {majors[-1]}.x")
    from torch.nn.attention import activate_flash_attention_impl  # older PyTorch has none

    activate_flash_attention_impl(attn_implementation)
    return "sdpa"


def _shapes(
    config: PretrainedConfig, attn_implementation: str, trust_remote_code: bool, **options: Any
) -> PreTrainedModel:
    """Return a config's causal LM on the meta device."""
    try:
        attention = _activate(attn_implementation)
        with torch.device("meta"):
            return _auto_class(config).from_config(
                config,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                **options,
            )
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"model.attn_implementation={attn_implementation} must be an attention that the model "
            f"and this machine support ({str(error).partition(chr(10))[0]}): use sdpa or eager."
        ) from error


def add_lora(
    model: PreTrainedModel,
    *,
    r: int = 16,
    alpha: int = 32,
    target_modules: str | list[str] = "all-linear",
    path: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Wrap a model with LoRA adapters (arXiv 2106.09685) through peft. Only the adapters are
    trained, without dropout. The image encoder of a vision-language model gets none.

    Args:
        model: the base model.
        r: rank.
        alpha: the adapters' output is scaled by ``alpha / r``.
        target_modules: names of the modules that get adapters.
        path: folder of existing adapters in peft's format, whose settings replace the others.
        settings: arguments of peft's ``LoraConfig`` that replace rank, alpha and modules.

    Raises:
        ValueError: the model has no such modules, ``check_adapters`` refuses one, or the existing
            adapters are of another model.
    """
    from peft import LoraConfig, get_peft_model  # slow to import, and only LoRA runs need it

    if path is not None:
        settings = adapter_settings(path)
    settings = settings or {"r": r, "lora_alpha": alpha, "target_modules": target_modules}
    try:
        config = LoraConfig(
            **settings, exclude_modules=_vision_modules(model), task_type="CAUSAL_LM"
        )
        adapted = get_peft_model(model, config).eval()
        check_adapters(adapted)
        if path is not None:
            _load_adapters(adapted, Path(path))
    except (ValueError, TypeError) as error:
        if path is not None:
            raise ValueError(
                f"train_model.lora.path={path} must have plain LoRA adapters of model.name, but "
                f"{error}: use the model that they were trained with."
            ) from error
        others = (
            "[q_proj,k_proj,v_proj,o_proj]" if target_modules == "all-linear" else "[all-linear]"
        )
        raise ValueError(
            f"train_model.lora.target_modules={target_modules} must name modules of the model that "
            f"can have adapters ({error}): use {others}, or train_model.lora.enabled=false."
        ) from error
    for module in adapted.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = _OutsideAutocast()
    return adapted


@torch.no_grad()
def _load_adapters(model: nn.Module, folder: Path) -> None:
    """Copy saved adapters into a peft model; on the meta device, only compare names and shapes."""
    saved = {}
    with suppress(OSError, SafetensorError):
        saved = load_file(folder / "adapter_model.safetensors")
    own = {name.replace(".default", ""): w for name, w in named_adapter_weights(model)}
    wrong = [
        name
        for name in {**own, **saved}
        if name not in own
        or name not in saved
        or own[name].shape != saved[name].shape
        or not saved[name].isfinite().all()
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors are missing, unknown, not finite or of another shape in "
            f"adapter_model.safetensors ({', '.join(wrong[:3])})"
        )
    for name, weight in own.items():
        weight.copy_(saved[name])


class _OutsideAutocast:
    """True unless autocast converts the inputs of layers. It would also convert those that peft has
    converted to the adapters' float32.
    """

    def __bool__(self) -> bool:
        return not any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters that something would ignore which computes with their weight.

    Args:
        model: a peft model; others have no adapters.

    Raises:
        ValueError: an adapter is on the LM head, on a weight that several modules share (an
            embedding that is tied to the head), or in a Mamba layer.
    """
    head = base_model_of(model).get_output_embeddings()
    users = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if weight is not None and (module is head or users[weight] > 1 or "mamba" in name):
            raise ValueError(
                f"the weight of {name} has other users, or is not used through its forward"
            )


def _vision_modules(model: PreTrainedModel) -> list[str] | None:
    """Return the names of modules with weights of the image encoder; None for other models."""
    if family_of(model.config) is None:
        return None
    return sorted({name.rpartition(".")[0] for name, _ in vision_parameters(model)})


def freeze_vision(model: PreTrainedModel) -> None:
    """Exclude the image encoder and projector of a vision-language model from training."""
    for _, parameter in vision_parameters(model):
        parameter.requires_grad_(False)


def enable_gradient_checkpointing(model: Any) -> int:
    """Enable gradient checkpointing that works with dropout off.

    Hugging Face layers recompute only in training mode. So they are in training mode when they are
    called, and leave it while they compute, with or without gradients: neither they nor their
    children apply dropout.

    Returns:
        the number of layers that will be recomputed.

    Raises:
        ValueError: the model has no layer that can be recomputed.
    """
    base = base_model_of(model)
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            "train_model.gradient_checkpointing=true needs a model with checkpointed layers, "
            f"which {type(base).__name__} does not have: set it to false."
        )
    contexts = {"context_fn": lambda: (_out_of_training(layers), _out_of_training(layers))}
    base.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, **contexts}
    )
    for layer in layers:
        layer.training = True
        # Without gradients nothing is checkpointed, and the contexts are never entered.
        layer.register_forward_pre_hook(_leave_training_without_gradients)
        layer.register_forward_hook(
            lambda layer, *_: setattr(layer, "training", True), always_call=True
        )
    return len(layers)


def _leave_training_without_gradients(layer: nn.Module, _: Any) -> None:
    if not torch.is_grad_enabled():
        layer.training = False


@contextmanager
def _out_of_training(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which layers are not in training mode. A recomputation leaves it by an exception
    as soon as it has the tensors that it needs.
    """
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True
