"""The first step of a translated run has the peer's loss and gradient, on the same batch of the
same model. Peers that are not installed are replaced by their formula, as a plain loop in float64.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from tests.support.configs import compose_config
from tests.support.losses import Token, clip, sapo, total
from tests.support.models import make_tiny_model
from tests.support.peer_configs import TORCHRL
from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import batch_transforms, make_loss
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.extras.migrate.command import command
from torchrl_grpo.extras.migrate.readers import read
from torchrl_grpo.extras.migrate.tables import SET_ME
from torchrl_grpo.extras.migrate.translation import translate
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import (
    CISPOLoss,
    ClipCovLoss,
    DemonstrationLoss,
    GMPOLoss,
    GRPOLoss,
    KLCovLoss,
    SAPOLoss,
)
from torchrl_grpo.starter import starter_path

PROMPT, RESPONSE, SIZE, GROUP = 5, 7, 8, 4
NOISE = torch.tensor([-0.5, -0.1, 0.1, 0.5])


def make_batch() -> dict[str, Tensor]:
    """Return a batch padded on the right: tokens [B, T], and entries of the response's tokens [B,
    Tr].
    """
    torch.manual_seed(0)
    mask = torch.arange(RESPONSE) < torch.tensor([7, 3, 5, 7, 1, 6, 4, 2])[:, None]
    prompts = torch.randint(2, 250, (SIZE // GROUP, PROMPT)).repeat_interleave(GROUP, 0)
    tokens = torch.cat([prompts, torch.randint(2, 250, (SIZE, RESPONSE)) * mask], 1)
    with torch.no_grad():
        log_probs = make_tiny_model()(tokens).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    own = log_probs.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
    noise = NOISE[torch.randint(len(NOISE), (2, *mask.shape))]
    return {
        "tokens": tokens, "mask": mask, "old": (own + noise[0]) * mask, "reference": (own + noise[1]) * mask,
        "advantage": torch.randn(SIZE),
    }  # fmt: skip


def ours(batch: dict[str, Tensor], advantage_shape: tuple[int, ...] = (1,)) -> TensorDict:
    """Return the batch in the format of a collector, under TorchRL's keys."""
    rows = []
    for row in range(SIZE):
        end = PROMPT + int(batch["mask"][row].sum())
        sampled = torch.arange(end) >= PROMPT
        old, reference = (
            torch.cat([torch.zeros(PROMPT), batch[name][row]])[:end]
            for name in ("old", "reference")
        )
        tokens = batch["tokens"][row, :end]
        entries = {
            keys.PROMPT: tokens[:PROMPT], keys.RESPONSE: tokens[PROMPT:], keys.FULL: tokens,
            keys.ATTENTION_MASK: torch.ones_like(sampled), keys.ASSISTANT_MASK: sampled, keys.LOG_PROBS: old,
            keys.PROX_LOG_PROBS: old, keys.REF_LOG_PROBS: reference,
            keys.ADVANTAGE: batch["advantage"][row].view(advantage_shape),
        }  # fmt: skip
        rows.append(TensorDict(entries))
    return lazy_stack(rows)


def gradient(loss: Tensor, model: torch.nn.Module) -> Tensor:
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def translated_loss(path: Path, model: torch.nn.Module) -> Any:
    """Return the loss of the command line that is printed for a file."""
    return make_loss(translated_config(path), TokenScorer(model))


