"""Resuming from a checkpoint: the run equals the uninterrupted one, and a mismatch is refused
first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.configs import compose_config
from tests.support.runs import (
    LORA,
    SMALL,
    at,
    changed,
    differences,
    numbers,
    reseal,
    run,
    state_in,
    state_of,
    steps,
)
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import ConfigError, plain
from torchrl_grpo.config.resumed import written
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.resume import Resume, find_resume
from torchrl_grpo.models import loading
from torchrl_grpo.reporting.metrics import read_jsonl

FULL = (
    "optimizer.warmup_steps=20",
    "optimizer.weight_decay=0.1",
    "train.optim_batch_size=8",
    "train.epochs=2",
)

CRITIC = ("algo=ppo", "critic.lr=1e-2", "train.optim_batch_size=8", "train.epochs=2")
AVERAGES = (
    "ref_model.refresh_every=2",
    "ref_model.decay=0.6",
    "policy.teacher_coef=0.1",
    "teacher.model=policy",
    "teacher.weights=ema",
    "teacher.decay=0.5",
    "optimizer.lr=1e-3",
)
ADAMW_8BIT = "optimizer.name=adamw_8bit"
MOMENTS = ("trainer", "optimizer", "state", "model.layers.0.self_attn.q_proj.weight")
TESTED = ("evaluation.num_prompts=8", "evaluation.k=2", "evaluation.frequency=2")
KINDS: dict[str, tuple[str, ...]] = {
    "full": (*FULL, *TESTED),
    "lora": LORA,
    "adamw_8bit": (ADAMW_8BIT,),
    "averages": AVERAGES,
    "lora_averages": (*LORA, *AVERAGES),
    "critic": CRITIC,
}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a run of 6 steps, which is made once."""

    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        run(folder, *KINDS[kind], steps(6), "train.checkpoint_frequency=3")
        return folder

    return make


@pytest.fixture
def full_run(whole_run: Callable[[str], Path]) -> Path:
    return whole_run("full")


