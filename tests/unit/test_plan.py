"""The simulated loop against what can be computed by hand, and the plan against its own numbers."""

from __future__ import annotations

import pytest

from torchrl_grpo.plan.simulation import Costs, Loop, Simulation


def test_with_staleness_0_a_step_is_the_sum_of_its_stages() -> None:
    costs = Costs(sample=[2.0], train=1.0, score=0.5, publish=0.25, update=0.125, reward_s=4.0, hop_s=0.0625)
    result = Simulation(Loop(groups_per_batch=1, max_staleness=0), costs).run()
    assert result.step_s == 2.0 + 1.0 + 0.5 + 0.25 + 0.125 + 4.0 + 3 * 0.0625
    assert (result.staleness_mean, result.staleness_max) == (0.0, 0)


def test_two_samplers_halve_the_sampling_of_a_synchronous_step() -> None:
    costs = Costs(sample=[2.0], train=1.0)
    one = Simulation(Loop(groups_per_batch=4, samplers=1), costs).run().step_s
    two = Simulation(Loop(groups_per_batch=4, samplers=2), costs).run().step_s
    assert (one, two) == (4 * 2.0 + 1.0, 2 * 2.0 + 1.0)


@pytest.mark.parametrize(("sample", "train", "longest"), [(2.0, 1.0, 2.0), (1.0, 3.0, 3.0)])
def test_with_enough_staleness_a_step_is_its_longest_stage(sample: float, train: float, longest: float) -> None:
    loop = Loop(groups_per_batch=1, max_staleness=20)
    result = Simulation(loop, Costs(sample=[sample], train=train, score=0.5)).run(batches=100, warm_up=40)
    assert result.step_s == pytest.approx(longest, rel=1e-6)
    assert result.learner_share == pytest.approx(train / longest)
    assert result.reference_share == pytest.approx(0.5 / longest)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_on_staleness_holds_and_is_reached_by_a_slow_learner(bound: int) -> None:
    result = Simulation(Loop(groups_per_batch=4, max_staleness=bound), Costs(sample=[0.01, 0.03], train=5.0)).run()
    assert result.staleness_max == bound
    assert result.groups_under_way <= 4 * (bound + 1)


def test_littles_law_holds() -> None:
    loop = Loop(groups_per_batch=8, max_staleness=2, samplers=3, concurrent_tasks=4, engine_speed=lambda jobs: 1 / jobs)
    result = Simulation(loop, Costs(sample=[0.3, 0.5, 1.1], train=1.0, score=0.1)).run(batches=400)
    groups_a_second = 8 / result.step_s
    assert result.groups_under_way == pytest.approx(groups_a_second * result.group_s, rel=0.01)


def test_actors_that_share_cores_slow_each_other_down() -> None:
    """Sampling takes 1 s of a core and training 1 s: on 2 cores they overlap, on 1 they cannot."""
    costs = Costs(sample=[1.0], train=1.0)
    for cores, step_s in ((2, 1.0), (1, 2.0)):
        loop = Loop(1, max_staleness=1, serial=True, cores=lambda jobs, cores=cores: min(1.0, cores / jobs))
        assert Simulation(loop, costs).run().step_s == pytest.approx(step_s)


def test_an_engine_that_waits_for_its_tasks_updates_between_them() -> None:
    """Two tasks of 1 and 3 s in a batch: with keep the sampler is only held for the update, with wait it drains."""
    costs = Costs(sample=[1.0, 3.0], train=0.5, update=0.25)
    steps = {
        waits: Simulation(Loop(2, max_staleness=3, concurrent_tasks=2, waits=waits), costs).run(60).step_s
        for waits in (True, False)
    }
    assert steps[False] == pytest.approx(2.0 + 0.25)  # two places, 4 s of work a batch
    assert steps[True] > steps[False]


def test_a_slow_reward_is_hidden_by_further_tasks() -> None:
    costs = Costs(sample=[1.0], train=0.5, reward_s=3.0)
    hidden = Simulation(Loop(1, max_staleness=4, serial=True, concurrent_tasks=5, waits=False), costs).run(60)
    alone = Simulation(Loop(1, max_staleness=4, serial=True), costs).run(60)
    assert (hidden.step_s, alone.step_s) == (pytest.approx(1.0), pytest.approx(4.0))


def test_the_same_loop_gives_the_same_result() -> None:
    loop = Loop(groups_per_batch=16, max_staleness=1, samplers=5, references=2, concurrent_tasks=3)
    costs = Costs(sample=[0.5, 0.75, 2.0], train=1.5, score=0.125, publish=0.1, update=0.3)
    assert Simulation(loop, costs).run() == Simulation(loop, costs).run()
