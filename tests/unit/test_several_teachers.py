"""Several teachers: each scores its own data sets, on devices of its own or shared ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.configs import SMALL, compose_config
from torchrl_grpo import keys
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.config import ConfigError
from torchrl_grpo.runtime.placement import DevicePlan
from torchrl_grpo.starter import starter_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two teachers with different weights than the starter's, and three data sets."""
    path = tmp_path_factory.mktemp("teachers")
    for name, factor in (("a", 1.3), ("b", 0.7)):
        model = AutoModelForCausalLM.from_pretrained(starter_path())
        with torch.no_grad():
            model.get_input_embeddings().weight[20:60] *= factor
        model.save_pretrained(path / name)
        AutoTokenizer.from_pretrained(starter_path()).save_pretrained(path / name)
    for number, name in enumerate(("math", "code", "rest")):
        rows = [{"question": f"{n}+{number}=?", "answer": str(n + number)} for n in range(40)]
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def overrides(folder: Path, *names: str) -> list[str]:
    options = "columns: {answer: answer}, test_fraction: 0.2, reward: gsm8k"
    data = ", ".join(f"{{dataset: {folder}/{name}.jsonl, {options}}}" for name in names)
    teachers = f"[{{model: {folder}/a, datasets: [math]}}, {{model: {folder}/b, datasets: [code]}}]"
    return [*SMALL, "algo=distill", f"env.datasets=[{data}]", f"teachers={teachers}"]


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 20])
def test_each_teacher_scores_its_own_data_sets(
    top_k: int | None, folder: Path, tmp_path: Path
) -> None:
    more = (
        [] if top_k is None else ["policy.teacher_divergence=jsd", f"policy.teacher_top_k={top_k}"]
    )
    config = compose_config(
        *overrides(folder, "math", "code", "rest"),
        *more,
        "env.num_envs=48",
        "train.optim_batch_size=48",
        "train.total_dialog_turns=48",
    )
    run = build(config, tmp_path)
    models: dict[str, Any] = {
        name: worker.part.scoring.scoring.scorer.model
        for name, worker in zip(("math", "code"), run.rollouts.teachers, strict=True)
    }
    try:
        run.fit()
        batch, row = run.learner._batch, run.logger.last_row
    finally:
        run.close()
    assert batch is not None
    seen = set()
    for sequence in batch.unbind(0):
        name, mask = sequence[keys.DATASET], sequence[keys.ASSISTANT_MASK]
        seen.add(name)
        assert bool(sequence[keys.TEACHER_VALID]) == (name != "rest")
        if top_k is not None:
            assert sequence[keys.TEACHER_STATES].shape == (int(mask.sum()), 2 * top_k + 1)
            assert bool(sequence[keys.TEACHER_STATES].any()) == (name != "rest")
        elif name == "rest":
            assert not sequence[keys.ADVANTAGE].any()
        else:
            with torch.no_grad():
                logits = models[name](sequence[keys.FULL][None]).logits[0, :-1]
            tokens = sequence[keys.FULL][1:, None]
            expected = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
            log_probs = sequence[keys.TEACHER_LOG_PROBS]
            torch.testing.assert_close(log_probs[mask], expected[mask[1:]], rtol=1e-4, atol=1e-4)
    assert seen == {"math", "code", "rest"}
    share = 1 - batch[keys.TEACHER_VALID].float().mean().item()
    assert row["rollout/without_teacher"] == pytest.approx(share)


def test_teachers_share_devices_or_have_their_own(folder: Path) -> None:
    cpu = torch.device("cpu")
    gpus = [torch.device("cuda", index) for index in range(4)]
    plan = DevicePlan((cpu,), ((cpu,),), (), False, (cpu,))
    shared = plan.with_teachers(2)
    assert shared.teacher == (cpu, cpu) and not shared.distributed
    own = DevicePlan((gpus[0],), ((gpus[0],),), (), True, tuple(gpus[1:3])).with_teachers(2)
    assert own.teacher == tuple(gpus[1:3]) and not own.distributed
    assert DevicePlan((cpu,), ((cpu,),), (), False, tuple(gpus)).with_teachers(2).distributed
    assert plan.with_teachers(1) == plan
    context = prepare(compose_config(*overrides(folder, "math", "code")))
    assert context.plan.teacher == (cpu, cpu)
    row = shares(context)["teacher"].row()
    assert row["devices"] == "2 x cpu"


@pytest.mark.parametrize(
    ("teachers", "message"),
    [
        ("[{model: A, datasets: [math]}, {model: B, datasets: [math]}]", "must be several, each "),
        ("[{model: A, datasets: [math]}]", "must be several, each with a model"),
        ("[{model: A, datasets: [math]}, {datasets: [code]}]", "must be several, each with a mod"),
        ("[{model: A, datasets: [math]}, {model: B}]", "must be several, each with a model"),
        (
            "[{model: A, datasets: [math]}, {model: B, datasets: [code], address: [http://x:1]}]",
            "as many addresses as the others",
        ),
    ],
)
def test_teachers_without_a_data_set_of_their_own_are_refused(teachers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"teachers=.* {message}"):
        compose_config(*SMALL, "algo=distill", f"teachers={teachers}")


def test_a_data_set_that_is_not_there_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"teachers\[1\]\.datasets=.* \['math', 'rest'\], but cod"
    ):
        prepare(compose_config(*overrides(folder, "math", "rest")))
