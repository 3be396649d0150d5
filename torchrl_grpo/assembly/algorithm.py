"""The components of an algorithm from ``policy.*`` of the config: the loss, and the transforms
from rewards to advantages.
"""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.envs import Transform

from torchrl_grpo import keys
from torchrl_grpo.assembly.components import make_component
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.objectives import GRPOLoss, Surrogate
from torchrl_grpo.rewards.spec import PartWeights
from torchrl_grpo.transforms.advantage import GroupAdvantage
from torchrl_grpo.transforms.reward import RewardShaping
from torchrl_grpo.transforms.teacher import TeacherAdvantage
from torchrl_grpo.transforms.whitening import AdvantageWhitening

_SAME_NAMES = (
    "ratio_level",
    "aggregation",
    "dual_clip",
    "behaviour_weight",
    "behaviour_level",
    "behaviour_cap",
    "behaviour_floor",
    "rejection",
    "top_entropy_quantile",
    "score_centering",
    "mask_truncated",
    "kl_bias_correction",
    "teacher_clip",
)
"""Options of the loss that have the same name in ``policy``."""


def make_loss(config: GRPOConfig, actor_network: TensorDictModuleBase) -> GRPOLoss:
    """Make the loss of a config, around an actor network.

    Raises:
        ConfigError: the class does not accept these settings, or others determine them.
        ValueError: a setting is out of range.
    """
    policy = config.policy
    # With one optimizer step per batch, the trained policy is the one that a forward pass would
    # recompute.
    needs_pass = config.optim_steps_per_batch > 1 or policy.top_entropy_quantile < 1
    once = policy.proximal == "recomputed" and not needs_pass
    loss = make_component(
        "policy.loss",
        policy.loss,
        GRPOLoss,
        actor_network,
        part=("objective", Surrogate),
        clip_epsilon=config.clip_epsilon,
        constant_length=policy.constant_length or config.max_response_tokens,
        proximal="current" if once else policy.proximal,
        kl_estimator=config.kl_estimator,
        kl_to_ref_coeff=0.0 if policy.kl_in_reward else policy.kl_coef,
        kl_to_inference_coeff=policy.kl_to_behaviour_coef,
        entropy_coeff=policy.entropy_coef,
        teacher_coeff=config.teacher_in_loss,
        sft_coeff=policy.sft_coef,
        value_coeff=policy.value_coef,
        value_clip=policy.value_clip,
        **{name: getattr(policy, name) for name in _SAME_NAMES},
    )
    if type(loss) is GRPOLoss and (bounds := {"low", "high"} & {*policy.loss}):
        raise ConfigError(
            f"policy.loss.{min(bounds)}={policy.loss[min(bounds)]} must be left out, because "
            "policy.clip_epsilon sets the bounds of a Surrogate: use "
            "policy.clip_epsilon=[low, high]."
        )
    return loss


def batch_transforms(
    config: GRPOConfig, part_weights: PartWeights | None = None
) -> list[tuple[str, Transform]]:
    """Return the transforms from a batch's rewards to advantages, which follow reference scoring,
    in order and by name.

    Args:
        config: validated.
        part_weights: weights of the task's reward parts.
    """
    policy = config.policy
    settings = dict[str, Any]()
    transforms: list[tuple[str, Transform]] = []
    if config.shapes_reward:
        longest = config.max_response_tokens
        clip = (
            None if policy.reward_clip is None else (policy.reward_clip[0], policy.reward_clip[1])
        )
        buffer = 0
        if policy.overlong_buffer:
            buffer = max(1, round(policy.overlong_buffer * longest))
        shaping = RewardShaping(
            scale=policy.reward_scale,
            bias=policy.reward_bias,
            clip=clip,
            overlong_buffer=buffer,
            max_response_tokens=longest,
            kl_coef=policy.kl_coef if policy.kl_in_reward else 0.0,
            kl_estimator=config.kl_estimator,
        )
        transforms.append(("shaping", shaping))
        shaped = keys.SHAPED_REWARD if config.advantage_level == "sequence" else keys.TOKEN_REWARD
        settings["reward_key"] = shaped
    if config.env.reward_combination == "gdpo":
        settings["part_weights"] = part_weights or {}
    advantage = make_component(
        "policy.advantage",
        policy.advantage,
        GroupAdvantage,
        repeats=config.env.repeats,
        mean=policy.advantage_mean,
        std=policy.advantage_std,
        level=config.advantage_level,
        gamma=policy.gae_gamma,
        lmbda=policy.gae_lambda,
        **settings,
    )
    transforms.append(("advantage", advantage))
    if policy.advantage_whiten:
        transforms.append(("whitening", AdvantageWhitening()))
    if config.needs_teacher:
        coef = policy.teacher_coef - config.teacher_in_loss
        teacher = TeacherAdvantage(coef, policy.reward_coef, policy.teacher_clip)
        transforms.append(("teacher", teacher))
    return transforms
