"""TorchRL's distillation loss and ours accept each other's batches, and agree where they compute
the same thing.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import DistillationLoss
from transformers import AutoTokenizer

from tests.support.models import make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.starter import starter_path
from torchrl_grpo.transforms.kl_scoring import KLScoring


def test_torchrls_loss_of_a_batch_that_ours_scored_equals_our_k3() -> None:
    """TorchRL's value and gradient are those of our loss's k3 with the teacher as reference and no
    advantage.
    """
    rows = []
    for number in range(3):
        tokens = torch.randint(5, 261, (9,), generator=torch.Generator().manual_seed(number))
        mask = torch.arange(9) > 2 + number
        rows.append(
            TensorDict(
                {keys.FULL: tokens, keys.ASSISTANT_MASK: mask, keys.ATTENTION_MASK: mask | True}
            )
        )
    student, teacher = make_tiny_model(0), make_tiny_model(1)
    batch = KLScoring(TokenScorer(teacher), out_key=keys.TEACHER_LOG_PROBS)(lazy_stack(rows))
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    wrapper = TransformersWrapper(
        student, tokenizer=tokenizer, generate=False, input_mode="tokens", pad_output=False
    )
    theirs = DistillationLoss(wrapper, tokenizer=tokenizer)
    theirs.set_keys(history=keys.FULL)
    assert theirs.tensor_keys.teacher_log_prob == keys.TEACHER_LOG_PROBS
    expected = theirs(batch).loss_distill
    wanted = torch.autograd.grad(expected, list(student.parameters()))

    for row in batch.unbind(0):
        row.set(keys.ADVANTAGE, torch.zeros(1)).set(keys.LOG_PROBS, torch.zeros(9))
    ours = GRPOLoss(TokenScorer(student), kl_to_ref_coeff=1.0, kl_estimator="k3")
    ours.set_keys(ref_log_probs=keys.TEACHER_LOG_PROBS)
    out = ours(batch)
    torch.testing.assert_close(out["loss_kl_to_ref"], expected, rtol=1e-4, atol=1e-5)
    assert out["kl_k3_to_teacher"] > 1 and out["loss_objective"] == 0
    grads = torch.autograd.grad(out["loss_kl_to_ref"], list(student.parameters()))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