def translated_config(path: Path) -> GRPOConfig:
    words = shlex.split(" ".join(command(translate(read(path), path.name))))[2:]
    return compose_config(*(word for word in words if SET_ME not in word), name="grpo_gsm8k")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.5},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.1,
        },
    ],
    ids=lambda settings: "_".join(str(value) for value in list(settings.values())[:2]),
)
def test_the_first_loss_is_that_of_trl(settings: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    # Two optimizer steps a batch: the ratio is to the log-probs from before the first one.
    settings = settings | {
        "num_generations": GROUP,
        "per_device_train_batch_size": SIZE,
        "steps_per_generation": 2,
    }
    settings |= {"max_completion_length": RESPONSE, "bf16": False, "gradient_checkpointing": False}
    (tmp_path / "trl.json").write_text(json.dumps(settings))
    batch = make_batch()
    model = make_tiny_model()
    loss = total(translated_loss(tmp_path / "trl.json", model)(ours(batch)))

    make_tiny_model().save_pretrained(
        tmp_path / "model"
    )  # it loads the reference model by the trained model's name
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    config = trl.GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], **settings)
    data = datasets.Dataset.from_dict({"prompt": ["a"] * SIZE})
    tokenizer = transformers.AutoTokenizer.from_pretrained(starter_path())
    trainer = trl.GRPOTrainer(other, len, config, data, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    other.train()  # as in its own loop; the model has no dropout
    inputs = {
        "prompt_ids": batch["tokens"][:, :PROMPT], "prompt_mask": torch.ones(SIZE, PROMPT, dtype=torch.long),
        "completion_ids": batch["tokens"][:, PROMPT:], "completion_mask": batch["mask"].long(),
        "old_per_token_logps": batch["old"], "ref_per_token_logps": batch["reference"],
        "advantages": batch["advantage"], "num_items_in_batch": 2 * batch["mask"].sum(),
    }  # fmt: skip
    theirs = trainer.compute_loss(trainer.model, inputs)
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(loss, model), gradient(theirs, other), rtol=1e-4, atol=1e-6)


