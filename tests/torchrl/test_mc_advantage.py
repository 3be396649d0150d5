"""TorchRL's tests of ``MCAdvantage``, for ``GroupAdvantage``; docs/torchrl.md explains the
differences.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage, MCAdvantageSelector

from tests.support import forks
from tests.support.trajectories import make_trajectory
from torchrl_grpo.transforms import GroupAdvantage

BOUNDS = {"keep_return_bounds": (0.1, 0.9)}


def values(batch: TensorDict) -> torch.Tensor:
    return batch["advantage"].squeeze(-1)


def normalized(returns: torch.Tensor) -> torch.Tensor:
    return (returns - returns.mean()) / returns.std()


def test_ragged_rewards_of_each_token_make_one_advantage_a_step():
    """Each step has several rewards, not the same number in all steps; groups are identified by
    text.
    """
    buffer = ReplayBuffer(
        storage=LazyStackStorage(10), transform=GroupAdvantage(2, group_key="query")
    )
    rewards = [[[1.0], [2.0, 3.0]], [[0.0, 0.0, 2.0]]]  # returns 6 and 2
    for steps in rewards:
        rows = [
            TensorDict(
                {
                    "query": "p",
                    "next": {
                        "reward": torch.tensor(reward)[:, None],
                        "done": torch.tensor([i == last]),
                    },
                }
            )
            for last in [len(steps) - 1]
            for i, reward in enumerate(steps)
        ]
        buffer.extend(lazy_stack(rows))
    torch.testing.assert_close(values(buffer[:]), torch.tensor([1.0, 1.0, -1.0]) * 0.5**0.5)


def test_several_trajectories_in_one_flat_batch_are_told_apart():
    batch = torch.cat(
        [make_trajectory(0, [1.0, 0.0]), make_trajectory(0, [0.0] * 3), make_trajectory(1, [0.0])]
    )
    transform = GroupAdvantage(2)
    out = transform.inv(batch)
    expected = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]) * 0.5**0.5
    torch.testing.assert_close(values(out), expected)
    assert transform.num_waiting == transform.queue.max_queued_trajectories_per_group == 1


@pytest.mark.parametrize("kind", ["sum", "max", "mean"])
def test_trajectory_returns_are_those_of_torchrl(kind):
    rewards = [[0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0]]
    ours = GroupAdvantage(3, trajectory_return=kind)
    theirs = MCAdvantage(3, prompt_key="group_id", trajectory_return=kind)
    for transform in (ours, theirs):
        assert transform.inv(make_trajectory(0, rewards[0])) is None
        assert transform.inv(make_trajectory(0, rewards[1])) is None
    out, expected = (transform.inv(make_trajectory(0, rewards[2])) for transform in (ours, theirs))
    assert out["advantage"].shape == out["next", "reward"].shape
    torch.testing.assert_close(values(out), values(expected), rtol=1e-5, atol=1e-5)


def test_texts_that_name_groups_stay_as_they_are():
    def rows(reward: float, steps: int, width: int) -> TensorDict:
        done = [i == steps - 1 for i in range(steps)]
        return lazy_stack(
            [
                TensorDict(
                    {
                        "query": "a",
                        "tokens": torch.zeros(width),
                        "next": {"reward": torch.tensor([reward])},
                    }
                ).set(("next", "done"), torch.tensor([last]))
                for last in done
            ]
        )

    transform = GroupAdvantage(2, group_key="query")
    assert transform.inv(rows(0.0, 2, 4)) is None
    out = transform.inv(rows(1.0, 3, 6))
    assert [row["query"] for row in out.unbind(0)] == ["a"] * 5
    assert [row["tokens"].numel() for row in out.unbind(0)] == [4, 4, 6, 6, 6]


@pytest.mark.parametrize("key", ["group_id", ("meta", "group_id")])
def test_interleaved_groups_complete_one_by_one(key):
    transform = GroupAdvantage(2, group_key=key)
    assert transform.inv(make_trajectory(0, [1.0, 0.0], key)) is None
    assert transform.inv(make_trajectory(1, [0.0, 0.0], key)) is None
    assert transform.inv(make_trajectory(0, [0.0, 0.0], key))[key].unique().tolist() == [0]
    assert transform.inv(make_trajectory(1, [0.0, 1.0], key))[key].unique().tolist() == [1]


def test_groups_out_of_bounds_are_dropped_and_counted():
    transform = GroupAdvantage(2, **BOUNDS)
    for group, rewards in enumerate(([0.0, 0.0], [1.0, 1.0], [0.0, 1.0])):
        assert transform.inv(make_trajectory(group, rewards[:1])) is None
        assert (transform.inv(make_trajectory(group, rewards[1:])) is not None) is (group == 2)
    stats = transform.queue.get_stats()
    assert (
        stats["completed_trajectories"],
        stats["completed_decisions"],
        stats["successful_trajectories"],
    ) == (
        6,
        6,
        3,
    )
    assert (stats["trajectory_return_sum"], stats["trajectory_return_max"]) == (3.0, 1.0)
    assert (stats["completed_groups"], stats["written_groups"], stats["dropped_groups"]) == (
        3,
        1,
        2,
    )
    assert (stats["queued_groups"], stats["queued_trajectories"]) == (0, 0)
    transform.queue.reset_stats()
    assert transform.queue.get_stats()["completed_groups"] == 0


def test_clearing_the_queue_keeps_the_counts():
    transform = GroupAdvantage(2)
    assert transform.inv(make_trajectory(0, [1.0])) is None and transform.num_waiting == 1
    transform.queue.clear_queues()
    assert transform.num_waiting == 0 and transform.queue.completed_trajectories == 1


@pytest.mark.parametrize(
    ("rewards", "settings", "counts"),
    [
        # rewards as they arrive; the counts are written, dropped, rescued, selected, unselected
        ([0.0, 0.0, 0.0, 1.0], {}, (1, 0, 1, 2, 2)),
        ([0.0, 1.0], {}, (1, 0, 0, 2, 0)),
        ([0.0, 0.0, 1.0], {}, (1, 0, 1, 2, 1)),
        ([0.0, 0.0, 0.0, 0.0], {}, (0, 1, 0, 0, 0)),
        ([0.0, 1.0, 0.0, 1.0], {"candidate_selection_min_size": 4}, (1, 0, 0, 2, 2)),
    ],
)
def test_candidates_are_chosen_as_torchrl_chooses_them(rewards, settings, counts):
    settings = BOUNDS | {"candidate_group_size": 4} | settings
    ours = GroupAdvantage(2, **settings)
    theirs = MCAdvantage(2, prompt_key="group_id", trajectory_return="sum", **settings)
    outs = [
        [transform.inv(make_trajectory(0, [reward])) for reward in rewards]
        for transform in (ours, theirs)
    ]
    for out, expected in zip(*outs, strict=True):
        assert (out is None) is (expected is None)
        if out is not None:
            assert out["next", "reward"].tolist() == expected["next", "reward"].tolist()
    assert ours.queue.get_stats() == theirs.get_stats()
    names = (
        "written_groups",
        "dropped_groups",
        "rescued_groups",
        "selected_trajectories",
        "unselected_trajectories",
    )
    assert tuple(ours.queue.get_stats()[name] for name in names) == counts


def test_a_selector_may_read_the_whole_trajectories():
    class Highest(MCAdvantageSelector):
        def __init__(self) -> None:
            super().__init__(in_keys=[("trajectories", "score")])

        def select(
            self, candidates: TensorDict, *, group_size: int, keep_return_bounds: Any = None
        ) -> list[int]:
            scores = [trajectory["score"][0] for trajectory in candidates["trajectories"].unbind(0)]
            return torch.stack(scores).topk(group_size).indices.tolist()

    sizes = {"candidate_group_size": 3, "candidate_selection_min_size": 3}
    transform = GroupAdvantage(2, candidate_selector=Highest(), **sizes)
    for score, reward in ((0.0, 0.0), (2.0, 1.0), (1.0, 0.0)):
        batch = make_trajectory(0, [reward])
        batch["score"] = torch.tensor([score])
        out = transform.inv(batch)
    assert out["score"].tolist() == [2.0, 1.0]


def test_a_buffer_gets_the_groups_within_bounds_alone():
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=GroupAdvantage(2, **BOUNDS))
    lengths = []
    for group, rewards in ((0, [0.0, 0.0]), (0, [0.0, 1.0]), (1, [0.0, 0.0]), (1, [0.0, 0.0])):
        buffer.extend(make_trajectory(group, rewards))
        lengths.append(len(buffer))
    assert lengths == [0, 4, 4, 4]
    assert buffer[:]["advantage"].unique().numel() == 2


def test_lazy_and_plain_trajectories_complete_one_group():
    """The rows keep their type in a lazy stack; ``MCAdvantage`` copies them into a plain
    TensorDict.
    """
    transform = GroupAdvantage(2)
    assert transform.inv(make_trajectory(0, [1.0])) is None
    assert transform.inv(lazy_stack(list(make_trajectory(1, [0.0]).unbind(0)))) is None
    out = transform.inv(torch.cat([make_trajectory(0, [0.0]), make_trajectory(1, [1.0])]))
    assert out.shape == (4,) and transform.num_waiting == 0
    torch.testing.assert_close(values(out), torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.5**0.5)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_queue_that_is_shared_keeps_what_waited():
    transform = GroupAdvantage(2)
    assert transform.inv(make_trajectory(0, [0.0])) is None
    assert transform.share_memory_() is transform and transform.queue.is_shared
    assert transform.num_waiting == 1 and list(transform.state_dict()["queue._extra_state"]) == [0]
    assert transform.inv(make_trajectory(0, [1.0])) is not None
    assert transform.num_waiting == 0 and transform.queue.written_groups == 1


def write(transform: GroupAdvantage, reward: float, results: Any) -> None:
    out = transform.inv(make_trajectory(0, [reward]))
    results.put(None if out is None else values(out).tolist())


@pytest.mark.parametrize("waits", [False, True])
def test_a_state_loads_whether_or_not_anything_waited(waits: bool):
    source, fresh, used = GroupAdvantage(2), GroupAdvantage(2), GroupAdvantage(2)
    used.inv(make_trajectory(5, [1.0]))
    if waits:
        source.inv(make_trajectory(0, [1.0]))
    for target in (fresh, used):
        target.load_state_dict(source.state_dict())
        assert target.num_waiting == waits


@pytest.mark.slow
def test_members_from_several_processes_complete_a_group():
    if sys.platform == "linux":
        forks.start()  # the process of the queue, which would take seconds to import
    context = multiprocessing.get_context("fork")
    transform = GroupAdvantage(2).share_memory_()
    results = context.Queue()
    processes = [
        context.Process(target=write, args=(transform, reward, results)) for reward in (0.0, 1.0)
    ]
    for process in processes:
        process.start()
    got = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(timeout=300)
    assert got.count(None) == 1
    torch.testing.assert_close(
        torch.tensor(next(one for one in got if one)).abs(), torch.full((2,), 0.5**0.5)
    )
    assert transform.num_waiting == 0 and transform.queue.completed_trajectories == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trajectory_return": "prod"}, "trajectory_return='prod' must be one of"),
        ({"keep_return_bounds": (0.9, 0.1)}, "increasing"),
        ({"repeats": 1}, "repeats=1 must be at least 2"),
        ({"candidate_group_size": 1}, "candidate_group_size"),
        (
            {"candidate_group_size": 4, "candidate_selection_min_size": 1},
            "candidate_selection_min_size",
        ),
        (
            {"candidate_group_size": 4, "candidate_selection_min_size": 5},
            "candidate_selection_min_size",
        ),
    ],
)
def test_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupAdvantage(**({"repeats": 2} | arguments))


def test_torchrls_names_mean_what_they_mean_there():
    batch = torch.cat([make_trajectory(0, [1.0], "query"), make_trajectory(0, [0.0], "query")])
    batch["next", "score"] = batch["next", "reward"]
    batch["next", "reward"] = torch.zeros_like(batch["next", "score"])
    names = {"grpo_size": 2, "prompt_key": "query", "rewards_key": ("next", "score")}
    theirs = MCAdvantage(**names, trajectory_return="sum").inv(batch.clone())
    torch.testing.assert_close(values(GroupAdvantage(**names)(batch)), values(theirs))
    with pytest.raises(TypeError, match="GroupAdvantage needs repeats"):
        GroupAdvantage()
    with pytest.raises(TypeError, match=r"verbose=True is .*TorchRL's .*: queue\.get_stats"):
        GroupAdvantage(2, verbose=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gruppe'"):
        GroupAdvantage(2, gruppe=1)


@pytest.mark.parametrize("level", ["sequence", "turn"])
def test_an_advantage_may_have_the_dimension_that_torchrl_reads(level):
    """TorchRL's ``GRPOLoss`` reads [B, 1, 1] or [B, T, 1], and its environments give rewards such a shape."""
    rows = []
    for reward in (1.0, 0.0):
        row = TensorDict({"group_id": torch.tensor([3]), "next": {"done": torch.tensor([[True]])}})
        row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        rows.append(row.set(("next", "reward"), torch.tensor([[reward]])))
    batch = lazy_stack(rows)
    plain = GroupAdvantage(2, level=level)(batch.clone())["advantage"]
    out = GroupAdvantage(2, level=level, token_dim=True)(batch)["advantage"]
    assert out.shape == (*plain.shape, 1) and plain.abs().max() > 0.5
    torch.testing.assert_close(out.squeeze(-1), plain)
