"""The objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.config.rule import Rule, is_set, read_with


@dataclass
class PolicyConfig:
    """The objective; ``algo=NAME`` selects a published algorithm's."""

    loss: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "torchrl_grpo.objectives.GRPOLoss"}
    )
    """The loss: as _target_ a class of the package, or your Surrogate or subclass of GRPOLoss as
    file.py:Class or package.module.Class, with its arguments next to it.
    """
    advantage: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "torchrl_grpo.transforms.GroupAdvantage"}
    )
    """The transform that writes the advantage: as _target_ a GroupAdvantage, named as the loss is,
    with its arguments next to it.
    """
    advantage_mean: str = choice(checks.AdvantageMean, "group")
    """Baseline: mean of the group, of its other members (leave_one_out), of its tokens
    (length_weighted, arXiv 2505.23585), of the batch, or none; second_best trains only on
    the best member, by its lead over the second one (arXiv 2503.19595)."""
    advantage_std: str = choice(checks.AdvantageStd, "group")
    """Scale: standard deviation of the group, of the batch, or none; the group's mean reward
    (group_mean, arXiv 2602.02710); or the share of rewards that are not 0 (nonzero, arXiv
    2504.02546)."""
    advantage_whiten: bool = False
    """Whether the advantages are normalized a second time, by mean and standard deviation over the
    batch's tokens.
    """
    advantage_level: str = choice(checks.AdvantageLevel, "sequence")
    """One advantage per sequence, from its reward, or per token, from the rewards that follow it
    (GAE).
    """
    turn_credit: str = choice(checks.TurnCredit, "sum")
    """Credit of each turn of a dialog: the reward of the dialog (sum), or the rewards from that
    turn on, compared with the same turn's in the group (per_turn, docs/algorithms.md)."""
    gae_gamma: float = limited(1.0, gt=0, le=1)
    """advantage_level=token, turn_credit=per_turn: discount of later rewards, in (0, 1]."""
    gae_lambda: float = limited(1.0, ge=0, le=1)
    """advantage_level=token, turn_credit=per_turn with a critic: lambda of GAE (arXiv 1506.02438), in
    [0, 1]."""
    reward_scale: float = limited(1.0, gt=0)
    """Factor of the reward before the advantage; logged rewards stay the task's."""
    reward_bias: float = limited(0.0, ge=-1e6, le=1e6)
    """Added to the scaled reward."""
    reward_clip: list[float] | None = None
    """Bounds [low, high] of the scaled and biased reward."""
    overlong_buffer: float | None = limited(None, gt=0, le=1)
    """Last share of the maximum response length over which a penalty grows from 0 to 1 (arXiv
    2503.14476).
    """
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample others in their place (arXiv 2503.14476).
    """
    max_sampling_rounds: int = limited(10, ge=1)
    """dynamic_sampling: at most max_sampling_rounds * env.num_envs dialogs are played for one
    batch; then zero-variance groups fill it."""
    clip_epsilon: Any = 0.2
    """Clip range of the ratio: a number, or a pair [low, high]. Low is in [0, 1], high is at least
    0.
    """
    dual_clip: float | None = limited(None, gt=1)
    """Bound of the objective for negative advantages, above 1."""
    proximal: str = choice(checks.Proximal, "behaviour")
    """Policy in the denominator of the ratio: the sampling policy (behaviour), the one at the start
    of the batch's training (recomputed by a forward pass), or an estimate of that from staleness
    (interpolated)."""
    behaviour_weight: str = choice(checks.WeightBound, "none")
    """Importance weight of proximal over sampling policy: none, or with weights above the cap
    truncated or masked.
    """
    behaviour_level: str = choice(checks.WeightLevel, "token")
    """That weight per token, or per sequence."""
    behaviour_cap: float = limited(5.0, gt=0)
    """Largest such weight, above 0."""
    behaviour_floor: float = limited(0.0, ge=0)
    """Smallest such weight, at most the cap; IcePop masks on both sides (arXiv 2510.18855)."""
    rejection: Any = None
    """Rules by which tokens or sequences leave the objective, with their bounds, such as
    {geometric: [0.99, 1.01]}; docs/algorithms.md#mismatch has them. A token must pass all."""
    top_entropy_quantile: float = limited(1.0, gt=0, le=1)
    """Share of the batch's tokens that the objective trains, those with the largest entropy (arXiv
    2506.01939), in (0, 1]. Less than 1 needs proximal=recomputed, and a forward pass."""
    score_centering: bool = False
    """Subtract the mean of the update's score under the sampling policy, over the tokens that
    inference_model.top_k keeps (arXiv 2609.20807; docs/algorithms.md#score-centering)."""
    mask_truncated: bool = False
    """Exclude truncated responses from the loss; they stay in their group's statistics."""
    ratio_level: str = choice(checks.RatioLevel, "token")
    """Ratio of each token, of the sequence, or of the sequence with each token's gradient
    (sequence_token).
    """
    aggregation: str = choice(checks.Aggregation, "sequence_mean")
    """Average of the objective: over sequences of token means, over all tokens, or over sequences
    of token sums divided by a constant length."""
    constant_length: int | None = limited(None, ge=1)
    """Divisor of aggregation=constant, in tokens; by default max_new_tokens, times env.max_turns.
    """
    kl_estimator: str | None = choice(checks.KLEstimator, None)
    """Estimator of both KL terms; null is k3 in the loss, and k1 in the reward, where the others
    constrain little.
    """
    kl_coef: float = limited(0.0, ge=0)
    """Weight of the KL to the reference model; 0 needs no reference model."""
    kl_in_reward: bool = False
    """Subtract that KL from the reward, token by token, instead of adding it to the loss."""
    kl_bias_correction: bool = False
    """Multiply the KL to the reference by the ratio, so that estimate and gradient are unbiased
    with stale samples (arXiv 2512.02556)."""
    kl_to_behaviour_coef: float = limited(0.0, ge=0)
    """Weight of the KL to the sampling policy."""
    entropy_coef: float = limited(0.0, ge=0)
    """Weight of the entropy bonus; with an entropy_target, its first value."""
    entropy_target: float | None = limited(None, gt=0)
    """Mean entropy of a token in nats at or below which the bonus applies, and entropy_coef grows
    after each optimizer step; above it, the coefficient shrinks (Skywork-OR1, arXiv 2505.22312).
    null keeps it constant.
    """
    entropy_coef_delta: float = limited(0.005, gt=0)
    """entropy_target: how much entropy_coef changes with each optimizer step."""
    entropy_coef_max: float = limited(1.0, gt=0)
    """entropy_target: largest entropy_coef."""
    value_coef: float = limited(0.0, ge=0)
    """Weight of the critic's value loss; 0 has no critic. Its values are the baseline of GAE, over
    tokens or turns."""
    value_clip: float | None = limited(None, gt=0)
    """How far a value may move from what it was before the batch's first step, above 0 (arXiv
    1707.06347); null is unbounded."""
    demonstrations: bool = False
    """Whether the responses are read from the data (env.columns.completion or messages) instead of
    being sampled, each with an advantage of 1; env.repeats is then 1."""
    sft_coef: float = limited(0.0, ge=0)
    """Weight of the supervised loss in each optimizer step: minus the log-likelihood of one
    demonstration for each problem in the batch (env.columns.completion or messages), the mean over
    their tokens. 0 needs no demonstrations."""
    reward_coef: float = limited(1.0, ge=0)
    """With a teacher: weight of the reward's advantage; 0 trains only on the teacher."""
    teacher_coef: float = limited(0.0, ge=0)
    """Weight of the divergence from teacher.model; 0 needs no teacher."""
    teacher_divergence: str = choice(checks.TeacherDivergence, "sampled")
    """How it is measured: sampled adds the reverse KL at each sampled token to that token's
    advantage. The others are a part of the loss, over the whole vocabulary (arXiv 2306.13649):
    reverse KL, forward KL, or generalized Jensen-Shannon (jsd)."""
    teacher_clip: float | None = limited(None, gt=0)
    """Largest divergence of one token that counts, in nats (its absolute value, if it is in the
    advantage), so that few tokens of another style do not decide the step (arXiv 2601.18734); null
    is unbounded."""
    teacher_beta: float = limited(0.5, gt=0, lt=1)
    """teacher_divergence=jsd: the teacher's share of the mixture, in (0, 1)."""
    teacher_top_k: int | None = limited(None, ge=1)
    """teacher_divergence over the vocabulary: how many of the teacher's most likely tokens are compared
    one by one; null is all, for which the trainer holds the teacher's LM head."""