class VerlConfig(dict[str, Any]):
    """verl's settings of an actor, by attribute and by key."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return VerlConfig(self[name]) if isinstance(self[name], dict) else self[name]


VERL = {
    "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.25, "clip_ratio_c": 1e9, "tau_pos": 1.0,
    "tau_neg": 1.05, "global_batch_info": {},
    "policy_loss": {
        "clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7
    },
}  # fmt: skip
CLIP = {"clip_epsilon": (0.2, 0.25)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "settings", "average"),
    [
        ("vanilla", GRPOLoss, CLIP, "token-mean"),
        ("vanilla", GRPOLoss, CLIP, "seq-mean-token-mean"),
        ("gspo", GRPOLoss, {**CLIP, "ratio_level": "sequence_token"}, "seq-mean-token-mean"),
        ("cispo", CISPOLoss, CLIP, "token-mean"),
        ("sapo", SAPOLoss, {}, "seq-mean-token-mean"),
        ("geo_mean", GMPOLoss, CLIP, "seq-mean-token-mean"),
        ("gpg", DemonstrationLoss, {}, "token-mean"),
        ("kl_cov", KLCovLoss, {"covariance_share": 0.3, "penalty": 0.7}, "token-mean"),
        (
            "clip_cov", ClipCovLoss, {**CLIP, "covariance_share": 1.0, "covariance_low": 0.2}, "token-mean"
        ),
    ],
)  # fmt: skip
def test_the_losses_are_those_of_verl(
    mode: str, kind: Any, settings: Any, average: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    # Some of verl's versions import a class that transformers 5 has renamed.
    vision = transformers.AutoModelForImageTextToText
    monkeypatch.setattr(transformers, "AutoModelForVision2Seq", vision, raising=False)
    verl = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    monkeypatch.setattr(verl, "ActorConfig", VerlConfig, raising=False)
    for seed in range(5):
        batch = ragged(seed)
        sampled, current = batch[keys.LOG_PROBS], batch["current"]
        if "cov" in mode:  # either policy's log-probs select the same tokens, and none is clipped
            sampled = batch[keys.LOG_PROBS] = current + 0.1
        actor = LogProbs(current)
        names = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
        loss = total(kind(actor, aggregation=names[average], **settings)(batch))
        loss.backward()
        log_prob, mask = current.clone().requires_grad_(), batch[keys.ASSISTANT_MASK].double()
        theirs, *_ = verl.POLICY_LOSS_REGISTRY[mode](
            old_log_prob=sampled, log_prob=log_prob, advantages=batch[keys.ADVANTAGE] * mask,
            response_mask=mask, loss_agg_mode=average, config=VerlConfig(VERL), rollout_is_weights=None,
        )  # fmt: skip
        theirs.backward()
        torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(actor.values.grad, log_prob.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_first_objective_is_that_of_torchrl(tmp_path: Path) -> None:
    """TorchRL's KL and entropy include prompt and padding (docs/torchrl.md), so they are not
    compared.
    """
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
    from transformers import AutoTokenizer

    (tmp_path / "rl.yaml").write_text(TORCHRL["grpo_gsm8k.yaml"])
    batch = make_batch()
    model = make_tiny_model()
    other = make_tiny_model()
    loss = translated_loss(tmp_path / "rl.yaml", model)(ours(batch))["loss_objective"]
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    actor = TransformersWrapper(
        other, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_model_input=True
    )
    theirs = TorchRLGRPOLoss(
        actor, kl_to_inference_coeff=1e-2, entropy_coeff=1e-4, masking_strategy="rlhf"
    )
    objective = theirs(ours(batch, (1, 1))).loss_objective
    torch.testing.assert_close(loss, objective, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient(loss, model), gradient(objective, other), rtol=1e-4, atol=1e-6
    )


def weighted(low: float, high: float) -> Token:
    return lambda ratio, log_prob, advantage: ratio.detach().clamp(low, high) * advantage * log_prob


def by_tokens(rows: list[list[Tensor]]) -> Tensor:
    return sum(sum(row) for row in rows) / sum(len(row) for row in rows)


def by_sequences(rows: list[list[Tensor]]) -> Tensor:
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def by_sums(rows: list[list[Tensor]]) -> Tensor:
    return sum(sum(row) for row in rows) / len(rows)


class LogProbs(TensorDictModuleBase):
    """An actor whose log-probs are its parameters, [B, T]."""

    in_keys = [keys.FULL]  # noqa: RUF012
    out_keys = [keys.CUR_LOG_PROBS, keys.ENTROPY]  # noqa: RUF012

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(values.clone())

    def forward(self, tensordict: TensorDict) -> TensorDict:
        tensordict.set(keys.CUR_LOG_PROBS, self.values * 1)
        return tensordict.set(keys.ENTROPY, torch.zeros_like(self.values))


def ragged(seed: int) -> TensorDict:
    """Return log-probs of the current, the proximal and the sampling policy, [B, T], in float64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, SIZE, RESPONSE, generator=generator, dtype=torch.float64)
    length = torch.randint(1, RESPONSE + 1, (SIZE, 1), generator=generator)
    current = -noise[0].abs()
    proximal = -noise[0].abs() + 0.6 * noise[1]
    return TensorDict(
        {
            keys.FULL: torch.zeros(SIZE, RESPONSE, dtype=torch.long), "current": current, keys.PROX_LOG_PROBS: proximal,
            keys.LOG_PROBS: proximal + 0.8 * noise[2], keys.ASSISTANT_MASK: torch.arange(RESPONSE) < length,
            keys.ADVANTAGE: torch.randn(SIZE, 1, generator=generator, dtype=torch.float64),
            keys.TRUNCATED: torch.zeros(SIZE, 1, dtype=torch.bool),
        },
        [SIZE],
    )  # fmt: skip


