"""Choices and rules shared by the components and the config. Imports nothing heavy.

A component checks its rules in its constructor; the config checks the same ones before anything is
imported.

``name`` is the user's name of a value: an argument of the component, or a key of the config.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from torchrl_grpo.errors import InvalidRewardError

STARTERS = {"starter": "model", "tool_starter": "tool_model", "vision_starter": "vision_model"}
"""Included models: names for ``model.name``, and their folders in ``torchrl_grpo/starter``."""
GENERATED = ("arithmetic", "countdown", "shapes")
"""Built-in generated data sets."""
PRESETS = ("gsm8k", "math", "ifeval")
"""Built-in data sets from files or the hub; any other name is a file, a folder or a data set on the
hub.
"""
MCP = "mcp:"
"""Prefix of the command or address of an MCP server."""
OPENENV = "openenv:"
"""Prefix of the address of a server of OpenEnv."""
VERIFIERS = "verifiers:"
"""Prefix of the name of an environment of the library verifiers."""
REASONING_GYM = "reasoning_gym:"
"""Prefix of the name of one of reasoning-gym's data sets."""
Sandbox = Literal["auto", "strict"]
"""Isolation of programs that a model wrote: what the machine offers, or kernel namespaces."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Types of weights."""
Quantization = Literal["nf4"]
"""Types of weights that are frozen."""
Precision = Literal["full", "bf16", "fp16"]
"""Autocast of the training step; ``full`` uses none."""
InFlight = Literal["wait", "keep", "abort"]
"""Treatment of sequences in progress when new weights arrive."""
WeightTransfer = Literal["auto", "object_store", "broadcast", "cuda_ipc"]
"""Kinds of weight transfer to engines in other processes."""

RatioLevel = Literal["token", "sequence", "sequence_token"]
"""Units over which the importance ratio is computed."""
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
"""Averages of the objective over tokens."""
Proximal = Literal["behaviour", "recomputed", "interpolated"]
"""Policies in the denominator of the ratio."""
WeightBound = Literal["none", "truncate", "mask"]
"""Bounds of an importance weight."""
WeightLevel = Literal["token", "sequence"]
"""Units over which an importance weight is computed."""
Rejection = Literal[
    "token_ratio",
    "token_k3",
    "sequence_ratio",
    "sequence_k3",
    "geometric",
    "outlier",
    "off_policy",
    "dppo_tv",
    "dppo_kl",
]
"""Rules by which tokens are left out of the objective."""
_OF_SEQUENCES = ("sequence_ratio", "sequence_k3", "geometric", "outlier", "off_policy")
_RATIO_BOUNDS = ("token_ratio", "sequence_ratio", "geometric", "outlier")
_PAIRS = (*_RATIO_BOUNDS, "dppo_tv", "dppo_kl")
KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of the KL."""

TeacherDivergence = Literal["sampled", "reverse", "forward", "jsd"]
"""Divergences from a teacher: at the sampled token, or over the whole vocabulary."""
TeacherWeights = Literal["live", "frozen", "ema"]
"""Weights of a teacher that is the policy."""

AdvantageMean = Literal["group", "leave_one_out", "length_weighted", "second_best", "batch", "none"]
"""Baselines of the advantage."""
AdvantageStd = Literal["group", "batch", "group_mean", "nonzero", "none"]
"""Scales of the advantage."""
Sampling = Literal["uniform", "pass_rate"]
"""How problems are drawn."""
RewardCombination = Literal["sum", "gdpo"]
"""Ways to turn the parts of a reward into an advantage."""
AdvantageLevel = Literal["sequence", "token", "turn"]
"""Units that get an advantage each."""
TurnCredit = Literal["sum", "per_turn"]
Abandoned = Literal["train", "drop"]
"""Credit of a turn: the dialog's reward, or the rewards from the turn on."""

Optimizer = Literal["adamw", "adamw_8bit"]
"""Optimizers."""
LearningRate = Literal["constant", "linear", "cosine"]
"""Shapes of the learning rate after its warm-up."""

ServiceMode = Literal["disabled", "offline", "online"]
"""Modes of Weights & Biases and MLflow."""
TrackioMode = Literal["disabled", "offline"]
"""Modes of Trackio."""

_has_torchao = find_spec("torchao") is not None

MIN_TEMPERATURE = 0.01
"""Lowest sampling temperature apart from 0 (greedy): vLLM raises lower ones to this value, and
logits would overflow.
"""


