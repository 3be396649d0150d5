"""The simulated loop compared with hand computations, and the plan with its own numbers."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from torchrl_grpo.config import ConfigError, compose
from torchrl_grpo.extras.plan.command import main, parse, settings_of
from torchrl_grpo.extras.plan.hardware import GPUS, SHAPES, Workload, model_shape
from torchrl_grpo.extras.plan.simulation import Costs, Loop, Simulation
from torchrl_grpo.extras.plan.splits import Settings, Split, best_splits, simulate
from torchrl_grpo.models.memory import Shape, StepSetup
from torchrl_grpo.starter import starter_path

WORK = Workload(
    shape=SHAPES["qwen2.5-7b"],
    group_size=8,
    prompt=100.0,
    response=300.0,
    longest=1000,
    groups=64,
    passes=1,
    optim_steps=1,
    step=StepSetup(16_384, 512, passes=1, number=2, master=4, checkpoints=True),
    engine_number=2,
    reference_number=2,
    backend="vllm",
    recomputes=False,
    scores=True,
    shards_reference=False,
    broadcast=False,
    reward_s=0.0,
)
SETTINGS = Settings(GPUS["h100"], WORK, max_staleness=1, engine_size=1, waits=False, rows=512)


def test_with_staleness_0_a_step_is_the_sum_of_its_stages() -> None:
    costs = Costs(
        sample=[2.0], train=1.0, score=0.5, publish=0.25, update=0.125, reward_s=4.0, hop_s=0.0625
    )
    result = Simulation(Loop(groups_per_batch=1, max_staleness=0), costs).run()
    assert result.step_s == 2.0 + 1.0 + 0.5 + 0.25 + 0.125 + 4.0 + 3 * 0.0625
    assert (result.staleness_mean, result.staleness_max) == (0.0, 0)


def test_two_samplers_halve_the_sampling_of_a_synchronous_step() -> None:
    costs = Costs(sample=[2.0], train=1.0)
    one = Simulation(Loop(groups_per_batch=4, samplers=1), costs).run().step_s
    two = Simulation(Loop(groups_per_batch=4, samplers=2), costs).run().step_s
    assert (one, two) == (4 * 2.0 + 1.0, 2 * 2.0 + 1.0)


@pytest.mark.parametrize(("sample", "train", "longest"), [(2.0, 1.0, 2.0), (1.0, 3.0, 3.0)])
def test_with_enough_staleness_a_step_is_its_longest_stage(
    sample: float, train: float, longest: float
) -> None:
    loop = Loop(groups_per_batch=1, max_staleness=20)
    result = Simulation(loop, Costs(sample=[sample], train=train, score=0.5)).run(
        batches=100, warm_up=40
    )
    assert result.step_s == pytest.approx(longest, rel=1e-6)
    assert result.learner_share == pytest.approx(train / longest)
    assert result.reference_share == pytest.approx(0.5 / longest)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_on_staleness_holds_and_is_reached_by_a_slow_learner(bound: int) -> None:
    result = Simulation(
        Loop(groups_per_batch=4, max_staleness=bound), Costs(sample=[0.01, 0.03], train=5.0)
    ).run()
    assert result.staleness_max == bound
    assert result.groups_in_progress <= 4 * (bound + 1)


def test_littles_law_holds() -> None:
    loop = Loop(
        groups_per_batch=8,
        max_staleness=2,
        samplers=3,
        concurrent_tasks=4,
        engine_speed=lambda jobs: 1 / jobs,
    )
    result = Simulation(loop, Costs(sample=[0.3, 0.5, 1.1], train=1.0, score=0.1)).run(batches=400)
    groups_a_second = 8 / result.step_s
    assert result.groups_in_progress == pytest.approx(groups_a_second * result.group_s, rel=0.01)


def test_actors_that_share_cores_slow_each_other_down() -> None:
    """Sampling takes 1 s of a core and training 1 s: on 2 cores they overlap, on 1 they cannot."""
    costs = Costs(sample=[1.0], train=1.0)
    for cores, step_s in ((2, 1.0), (1, 2.0)):
        loop = Loop(
            1, max_staleness=1, serial=True, cores=lambda jobs, cores=cores: min(1.0, cores / jobs)
        )
        assert Simulation(loop, costs).run().step_s == pytest.approx(step_s)


def test_an_engine_that_waits_for_its_tasks_updates_between_them() -> None:
    """A batch has two tasks of 1 and 3 s. With keep, only the update interrupts the sampler; with
    wait, it drains first.
    """
    costs = Costs(sample=[1.0, 3.0], train=0.5, update=0.25)
    steps = {
        waits: Simulation(Loop(2, max_staleness=3, concurrent_tasks=2, waits=waits), costs)
        .run(60)
        .step_s
        for waits in (True, False)
    }
    assert steps[False] == pytest.approx(2.0 + 0.25)  # two slots, 4 s of work a batch
    assert steps[True] > steps[False]


def test_a_slow_reward_is_hidden_by_further_tasks() -> None:
    costs = Costs(sample=[1.0], train=0.5, reward_s=3.0)
    hidden = Simulation(
        Loop(1, max_staleness=4, serial=True, concurrent_tasks=5, waits=False), costs
    ).run(60)
    alone = Simulation(Loop(1, max_staleness=4, serial=True), costs).run(60)
    assert (hidden.step_s, alone.step_s) == (pytest.approx(1.0), pytest.approx(4.0))


def test_the_same_loop_gives_the_same_result() -> None:
    loop = Loop(groups_per_batch=16, max_staleness=1, samplers=5, references=2, concurrent_tasks=3)
    costs = Costs(sample=[0.5, 0.75, 2.0], train=1.5, score=0.125, publish=0.1, update=0.3)
    assert Simulation(loop, costs).run() == Simulation(loop, costs).run()


def test_a_shape_is_read_from_the_models_config(tmp_path: Path) -> None:
    starter = model_shape("starter", starter_path())
    linear = 2 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
    numbers = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384)
    sizes = (2, 128, 128, 64, 384, 261 * 128, True, linear, numbers)
    assert starter == Shape(427_776, 427_776, *sizes)
    assert model_shape("Qwen/Qwen2.5-7B-Instruct", Path("Qwen")) == SHAPES["qwen2.5-7b"]
    near = replace(SHAPES["llama-3-8b"], parameters=8e9, active=8e9)
    assert model_shape("a/b", Path("a"), 8e9) == near
    with pytest.raises(ConfigError, match=r"model\.name=a/b .* --params=7e9"):
        model_shape("a/b", Path("a"))
    (tmp_path / "config.json").write_text('{"n_embd": 8}')
    with pytest.raises(ConfigError, match=r"model\.name=mine .*hidden_size"):
        model_shape("mine", tmp_path)


def test_known_models_have_the_parameters_that_their_names_say() -> None:
    for name, shape in SHAPES.items():
        billions = float(re.findall(r"-([\d.]+)b", name)[0])
        assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.26), name
    assert SHAPES["qwen2.5-0.5b"].parameters == 494_032_768  # from its model card
    assert SHAPES["qwen3-30b-a3b"].active / 1e9 == pytest.approx(3.3, abs=0.1)


def test_stages_take_what_their_figures_say() -> None:
    gpu, p = GPUS["h100"], SHAPES["qwen2.5-7b"]
    tokens = 64 * (100 + 8 * 300)
    attention = p.layers * p.hidden * (100 + 150)
    a_token = 2 * (p.parameters + attention)
    # Forward, backward (twice) and recomputed layers at 40% of 989 TFLOP/s; Adam moves 28 bytes a
    # parameter.
    seconds = 4 * a_token * tokens / (0.4 * 989e12) + 28 * p.parameters / 3.35e12
    assert WORK.train_s(gpu, 1) == pytest.approx(seconds)
    assert WORK.train_s(gpu, 8) == pytest.approx(seconds / 8)
    assert WORK.score_s(gpu, 64) == pytest.approx(a_token * tokens / (0.4 * 989e12))
    assert WORK.sync_s(gpu) == pytest.approx(2 * p.parameters / 5e9)
    # One group, of which 300 / 533 of the rows are active on average. Reading the weights
    # dominates.
    kv = 2 * p.layers * p.kv_width * 2
    rows = 8 * 300 / (600 * 8 / 9)
    read = 2 * p.parameters + 100 * kv + rows * 150 * kv
    assert WORK.step_s(gpu, 1, 1) == pytest.approx(read / (0.6 * 3.35e12) + 0.002)


def test_memory_is_weights_gradients_and_moments_over_the_ranks() -> None:
    count = 7_615_616_512
    head = 3584 * 152_064
    norms, attention, gates = 2 * 4 * 2 * 3584, 2 * (7 * 3584 + 2 * 512), 2 * 4 * 18_944
    inputs, backward = 28 * 3584 * 4, 4 * 2 * (18_944 + 3584)
    activations = 16_384 * (inputs + norms + attention + gates + backward)
    gathered = 2 * (2 * head + (count - 2 * head) / 28)
    four, alone = WORK.train_memory(4), WORK.train_memory(1)
    assert (four.weights, four.states) == pytest.approx((count + gathered, 3 * count))
    assert (alone.weights, alone.states) == (4 * count, 12 * count)
    assert four.activations == alone.activations == activations
    assert SETTINGS.memory(Split(4, 1, 2))[1:] == pytest.approx(
        (2 * count, 2 * count + 32 * (100 + 8 * 1000) * WORK.kv_bytes)
    )


@pytest.mark.slow
def test_what_is_offloaded_takes_16_bytes_a_parameter_of_the_host() -> None:
    """Of these, 8 (weights and gradients) are pinned, and may be rounded up to twice as much."""
    work = replace(WORK, step=replace(WORK.step, offloads=True))
    count = 7_615_616_512
    assert work.host_memory(1) == (16 * count, 24 * count)
    assert work.host_memory(4) == (4 * count, 6 * count)
    frozen = replace(work, step=replace(work.step, adapters=16))
    adapters = 4 * 16 * work.shape.adapted
    assert frozen.host_memory(1)[0] == 4 * count + 4 * adapters
    saves = ("train_model.gradient_checkpointing=true", "train_model.cpu_offload=true")
    out = io.StringIO()
    main(["--devices=2", "model.name=Qwen/Qwen2.5-7B", *saves], out)
    assert "122 GB to its host (up to 183 GB" in " ".join(out.getvalue().split())


def test_offloaded_gradients_go_to_the_host_each_pass_unless_they_fit() -> None:
    gpu = GPUS["h100"]
    count = SHAPES["qwen2.5-7b"].parameters
    offloads = replace(WORK, step=replace(WORK.step, offloads=True))
    passes = math.ceil(64 * (100 + 8 * 300) / 16_384)
    needs = offloads.train_memory(1).peak + 4 * count
    fits = offloads.train_s(replace(gpu, memory=needs / 0.9 + 1), 1)
    assert fits == offloads.train_s(gpu, 1)
    update = 28 * count * (1 / gpu.pcie - 1 / gpu.bandwidth)
    assert fits == pytest.approx(WORK.train_s(gpu, 1) + update)
    short = offloads.train_s(replace(gpu, memory=needs / 0.9 - 1), 1)
    assert short == pytest.approx(fits + (passes - 1) * 4 * count / 3e9)


@pytest.mark.slow
def test_the_best_split_is_the_fastest_one_that_fits() -> None:
    rows = best_splits(SETTINGS, 8)
    assert all(row.split.devices <= 8 and SETTINGS.fits(row.split) for row in rows)
    best = rows[0]
    assert best.result.step_s <= 1.03 * min(row.result.step_s for row in rows)
    assert best.result.step_s >= SETTINGS.bound_s(best.split)
    assert not SETTINGS.fits(
        Split(1, 1, 1)
    )  # 122 GB of weights, gradients and moments on one device of 80


@pytest.mark.slow
def test_what_binds_is_what_makes_it_faster_when_it_is_cheaper() -> None:
    slow_reward = replace(SETTINGS, work=replace(WORK, reward_s=600.0))
    assert best_splits(slow_reward, 8)[0].binds == "reward"
    slow_training = replace(SETTINGS, work=replace(WORK, passes=16, optim_steps=16))
    assert best_splits(slow_training, 8)[0].binds == "training"


def test_a_run_without_room_is_refused_with_what_it_needs() -> None:
    big = replace(SETTINGS, work=replace(WORK, shape=SHAPES["qwen2.5-72b"]))
    with pytest.raises(ConfigError, match=r"--devices=8 .* 72 GB .* inference 1"):
        best_splits(big, 8)
    with pytest.raises(ConfigError, match="--devices=1 must be at least 2"):
        best_splits(SETTINGS, 1)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--params", "abc", "abc must be a number"),
        ("--prompt-tokens", "0", "0 must be above 0"),
        ("--response-tokens", "inf", "inf must be a number"),
        ("--reward-s", "-1", "-1 must be a number of at least 0"),
    ],
)
def test_a_number_out_of_its_range_is_refused(
    option: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([f"{option}={value}"])
    assert f"argument {option}: {rule}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_advises_overrides_that_the_scripts_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = io.StringIO()
    main(
        ["--devices", "8", "--gpu", "a100", "model.name=Qwen/Qwen2.5-3B", "env.num_envs=128"],
        file,
        width=160,
    )
    assert "would be faster with: weight sync twice as fast +" in file.getvalue()
    line = file.getvalue().rstrip().rpartition("\n")[2]
    assert line.startswith(
        "python sota/grpo/grpo-async.py model.name=Qwen/Qwen2.5-3B env.num_envs=128 train_model.num"
    )
    counts = dict(text.split("=") for text in line.split() if "num_devices" in text)
    assert sum(map(int, counts.values())) <= 8
    with pytest.raises(SystemExit, match="2"):
        main(["env.num_envs=30"])
    assert "error: env.num_envs=30 must be a multiple of env.repeats=8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo", "grpo", "decoupled_ppo"])
def test_a_pass_before_the_step_takes_time(name: str) -> None:
    options = parse([f"algo={name}"])
    work = settings_of(compose(options.config_name, options.overrides), options).work
    shorter = replace(work, recomputes=False).train_s(GPUS["h100"], 1)
    assert (work.train_s(GPUS["h100"], 1) > shorter) == (name != "grpo")


def test_devices_in_turns_hold_a_step_or_an_engine() -> None:
    work = replace(SETTINGS.work, shards_reference=True)
    settings = replace(SETTINGS, work=work)
    train = work.train_memory(8)
    shard = work.reference_memory(8)
    assert shard == work.shape.parameters * work.reference_number // 8
    assert SETTINGS.work.reference_memory(8) == work.shape.parameters * work.reference_number
    assert settings.memory_in_turns(8) == shard + train.peak
    assert settings.has_reference is False  # with its own devices
    large = replace(work, step=replace(work.step, offloads=True), engine_number=40)
    assert (
        replace(settings, work=large).memory_in_turns(8)
        == large.weight_bytes + large.group_memory()
    )
    assert train.resting == 12 * work.shape.parameters // 8


@pytest.mark.slow
def test_turns_take_as_long_as_sampling_and_training_one_after_the_other() -> None:
    work = replace(SETTINGS.work, scores=False, groups=64)
    settings = replace(SETTINGS, work=work, rows=64 * work.group_size)
    figures = settings.in_turns(8)
    assert figures is not None
    split = Split(8, 0, 8)
    costs = settings.costs(split, settings.loop(split))
    assert figures.step_s > costs.train + costs.publish + costs.update
    alone = best_splits(settings, 8)[0].split
    loop = replace(settings.loop(alone), max_staleness=0)
    assert (
        figures.step_s < simulate(loop, settings.costs(alone, loop)).step_s
    )  # if some wait for the others
    assert settings.in_turns(7) is None  # which cannot divide 64 groups
    assert replace(settings, work=replace(work, shape=SHAPES["qwen2.5-32b"])).in_turns(8) is None