def _no_sft_loss(config: Any) -> dict[str, str] | None:
    target = str(config.policy.loss.get("_target_"))
    is_other = target.startswith("torchrl_grpo.") and not target.endswith(
        (".DemonstrationLoss", ".SFTLoss")
    )
    return {"target": target} if config.policy.demonstrations and is_other else None


WITH_SFT = "must be left out with policy.demonstrations=true (algo=sft)"
RULES = (
    *(
        Rule(
            key,
            "must be left out with policy.entropy_target=null, which makes it unused",
            "to use it, set policy.entropy_target=0.5",
            partial(lambda key, c: c.policy.entropy_target is None and is_set(c, key), key),
        )
        for key in ("policy.entropy_coef_delta", "policy.entropy_coef_max")
    ),
    Rule(
        "policy.entropy_coef",
        "must be at most {policy.entropy_coef_max=}",
        "lower it, or raise policy.entropy_coef_max",
        lambda c: (
            c.policy.entropy_target is not None
            and c.policy.entropy_coef > c.policy.entropy_coef_max
        ),
    ),
    Rule(
        "policy.teacher_divergence",
        "must be over the vocabulary with policy.demonstrations=true (algo=sft)",
        "use policy.teacher_divergence=reverse",
        lambda c: c.policy.demonstrations and c.needs_teacher and not c.teacher_in_loss,
    ),
    Rule(
        "policy.demonstrations",
        "needs policy.loss._target_=torchrl_grpo.objectives.DemonstrationLoss, but it is "
        "{target}, which needs sampled responses",
        "use algo=sft",
        _no_sft_loss,
    ),
    *(
        Rule(
            key,
            "must be none with policy.demonstrations=true (algo=sft), whose rewards are all 1",
            "use only algo=sft",
            "policy.demonstrations",
            lambda value: value != "none",
        )
        for key in ("policy.advantage_mean", "policy.advantage_std")
    ),
    Rule(
        "policy.sft_coef",
        "must be left out with {policy.teacher_divergence=}, because the teacher does not score "
        "demonstrations",
        "use policy.teacher_divergence=sampled",
        lambda c: c.policy.sft_coef and c.teacher_in_loss,
    ),
    Rule(
        "policy.turn_credit",
        "and {policy.advantage_level=} exclude each other, because both determine a token's credit",
        "set only one of them",
        "policy.advantage_level",
    ),
    *(
        Rule(
            "policy.dynamic_sampling",
            f"must be left out with {{{key}=}}",
            "a group whose rewards are all equal still has a signal there",
            key,
        )
        for key in (
            "policy.teacher_coef",
            "policy.turn_credit",
            "policy.sft_coef",
            "policy.value_coef",
        )
    ),
    Rule(
        "policy.score_centering",
        "must be left out with {policy.top_entropy_quantile=}",
        "set only one of them",
        "policy.top_entropy_quantile",
    ),
)
UNREAD = (
    *read_with(
        "policy.advantage_level",
        ("token",),
        "token",
        "policy.gae_gamma",
        unless=lambda c: c.advantage_level == "turn",
    ),
    *read_with(
        "policy.advantage_level",
        ("token",),
        "token",
        "policy.gae_lambda",
        unless=lambda c: c.advantage_level == "turn" and c.policy.value_coef,
    ),
    *read_with(
        "policy.behaviour_weight",
        ("truncate", "mask"),
        "mask",
        "policy.behaviour_cap",
        "policy.behaviour_floor",
        "policy.behaviour_level",
    ),
    *read_with("policy.dynamic_sampling", (True,), "true", "policy.max_sampling_rounds"),
    *read_with("policy.teacher_divergence", ("jsd",), "jsd", "policy.teacher_beta"),
    *read_with(
        "policy.teacher_divergence",
        ("reverse", "forward", "jsd"),
        "reverse",
        "policy.teacher_top_k",
    ),
    *read_with("policy.aggregation", ("constant",), "constant", "policy.constant_length"),
)