_LARGEST_REWARD = 3.4e38  # of float32


def check_reward(value: Any, name: str) -> float:
    """Return a reward as a number.

    Raises:
        InvalidRewardError: it is not a number (text never is), or not finite in float32.
    """
    try:
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    # RuntimeError: a tensor of several elements.
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = float("nan")
    if not abs(number) <= _LARGEST_REWARD:
        actual = value if isinstance(value, float) else f"of type {type(value).__name__}"
        raise InvalidRewardError(
            f"{name} must be a finite number, a bool or None, but is {actual}: return a number.",
            "not_finite",
        )
    return number


def check_multiple(name: str, value: int, of: int, of_what: str) -> None:
    """Refuse a value that is not a positive multiple ``of`` a number, described by ``of_what``."""
    if of < 1 or value < 1 or value % of:
        below = value // max(of, 1) * of
        above = -(-value // max(of, 1)) * of
        use = f"{below} or {above}" if 0 < below < above else f"{max(above, of, 1)}"
        raise ValueError(f"{name}={value} must be a multiple of {of_what}: use {use}.")


def did_you_mean(name: str, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """Return a hint at the most similar name, or ``otherwise`` if no name is similar enough."""
    similar = difflib.get_close_matches(name, list(names), 1, cutoff)
    return f"did you mean {similar[0]}?" if similar else otherwise


def check_argument(
    field: str, name: str, names: Collection[str], set_by: Mapping[str, str], what: str
) -> None:
    """Refuse an argument of a library that is unknown, or that another config key sets.

    Args:
        field: the config key that contains the argument, with its value.
        name: name of the argument.
        names: all arguments that exist.
        set_by: the config keys that set arguments, by argument.
        what: the rule for the name.
    """
    if name in set_by:
        raise ValueError(
            f"{field} must be left out, because another key sets it: use {set_by[name]}."
        )
    if name not in names:
        raise ValueError(f"{field} must be {what}: {did_you_mean(name, names, 'leave it out.')}")


def exact_context(config: Any) -> int | None:
    """Return the number of tokens beyond which a sequence's log-probs depend on the other sequences
    of a pass; None if they never do.

    From that length on, Hugging Face's ``longrope`` has other factors, and ``dynamic`` has another
    base, which it keeps in later passes; vLLM uses one set for all lengths, which depends on
    ``max_model_len``. The indexer of sparse attention (``index_topk``) may choose padding, except
    with compressed keys.
    """
    config = config.get_text_config(decoder=True)
    rope: Any = getattr(config, "rope_parameters", None)
    if "'longrope'" in str(rope):
        return rope["original_max_position_embeddings"]
    if "'dynamic'" in str(rope):
        return config.max_position_embeddings
    return None if hasattr(config, "compress_rates") else getattr(config, "index_topk", None)


def context_length(config: Any) -> int:
    """Return the maximum length of a prompt and its response in tokens, at most ``exact_context``; for
    a model without a limit, a very large number.
    """
    limit = exact_context(config)
    config = config.get_text_config(decoder=True)
    return limit or getattr(config, "max_position_embeddings", None) or 2**31


def check_heads(field: str, size: int, config: Any, *, repeats: bool = False) -> None:
    """Refuse a number of devices that a model's attention heads cannot be split over.

    Args:
        field: the config key of the number.
        size: number of devices.
        config: the Hugging Face config of the language model.
        repeats: whether several devices may share a key and value head.
    """
    heads = getattr(config, "num_attention_heads", None) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads

    def fits(number: int) -> bool:
        is_shared = repeats and number % max(kv_heads, 1) == 0
        return heads % number == 0 and (kv_heads % number == 0 or is_shared)

    if not fits(size):
        raise ValueError(
            f"{field}={size} must divide the model's {heads} attention heads, and its {kv_heads} "
            f"key and value heads{' or be a multiple of them' if repeats else ''}: use "
            f"{max(filter(fits, range(1, size)))}."
        )


def check_keep(value: str | None) -> dict[str, int] | None:
    """Return how many checkpoints to keep, as ``{"last": 3, "best": 1}``; None keeps all."""
    if value is None:
        return None
    parts = [part.strip().partition(":")[::2] for part in value.split(",")]
    counts = {name: int(count) if count.isdecimal() else 0 for name, count in parts}
    if (
        not {"last"} <= counts.keys() <= {"last", "best"}
        or min(counts.values()) < 1
        or len(counts) < len(parts)
    ):
        raise ValueError(
            f"train.keep_checkpoints={value} must be last:N or last:N,best:M, with numbers of at "
            "least 1: for example, last:3, or null to keep all."
        )
    return counts


def check_clip_epsilon(value: Any, name: str = "clip_epsilon") -> tuple[float, float]:
    """Return the clip range of a ratio as (low, high), from a number or a pair."""
    parts = value if isinstance(value, list | tuple) else (value, value)
    try:
        low, high = (
            float("nan") if isinstance(part, bool | str) else float(part) for part in parts
        )
    except (TypeError, ValueError):
        low = high = float("nan")
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"{name}={value} must be a number, or a pair [low, high], with 0 <= low <= 1 and high "
            ">= 0: use 0.2 or [0.2,0.28]."
        )
    return low, high


def check_bounds(bounds: Sequence[float] | None, name: str = "clip") -> None:
    """Refuse bounds that are not a lower and a higher number; None means no bounds."""
    if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
        raise ValueError(
            f"{name}={list(bounds)} must be a pair [low, high], low < high: for example, [-1,1]."
        )


def check_behaviour_weight(weight: str, proximal: str, name: str = "behaviour_weight") -> None:
    """Refuse an importance weight that would always be 1."""
    if weight != "none" and proximal == "behaviour":
        raise ValueError(
            f"{name}={weight} needs a proximal policy other than the behavior policy, because "
            "proximal=behaviour makes every weight 1: use proximal=recomputed."
        )


def check_floor(floor: float, cap: float, name: str = "behaviour_floor") -> None:
    """Refuse bounds of a weight that leave nothing between them."""
    if not 0 <= floor <= cap:
        raise ValueError(f"{name}={floor} must be between 0 and the cap {cap}: use 0.0.")


def check_score_centering(
    on_policy: bool, level: str, rules: Collection[str], prefix: str = ""
) -> None:
    """Refuse score centering where a token's update is not its bounded weight times its score.

    Args:
        on_policy: whether every ratio is 1, because it is taken to the current policy.
        level: of the importance weight.
        rules: of rejection.
        prefix: of the config's keys.
    """
    if not on_policy:
        raise ValueError(
            f"{prefix}score_centering=True needs {prefix}proximal=recomputed and one optimizer "
            "step per batch, where every ratio is 1: use train.epochs=1 train.optim_batch_size=null."
        )
    if level != "token":
        raise ValueError(
            f"{prefix}behaviour_level={level} must be token with {prefix}score_centering=True, "
            f"whose mean is over single tokens: use {prefix}behaviour_level=token."
        )
    for rule in rules:
        if rule not in _OF_SEQUENCES:
            raise ValueError(
                f"{prefix}rejection.{rule} must not be used with {prefix}score_centering=True, "
                f"because it rejects single tokens: use one of {_OF_SEQUENCES}."
            )


def check_top_entropy(
    quantile: float, proximal: str, name: str = "top_entropy_quantile", of: str = "proximal"
) -> None:
    """Refuse a share of tokens outside (0, 1], or one without a pass that computes entropies."""
    if not 0 < quantile <= 1:
        raise ValueError(f"{name}={quantile} must be in (0, 1]: use 0.2.")
    if quantile < 1 and proximal != "recomputed":
        raise ValueError(
            f"{name}={quantile} needs {of}=recomputed, whose forward pass before the step gives "
            f"the entropies of the whole batch, but {of}={proximal}: use {of}=recomputed."
        )


def check_rejection(
    rejection: Mapping[str, Any] | None, name: str = "rejection"
) -> dict[str, tuple[float, float]]:
    """Return the bounds (low, high) of each rejection rule.

    A number ``c`` is [1/c, c] for a rule of ratios, [c, c] for DPPO, and the upper bound of others.

    Raises:
        ValueError: a rule is unknown, or its bounds are none.
    """
    if rejection is not None and not isinstance(rejection, Mapping):
        raise ValueError(
            f"{name}={rejection!r} must have bounds by rule: use {{geometric: [0.99, 1.01]}}."
        )
    bounds = {}
    for rule, value in (rejection or {}).items():
        if rule not in get_args(Rejection):
            raise ValueError(
                f"{name}.{rule} must be one of {get_args(Rejection)}: use {name}.geometric."
            )
        of_ratio = rule in _RATIO_BOUNDS
        pair = value
        if type(value) in (int, float):
            low = 1 / value if of_ratio and value else value if rule in _PAIRS else 0.0
            pair = (low, value)
        numbers = isinstance(pair, list | tuple) and all(type(one) in (int, float) for one in pair)
        is_pair = rule in _PAIRS or type(value) in (int, float)
        good = numbers and is_pair and len(pair) == 2 and pair[0] >= 0 and pair[1] > 0
        if not good or (of_ratio and not pair[0] <= 1 <= pair[1]):
            kind = "a ratio of at least 1, or a pair [low, high] around it"
            other = "a bound above 0" + (", or a pair of them" if rule in _PAIRS else "")
            raise ValueError(
                f"{name}.{rule}={value} must be {kind if of_ratio else other}: use "
                f"{name}.{rule}={'[0.5, 2.0]' if of_ratio else 0.2}."
            )
        bounds[rule] = (float(pair[0]), float(pair[1]))
    return bounds


def check_group_size(repeats: int, mean: str, std: str, name: str = "repeats") -> None:
    """Refuse a group too small for a comparison among its members."""
    of_group = mean not in ("batch", "none") or std in ("group", "group_mean")
    minimum = 2 if of_group else 1
    if repeats < minimum:
        raise ValueError(
            f"{name}={repeats} must be at least {minimum}, because a single sample cannot be "
            f"compared with its group: use {name}=8, or, without dynamic sampling, 'batch' as mean and std."
        )


def check_level(level: str, mean: str, name: str = "mean") -> None:
    """Refuse a baseline or scale that is not defined for tokens."""
    of_sequences = ("leave_one_out", "length_weighted", "second_best", "group_mean", "nonzero")
    if level != "sequence" and mean in of_sequences:
        raise ValueError(
            f"{name}={mean} must not be used with an advantage for each {level}, because it "
            f"compares sequences, not a {level}: use group or batch."
        )


def check_decoupled(level: str, mean: str, name: str = "reward_combination=gdpo") -> None:
    """Refuse an advantage that does not compare each part of the reward within its group."""
    if level != "sequence" or mean not in ("group", "leave_one_out"):
        raise ValueError(
            f"{name} needs one advantage per sequence, relative to its group, but level={level} "
            f"and mean={mean}: use level=sequence and mean=group."
        )


def check_sampling_rounds(
    rounds: int, rows: int, batch: int, name: str = "max_sampling_rounds"
) -> None:
    """Refuse a number of rollouts of ``rows`` trajectories that cannot fill a batch."""
    if batch > rounds * rows:
        raise ValueError(
            f"{name}={rounds} rollouts of {rows} trajectories must make up a batch of {batch}: "
            f"use at least {-(-batch // rows)}, preferably twice as many."
        )


def check_optimizer(name: str) -> None:
    """Check that an optimizer of this name exists."""
    if name == "adamw_8bit" and not _has_torchao:
        raise ValueError(
            "optimizer.name=adamw_8bit needs the package torchao: pip install 'torchrl_grpo[adamw-8bit]', "
            "or use optimizer.name=adamw."
        )


OF_ADAPTERS = (
    "r",
    "lora_alpha",
    "target_modules",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
)
"""Arguments of peft's ``LoraConfig`` that say which adapters there are."""


def adapter_settings(folder: str) -> dict[str, Any]:
    """Return the arguments of peft's ``LoraConfig`` for the adapters in a folder.

    Raises:
        ValueError: the folder has no LoRA adapters in peft's format, or their initialization
            changes the base model.
    """
    try:
        saved = json.loads((Path(folder) / "adapter_config.json").read_bytes())
        settings = {name: saved[name] for name in OF_ADAPTERS if saved.get(name) is not None}
        if saved["peft_type"] != "LORA" or not isinstance(settings["r"], int):
            raise ValueError(f"peft_type={saved['peft_type']}, r={settings['r']}")
        if saved.get("init_lora_weights") not in (None, True, False, "gaussian"):
            raise ValueError(f"init_lora_weights={saved['init_lora_weights']} changes the base")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"train_model.lora.path={folder} must be a folder of LoRA adapters in peft's format "
            f"({error!r:.200}): use one that `python -m torchrl_grpo export --adapters` or peft's "
            "save_pretrained has written."
        ) from error
    return settings