@pytest.fixture(scope="module")
def torchao() -> None:
    pytest.importorskip("torchao")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "full",
        "lora_averages",
        "critic",
        *(
            pytest.param(kind, marks=pytest.mark.nightly)
            for kind in ("lora", "adamw_8bit", "averages")
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    kind: str,
    whole_run: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
    whole = whole_run(kind)
    rows = run(tmp_path, *KINDS[kind], steps(6), f"train.resume={at(whole, 3)}")
    assert f"Resuming after step 3 from {at(whole, 3)}" in capsys.readouterr().out.replace("\n", "")
    assert [row["step"] for row in rows] == [3, 4, 5, 6]
    expected = read_jsonl(whole / "metrics.jsonl")
    assert numbers(rows[1:], 4) == numbers(expected, 4)
    assert len({row["train/loss"] for row in rows[1:]}) == 3
    assert [row.get("eval/pass@1") for row in rows[1:]] == [
        row.get("eval/pass@1") for row in expected[4:]
    ]
    # Weights, moments, scheduler, counts, data order, the engine's and the process's random state.
    assert differences(state_of(at(tmp_path, 6)), state_of(at(whole, 6))) == []


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_the_moments_of_adamw_8bit_are_of_one_byte() -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = make_optimizer([weight], "adamw_8bit", lr=1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    assert (moment.codes.dtype, moment.codes.numel()) == (torch.uint8, moment.numel())


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_bfloat16_weights_move_by_less_than_their_rounding() -> None:
    """The next number below 1 in bfloat16 is 1 - 2**-8; the weights move by 2e-4 in each of 20
    steps, on average.
    """
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = make_optimizer([weight], "adamw_8bit", lr=2e-4)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16 and len(weight.unique()) > 1
    assert weight.float().mean().item() == pytest.approx(1 - 20 * 2e-4, abs=3e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_rounding_draws_the_same_numbers_whatever_others_drew() -> None:
    def weights_after(seed: int, steps: int = 3) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.full((2, 512), 1.0, dtype=torch.bfloat16))
        optimizer = make_optimizer([weight], "adamw_8bit", lr=2e-4)
        for _ in range(steps):
            torch.manual_seed(seed)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert torch.initial_seed() == seed
        return weight.detach()

    first = weights_after(0)
    assert torch.equal(first, weights_after(1))
    assert 0 < (first == 1.0).sum() < first.numel() and not torch.equal(first[0], first[1])
    assert not torch.equal(first, weights_after(0, steps=2))


@pytest.mark.slow
def test_templates_write_the_date_of_the_first_start(tmp_path: Path) -> None:
    """In this process, and in the reward workers."""
    (tmp_path / "dated.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ strftime_now('%d %H:%M:%S.%f') }} {{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (tmp_path / "dated.py").write_text(
        "from torchrl_grpo.host.clock import run_date\n"
        "def dated(response):\n    return {'reward': 0.5, 'time': run_date().timestamp()}\n"
    )
    options = (
        f"model.chat_template={tmp_path / 'dated.jinja'}",
        f"env.reward={{fn: '{tmp_path / 'dated.py'}:dated', weight: {{reward: 1}}}}",
        "env.reward_workers=1",
        "evaluation.num_prompts=4",
    )
    run(tmp_path / "first", *options, steps(1))
    run(tmp_path / "rest", *options, steps(2), f"train.resume={tmp_path / 'first'}")
    samples = [
        row for name in ("first", "rest") for row in read_jsonl(tmp_path / name / "samples.jsonl")
    ]
    [date] = {row["prompt"].removeprefix("<|user|>")[:18] for row in samples}
    [time] = {row["parts"]["dated/time"] for row in samples}
    assert datetime.fromtimestamp(time).strftime("%d %H:%M:%S.%f") == date
    assert {row["split"] for row in samples} == {"train", "test"}
    assert "TORCHRL_GRPO_DATE" not in os.environ


def test_a_resealed_date_is_refused(full_run: Path, tmp_path: Path) -> None:
    for number, date in enumerate(("yesterday", 5, None)):
        copy = shutil.copytree(at(full_run, 6), at(tmp_path / str(number), 6))
        with pytest.raises(ConfigError, match=r"train\.resume=.* must be a complete checkpoint"):
            resume_of(reseal(copy, date=date))


@pytest.mark.slow
def test_a_refreshed_reference_stays_when_the_run_goes_on_without(tmp_path: Path) -> None:
    """It does not become the base model again; the KL to it starts at 0."""
    whole = run(
        tmp_path / "whole", steps(4), "ref_model.refresh_every=3", "train.checkpoint_frequency=3"
    )
    rows = run(tmp_path / "rest", steps(4), f"train.resume={at(tmp_path / 'whole', 3)}")
    assert numbers(rows[1:], 4) == numbers(whole, 4)
    assert rows[1]["train/kl_k3_to_ref"] < 1e-9 < whole[3]["train/kl_k3_to_ref"]
    assert state_in(at(tmp_path / "rest", 4))["source"]["reference_version"] == 3


@pytest.mark.slow
def test_a_checkpoint_whose_reference_is_lost_is_refused(full_run: Path, tmp_path: Path) -> None:
    source = state_in(at(full_run, 6))["source"]
    path = changed(at(full_run, 6), at(tmp_path, 6), source=source | {"reference_version": 4})
    with pytest.raises(ConfigError, match=r"step 4, .* step 6 .*: use"):
        resume_of(path)
    path = changed(at(full_run, 6), at(tmp_path, 6), source=source | {"reference_version": 6})
    checkpoint = resume_of(path)
    assert checkpoint is not None and checkpoint.reference_version == 6


@pytest.mark.slow
def test_length_learning_rate_and_loss_may_change_on_resume(full_run: Path, tmp_path: Path) -> None:
    changes = (
        "optimizer.lr=2e-3",
        "optimizer.beta1=0.5",
        "policy.kl_coef=0",
        "train.dialog_turns_per_batch=16",
    )
    rows = run(tmp_path, *FULL, *changes, steps(7), f"train.resume={full_run}")
    assert [row["step"] for row in rows] == [6, 7]
    assert rows[1]["train/lr"] == pytest.approx(
        2e-3
    )  # 24 optimizer steps were made: the warm-up has ended
    [group, _] = state_in(at(tmp_path, 7))["trainer"]["optimizer"]["param_groups"]
    assert (group["lr"], group["initial_lr"], group["betas"]) == (2e-3, 2e-3, (0.5, 0.999))
    rows = run(
        tmp_path / "b",
        *FULL,
        "optimizer.lr=2e-3",
        steps(4),
        f"train.resume={at(full_run, 3)}",
        "train.epochs=1",
    )
    assert rows[1]["train/lr"] == pytest.approx(
        2e-3 * 13.5 / 20
    )  # the mean of the optimizer steps 13 and 14 of 20


@pytest.mark.slow
def test_fewer_sequences_at_a_time_change_neither_groups_nor_problems(
    full_run: Path, tmp_path: Path
) -> None:
    sizes = ("env.num_envs=8", "train.dialog_turns_per_batch=16")
    rows = run(tmp_path, *FULL, *TESTED, *sizes, steps(6), f"train.resume={at(full_run, 3)}")
    assert [row["step"] for row in rows] == [3, 4, 5, 6]
    drawn, expected = (state_of(at(folder, 6))["source"] for folder in (tmp_path, full_run))
    assert drawn["drawing"] == expected["drawing"] and drawn["ahead"] == expected["ahead"]
    mine, whole = (
        [
            (row["group"], row["query"])
            for row in read_jsonl(folder / "samples.jsonl")
            if row["step"] == 6 and "group" in row
        ]
        for folder in (tmp_path, full_run)
    )
    assert mine == whole and len(mine) == 16
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])


