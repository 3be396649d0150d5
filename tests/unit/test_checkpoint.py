"""Checkpoints on disk: whole or named as damaged, never of weights that are of no use."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.configs import compose_config
from tests.support.runs import SMALL, at, changed, run, steps
from torchrl_grpo.checkpoint_files import SealedFile, check_whole, read_manifest
from torchrl_grpo.config import ConfigError, plain
from torchrl_grpo.errors import NonFiniteError
from torchrl_grpo.learner.checkpoint import read_checkpoint
from torchrl_grpo.learner.resume import Resume, find_resume


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(folder, steps(2), "train.checkpoint_frequency=1", "logging.sample_frequency=1")
    return folder


def found(folder: Path) -> Resume:
    config = compose_config(*SMALL, steps(9), f"train.resume={folder}")
    resume = find_resume(config, plain(config), 0)
    assert resume is not None
    return resume


def test_each_of_200_flipped_bits_and_4_kib_of_zeros_is_found(saved: Path, tmp_path: Path) -> None:
    whole, draw = bytearray(at(saved, 2).read_bytes()), random.Random(0)
    path, accepted = tmp_path / "checkpoint_000002.pt", 0
    for _ in range(200):
        place, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        whole[place] ^= bit
        path.write_bytes(whole)
        whole[place] ^= bit
        accepted += _is_accepted(path)
    path.write_bytes(whole[:500_000] + bytes(4096) + whole[504_096:])
    assert accepted + _is_accepted(path) == 0
    path.write_bytes(whole)
    check_whole(path)


def _is_accepted(path: Path) -> bool:
    try:
        check_whole(path)
    except ValueError:
        return False
    return True


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        changed(at(saved, step), at(tmp_path, step))
    data = bytearray(at(tmp_path, 2).read_bytes())
    data[400_000] ^= 1
    at(tmp_path, 2).write_bytes(data)
    with pytest.raises(ConfigError, match=r"checkpoint_000002\.pt is damaged: its contents do not have the checksum"):
        found(at(tmp_path, 2))
    resume = found(tmp_path)
    assert (resume.step, resume.path) == (1, at(tmp_path, 1))


def test_a_weight_that_is_nan_is_named_before_anything_is_loaded(saved: Path, tmp_path: Path) -> None:
    trainer = torch.load(at(saved, 2), weights_only=True)["trainer"]
    name = next(name for name in trainer["model"] if "q_proj" in name)
    trainer["model"][name][0, 0] = torch.nan
    path = changed(at(saved, 2), at(tmp_path, 2), trainer=trainer)
    with pytest.raises(ConfigError, match=rf"is of no use: the weight {name} has values that are not finite"):
        found(path)


def test_a_pickle_is_refused_unread_and_without_advice_to_trust_it(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "canary",)

    path = at(tmp_path, 1)
    path.parent.mkdir()
    with path.open("wb") as file:
        sealed = SealedFile(file)
        torch.save({"step": Canary()}, sealed)
        sealed.seal({})
    with pytest.raises(ConfigError, match=r"cannot be read \(UnpicklingError: Weights only load failed\)"):
        found(path)
    assert not (tmp_path / "canary").exists()


def test_the_manifest_says_what_is_inside_without_torch(saved: Path) -> None:
    manifest, state = read_manifest(at(saved, 2)), read_checkpoint(at(saved, 2))
    assert manifest["step"] == state["step"] == 2
    assert manifest["config"] == state["config"]


def test_weights_that_a_step_made_useless_are_never_saved(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"not finite after step 1.* lower optimizer\.lr than 1e\+10"):
        run(tmp_path, steps(3), "optimizer.lr=1e10", "train.checkpoint_frequency=1")
    with pytest.raises(NonFiniteError, match=r"not finite after step 1, .* use a lower optimizer\.lr\."):
        run(tmp_path / "b", steps(3), "optimizer.lr=1e10")
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.tmp"))
