"""Private names of libraries: each does what this package needs of it."""

from __future__ import annotations

import pytest
import torch

from torchrl_grpo.compat.torch import mark_overflow, norms, release_shared_memory


def test_norms_are_those_of_each_tensor() -> None:
    assert [norm.item() for norm in norms([torch.tensor([3.0, 4.0]), torch.tensor([[5.0], [12.0]])])] == [5.0, 13.0]


def test_a_marked_overflow_halves_the_loss_scale() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for marked, scale in ((False, 8.0), (True, 4.0)):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        if marked:
            mark_overflow(scaler, optimizer)
        scaler.update()
        assert scaler.get_scale() == scale


def test_torch_has_the_function_that_gives_up_memory_of_cuda_ipc() -> None:
    with pytest.raises((TypeError, RuntimeError)):  # and no AttributeError
        release_shared_memory()