@pytest.fixture
def no_weights(full_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded before the checkpoint was checked")

    monkeypatch.setattr(loading, "load_model", load_model)


@pytest.mark.slow
@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["env.repeats=8"],
            r"env\.repeats=8 must be 4, .*checkpoint_000006 .*: use env\.repeats=4\.",
        ),
        (["seed=1"], r"seed=1 must be 0"),
        (["env.difficulty=3"], r"env\.difficulty=3 must be 2"),
        (["env.num_envs=32"], r"dialog_turns_per_batch=32 must be 16"),
        (["train.dialog_turns_per_batch=32"], r"dialog_turns_per_batch=32 must be 16"),
        (["train_model.lora.enabled=true"], r"train_model\.lora\.enabled=true must be false"),
        (["optimizer.warmup_steps=0"], r"optimizer\.warmup_steps=0 must be 20"),
        (["train.total_dialog_turns=96"], r"total_dialog_turns=96 must be more than the 96 .*=192"),
        (["train.resume=/nowhere"], r"train\.resume=/nowhere must be .* but it does not exist"),
        (["train.resume=/tmp/.."], r"train\.resume=/tmp/\.\. must be .* but it has none"),
        (
            [f"train.resume={__file__}"],
            r"must be a complete checkpoint of this library, but test_resume\.py is a file",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_loaded(
    overrides: list[str], message: str, full_run: Path, tmp_path: Path
) -> None:
    config = compose_config(*SMALL, *FULL, steps(9), f"train.resume={full_run}", *overrides)
    with pytest.raises(ConfigError, match=message):
        build(config, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_values_are_named_as_the_command_line_takes_them() -> None:
    values = [["q_proj", "v_proj"], None, True, "arithmetic", 2]
    assert [written(value) for value in values] == [
        "[q_proj,v_proj]",
        "null",
        "true",
        "arithmetic",
        "2",
    ]


def resume_of(path: Path) -> Resume | None:
    config = compose_config(*SMALL, *FULL, steps(9), f"train.resume={path}")
    return find_resume(config, plain(config))


@pytest.mark.slow
@pytest.mark.usefixtures("no_weights")
def test_a_checkpoint_of_other_data_is_refused_by_name(full_run: Path, tmp_path: Path) -> None:
    source = state_in(at(full_run, 6))["source"]
    source["drawing"] |= {"num_problems": 9, "position": 0}
    path = changed(at(full_run, 6), at(tmp_path, 6), source=source)
    with pytest.raises(ConfigError, match=r"num_problems=9, .* 4096: use"):
        build(compose_config(*SMALL, *FULL, steps(9), f"train.resume={path}"), tmp_path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("step",), "1"),
        (("source",), None),
        (("source", "drawing", "position"), 10**9),
        (("source", "ahead"), [1]),
        (("source", "ahead"), [[1, 1]] * 99),
        (("source", "engines"), [{"generator": 5}]),
        (("source", "engines"), [{"policy_version": 5, "transforms": [1]}]),
        (("trainer", "optimizer"), None),
        (("trainer", "version"), -1),
        (("trainer", "version"), 7),
        (("trainer", "optimizer", "param_groups"), []),
        ((*MOMENTS, "exp_avg"), torch.zeros(3)),
        ((*MOMENTS, "step"), torch.tensor(-1.0)),
        ((*MOMENTS, "step"), torch.tensor(torch.nan)),
        ((*MOMENTS, "step"), torch.zeros(()).to_sparse()),
        ((*MOMENTS, "step"), 1),
        ((*MOMENTS, "step"), torch.zeros(5)),
        (("source", "engines"), [{"policy_version": 5, "generator": "x"}]),
        (
            ("source", "engines"),
            [{"policy_version": 5, "generator": torch.zeros(5056, dtype=torch.uint8)}],
        ),
        (("rng", "torch"), "x"),
        (("rng", "torch"), torch.zeros(10, dtype=torch.uint8)),
        (("rng", "python"), [3, [1], None]),
    ],
)
def test_a_resealed_state_of_other_types_is_refused(
    where: tuple[str, ...], value: object, full_run: Path, tmp_path: Path
) -> None:
    state = state_in(at(full_run, 6))
    node = state
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    with pytest.raises(ConfigError, match=r"train\.resume=.* must be a complete checkpoint"):
        resume_of(changed(at(full_run, 6), at(tmp_path, 6), **state))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights/model.norm.weight", torch.full((128,), torch.nan)),
        (f"moments/exp_avg/{MOMENTS[-1]}", torch.full((128, 128), torch.nan)),
        (f"moments/exp_avg_sq/{MOMENTS[-1]}", torch.full((128, 128), -1.0)),
    ],
)
def test_resealed_tensors_of_useless_values_are_refused(
    name: str, value: torch.Tensor, full_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"train\.resume=.* must be a complete .*{name} has"):
        resume_of(changed(at(full_run, 6), at(tmp_path, 6), {name: value}))


