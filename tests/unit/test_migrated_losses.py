"""The first step of a translated run: its loss and gradient are the peer's, on the same batch of the same model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from tests.support.configs import compose_config
from tests.support.losses import total
from tests.support.models import make_tiny_model
from tests.support.peer_configs import TORCHRL
from torchrl_grpo import keys
from torchrl_grpo.advice.migrate.readers import read
from torchrl_grpo.advice.migrate.translation import translate
from torchrl_grpo.assembly.algorithm import make_loss
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.scripts.migrate import command
from torchrl_grpo.starter import starter_path

PROMPT, RESPONSE, SIZE, GROUP = 5, 7, 8, 4
NOISE = torch.tensor([-0.5, -0.1, 0.1, 0.5])


def make_batch() -> dict[str, Tensor]:
    """Padded on the right: tokens [B, T], and what belongs to the response's tokens [B, Tr]."""
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
    """The batch as a collector gives it, under TorchRL's keys."""
    rows = []
    for row in range(SIZE):
        end = PROMPT + int(batch["mask"][row].sum())
        sampled = torch.arange(end) >= PROMPT
        old, reference = (torch.cat([torch.zeros(PROMPT), batch[name][row]])[:end] for name in ("old", "reference"))
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
    """The loss of the command line that is printed for a file."""
    words = shlex.split(" ".join(command(translate(read(path), path.name))))[2:]
    return make_loss(compose_config(*words, name="grpo_gsm8k"), TokenScorer(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.5},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
    ],
    ids=lambda settings: "_".join(str(value) for value in list(settings.values())[:2]),
)
def test_the_first_loss_is_that_of_trl(settings: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    # Two optimizer steps a batch: the ratio is to the log-probs from before the first.
    settings = settings | {"num_generations": GROUP, "per_device_train_batch_size": SIZE, "steps_per_generation": 2}
    settings |= {"max_completion_length": RESPONSE, "bf16": False, "gradient_checkpointing": False}
    (tmp_path / "trl.json").write_text(json.dumps(settings))
    batch = make_batch()
    model = make_tiny_model()
    loss = total(translated_loss(tmp_path / "trl.json", model)(ours(batch)))

    make_tiny_model().save_pretrained(tmp_path / "model")  # it loads the reference model by the name of the trained one
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
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


def test_the_first_objective_is_that_of_torchrl(tmp_path: Path) -> None:
    """Its KL and entropy are means over the prompt and padding too (docs/torchrl.md), so they are left out."""
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
    from transformers import AutoTokenizer

    (tmp_path / "rl.yaml").write_text(TORCHRL["grpo_gsm8k.yaml"])
    batch, model, other = make_batch(), make_tiny_model(), make_tiny_model()
    loss = translated_loss(tmp_path / "rl.yaml", model)(ours(batch))["loss_objective"]
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    actor = TransformersWrapper(other, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_model_input=True)
    theirs = TorchRLGRPOLoss(actor, kl_to_inference_coeff=1e-2, entropy_coeff=1e-4, masking_strategy="rlhf")
    objective = theirs(ours(batch, (1, 1))).loss_objective
    torch.testing.assert_close(loss, objective, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(loss, model), gradient(objective, other), rtol=1e-4, atol=1e-6)