def loop(
    current: Tensor,
    batch: TensorDict,
    objective: Token,
    average: Callable[[list[list[Tensor]]], Tensor],
    level: str = "token",
    weight: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return a peer's loss: the ratio to the proximal policy, times a weight of the proximal over
    the sampling policy.
    """
    rows = []
    for row in range(SIZE):
        tokens = [place for place in range(RESPONSE) if batch[keys.ASSISTANT_MASK][row, place]]
        logs = [current[row, place] - batch[keys.PROX_LOG_PROBS][row, place] for place in tokens]
        mean = sum(logs) / len(logs)
        values = []
        for place, log_ratio in zip(tokens, logs, strict=True):
            log_prob, sampled = current[row, place], batch[keys.LOG_PROBS][row, place]
            own = mean.detach() + log_prob - log_prob.detach()
            ratio = {"token": log_ratio, "sequence": mean, "sequence_token": own}[level].exp()
            value = objective(ratio, log_prob, batch[keys.ADVANTAGE][row, 0])
            if weight is not None:
                value = value * weight((batch[keys.PROX_LOG_PROBS][row, place] - sampled).exp())
            values.append(value)
        rows.append(values)
    return -average(rows)


def masked(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight * (weight <= cap)


def truncated(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.clamp(max=cap)


def verl_script(**settings: Any) -> str:
    words = " ".join(
        f"actor_rollout_ref.actor.{key.replace('__', '.')}={value}"
        for key, value in settings.items()
    )
    return (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
        f"data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4 trainer.n_gpus_per_node=1 {words}"
    )


def trl_file(**settings: Any) -> str:
    return json.dumps(
        {
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "steps_per_generation": 2,
            **settings,
        }
    )


def areal_file(**settings: Any) -> str:
    actor = {"path": "m", "kl_ctl": 0.0, "ppo_n_minibatches": 2, **settings}
    return json.dumps(
        {
            "gconfig": {"n_samples": 4},
            "train_dataset": {"path": "d", "batch_size": 8},
            "actor": actor,
        }
    )


MODE = "policy_loss__loss_mode"
IS = " algorithm.rollout_correction.rollout_is=token"
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "trl_luspo.json": (trl_file(loss_type="luspo", delta=2.0), (clip(dual=2.0), by_sums), {}),
    "trl_luspo_sequence.json": (
        trl_file(loss_type="luspo", importance_sampling_level="sequence"), (clip(), by_sums), {"level": "sequence"},
    ),
    "trl_cispo.json": (trl_file(loss_type="cispo", epsilon_high=5.0, delta=2.0), (weighted(0.0, 5.0), by_tokens), {}),
    "trl_sapo.json": (trl_file(loss_type="sapo", delta=2.0), (sapo(), by_sequences), {}),
    "verl_vanilla.sh": (verl_script(clip_ratio_high=0.28), (clip(0.2, 0.28, 3.0), by_tokens), {}),
    "verl_gspo.sh": (
        verl_script(**{MODE: "gspo"}, loss_agg_mode="token-mean"), (clip(), by_sequences), {"level": "sequence_token"},
    ),
    "verl_sapo.sh": (verl_script(loss_agg_mode="seq-mean-token-sum", **{MODE: "sapo"}), (sapo(), by_sequences), {}),
    "verl_cispo.sh": (verl_script(**{MODE: "cispo"}, clip_ratio_high=0.28), (weighted(0.8, 1.28), by_tokens), {}),
    "verl_cispo_wide.sh": (
        verl_script(**{MODE: "cispo"}, clip_ratio_low=10, clip_ratio_high=4.0), (weighted(0.0, 5.0), by_tokens), {},
    ),
    "verl_gpg.sh": (
        verl_script(**{MODE: "gpg"}, loss_agg_mode="seq-mean-token-sum"), (weighted(1.0, 1.0), by_sums), {},
    ),
    "verl_rollout_is.sh": (
        verl_script(clip_ratio_c=10.0) + IS, (clip(dual=10.0), by_tokens), {"weight": truncated(2.0)},
    ),
    "verl_sapo_rollout_is.sh": (
        verl_script(**{MODE: "sapo"}) + IS, (sapo(), by_sequences), {"weight": truncated(2.0)},
    ),
    "areal_decoupled.json": (areal_file(use_decoupled_loss=True), (clip(), by_tokens), {}),
    "areal_mask.json": (
        areal_file(use_decoupled_loss=True, rejection_sampling={"upper": 2.0}), (clip(), by_tokens),
        {"weight": masked(2.0)},
    ),
    "areal_clamp.json": (
        areal_file(use_decoupled_loss=True, c_clip=3.0, rejection_sampling={"action": "clamp"}),
        (clip(dual=3.0), by_tokens), {"weight": truncated(5.0)},
    ),
    "areal_sapo.json": (
        areal_file(use_sapo_loss=True, recompute_logprob=True, c_clip=3.0), (sapo(), by_tokens), {},
    ),
}  # fmt: skip
"""File, its objective and average, and further arguments of ``loop``."""


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradient_are_those_of_the_peers_formula(
    name: str, tmp_path: Path
) -> None:
    text, formula, options = CASES[name]
    (tmp_path / name).write_text(text)
    config = translated_config(tmp_path / name)
    batch_transforms(config)
    for seed in range(2):
        batch = ragged(seed)
        actor = LogProbs(batch["current"])
        loss = total(make_loss(config, actor)(batch))
        current = batch["current"].clone().requires_grad_()
        wanted = loop(current, batch, *formula, **options)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            gradient(loss, actor), torch.autograd.grad(wanted, current)[0].flatten()
        )


def test_a_sum_that_verl_does_not_divide_by_its_sequences_is_said(tmp_path: Path) -> None:
    (tmp_path / "verl.sh").write_text(
        verl_script(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=7)
    )
    batch = ragged(0)
    loss = total(
        make_loss(translated_config(tmp_path / "verl.sh"), LogProbs(batch["current"]))(batch)
    )
    torch.testing.assert_close(
        SIZE * 7 * loss, SIZE * loop(batch["current"], batch, clip(dual=3.0), by_sums)
    )
    differs = translate(read(tmp_path / "verl.sh"), "verl.sh").differs
    assert "optimizer.clip_grad_norm" in differs["actor_rollout_ref.actor.loss_agg_mode"]


def of_group(score: Tensor, leave_one_out: bool, scaled: bool) -> list[float]:
    values = []
    for index, value in enumerate(score.tolist()):
        group = score[index // GROUP * GROUP :][:GROUP].tolist()
        baseline = (sum(group) - value) / (GROUP - 1) if leave_one_out else sum(group) / GROUP
        mean = sum(group) / GROUP
        deviation = (sum((other - mean) ** 2 for other in group) / (GROUP - 1)) ** 0.5
        values.append((value - baseline) / (deviation + 1e-6 if scaled else 1.0))
    return values


@pytest.mark.parametrize(
    ("words", "options", "whitened"),
    [
        ("grpo_vectorized", (False, True), False),
        ("grpo_vectorized algorithm.norm_adv_by_std_in_grpo=False", (False, True), False),
        ("rloo_vectorized algorithm.lam=0.9", (True, False), False),
        ("reinforce_plus_plus_baseline", (False, False), True),
    ],
)
def test_the_advantages_of_verl_are_those_of_its_formula(
    words: str, options: tuple[bool, bool], whitened: bool, tmp_path: Path
) -> None:
    script = verl_script().replace("adv_estimator=grpo", f"adv_estimator={words}")
    (tmp_path / "verl.sh").write_text(script)
    batch = ragged(1).select(keys.ASSISTANT_MASK, keys.FULL, keys.LOG_PROBS)
    score = torch.rand(SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batch[keys.REWARD], batch[keys.GROUP_ID] = (
        score.float()[:, None],
        (torch.arange(SIZE) // GROUP)[:, None],
    )
    for _, transform in batch_transforms(translated_config(tmp_path / "verl.sh")):
        batch = transform(batch)
    mask = batch[keys.ASSISTANT_MASK]
    wanted = torch.tensor(of_group(score, *options), dtype=torch.float64)[:, None] * mask
    if whitened:
        tokens = wanted[mask]
        wanted = (wanted - tokens.mean()) / (tokens.var() + 1e-8).sqrt() * mask
    torch.testing.assert_close(
        (batch[keys.ADVANTAGE] * mask).double(), wanted, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("scale", ["batch", "none", False])
def test_advantages_of_parts_are_not_scaled_by_what_trl_ignores(scale: Any, tmp_path: Path) -> None:
    settings = {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": scale}
    (tmp_path / "trl.json").write_text(trl_file(reward_funcs=["x.a", "x.b"], **settings))
    policy = translated_config(tmp_path / "trl.json").policy
    assert (policy.advantage_mean, policy.advantage_std) == ("group", "group")