@pytest.mark.parametrize("kind", ["weights", "moments/exp_avg"])
def test_resealed_tensors_of_another_shape_are_refused(
    kind: str, full_run: Path, tmp_path: Path
) -> None:
    tensors = {f"{kind}/{MOMENTS[-1]}": torch.zeros(3)}
    path = changed(at(full_run, 6), at(tmp_path, 6), tensors)
    config = compose_config(*SMALL, *FULL, steps(9), f"train.resume={path}")
    with pytest.raises(ConfigError, match=r"train\.resume=.* whose state fits .*1 unknown"):
        build(config, tmp_path / "run")


@pytest.mark.slow
def test_a_run_gets_no_critic_when_it_resumes_and_loses_none(
    full_run: Path, whole_run: Callable[[str], Path], tmp_path: Path
) -> None:
    """Other weights of the value's loss are allowed."""
    more = "algo=ppo", "optimizer.warmup_steps=20"
    config = compose_config(*SMALL, *more, steps(9), f"train.resume={at(full_run, 6)}")
    with pytest.raises(
        ConfigError,
        match=r"^policy\.value_coef=0\.5 must be 0\.0, .* policy\.value_coef=0\.0 and leave algo out",
    ):
        build(config, tmp_path)
    path = f"train.resume={at(whole_run('critic'), 6)}"
    with pytest.raises(
        ConfigError,
        match=r"^policy\.value_coef=0\.0 must be 0\.5, .* policy\.value_coef=0\.5 and leave algo out",
    ):
        build(compose_config(*SMALL, "algo=reinforce_pp", steps(9), path), tmp_path)
    config = compose_config(*SMALL, *CRITIC, "policy.value_coef=0.25", steps(9), path)
    build(config, tmp_path).close()


@pytest.mark.slow
def test_groups_that_were_drawn_ahead_are_played_first(full_run: Path, tmp_path: Path) -> None:
    """The synchronous run resumes with a number of groups that is not a multiple of a batch."""
    source = state_in(at(full_run, 6))["source"]
    assert source["ahead"] == []
    ahead = [[20, 7], [22, 9], [25, 100], [26, 4], [29, 5]]
    drawing = source["drawing"] | {"next_group": 30}
    changed(at(full_run, 6), at(tmp_path, 6), source=source | {"drawing": drawing, "ahead": ahead})
    rows = run(
        tmp_path / "rest",
        *FULL,
        steps(8),
        f"train.resume={at(tmp_path, 6)}",
        "train.checkpoint_frequency=1",
    )
    assert [row["step"] for row in rows] == [6, 7, 8]
    seven, eight = (state_in(at(tmp_path / "rest", step))["source"] for step in (7, 8))
    assert seven["ahead"] == [[29, 5]] and seven["drawing"] == drawing
    assert eight["ahead"] == [] and eight["drawing"] == drawing | {
        "next_group": 33,
        "position": drawing["position"] + 3,
    }
    samples = read_jsonl(tmp_path / "rest" / "samples.jsonl")
    last = [row["group"] for row in samples if row["step"] == 8]
    assert sorted(set(last)) == [29, 30, 31, 32]
