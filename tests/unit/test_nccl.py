"""Agreement of trainer and engines on an NCCL transfer, with the library's own calls (vLLM's group)
replaced.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.weights import handle, nccl
from torchrl_grpo.weights.nccl import NcclSender, NcclWeights

HOST = "127.0.0.1"


def weights(version: int) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.full((i + 1, 1000), float(version)) + i for i in range(7)}


class Group:
    """Stand-in for vLLM's communicator: records rank 0's messages once all ranks have joined."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Tensor]] = []
        self.came = threading.Semaphore(0)
        self.destroyed = threading.Event()

    def destroy(self) -> None:
        self.destroyed.set()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()

    def send(to: Group, parts: Any) -> None:
        source = nccl._Kept(parts)
        to.sent.append({name: weight.clone() for name, weight in source})
        to.came.release()

    monkeypatch.setattr(handle, "PART_BYTES", 20_000)  # several parts, and weights larger than one
    monkeypatch.setattr(nccl, "_new_group_id", lambda: bytes(128))
    monkeypatch.setattr(nccl, "_join", lambda group_id, world_size, device: group)
    monkeypatch.setattr(nccl, "_send", send)
    monkeypatch.setattr(nccl, "_rounds", {})
    return group


@pytest.fixture
def sender(group: Group) -> Iterator[NcclSender]:
    sender = NcclSender(torch.float32, HOST, workers=3)
    yield sender
    sender.close()
    sender.close()


def another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process another engine's from here on."""
    monkeypatch.setattr(nccl, "_rounds", {})


def test_a_version_is_sent_once_to_engines_that_ask_together(
    sender: NcclSender, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[dict[Any, int]] = [{}, {}]
    for version in range(3):
        sent = sender.pack(weights(version).items(), version)
        handle: NcclWeights = pickle.loads(pickle.dumps(sent))
        for engine, workers in enumerate((2, 1)):
            monkeypatch.setattr(nccl, "_rounds", rounds[engine])
            init = handle.init_info(workers)
            if version:
                assert init is None
            else:  # the trainer is rank 0, and each engine's workers follow one another
                assert (
                    init is not None
                    and (init["rank_offset"], init["world_size"]) == ((1, 4), (3, 4))[engine]
                )
        assert group.came.acquire(timeout=300)
        [update] = handle.updates()
        shapes = zip(update["names"], update["shapes"], strict=True)
        assert {name: tuple(shape) for name, shape in shapes} == {
            n: tuple(w.shape) for n, w in weights(version).items()
        }
        assert dict(handle.layout) == {
            name: tuple(weight.shape) for name, weight in weights(version).items()
        }
        sender.release(version - 1)
    assert len(group.sent) == 3
    for version, sent_weights in enumerate(group.sent):
        assert all(
            torch.equal(sent_weights[name], weight) for name, weight in weights(version).items()
        )
    sender.close()
    assert group.destroyed.is_set()


def test_an_engine_that_cannot_join_is_refused_and_not_awaited(
    sender: NcclSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = sender.pack(weights(0).items(), 0)
    handle.init_info(3)
    another_engine(monkeypatch)
    with pytest.raises(TransferRefusedError, match="engine was replaced"):
        handle.init_info(1)


def test_engines_that_ask_for_two_versions_in_a_round_are_told(
    sender: NcclSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, later_handle = (sender.pack(weights(version).items(), version) for version in (0, 1))
    handle.init_info(1)
    another_engine(monkeypatch)
    with pytest.raises(TransferRefusedError, match=r"version 0, .* 1"):
        later_handle.init_info(2)


def test_a_trainer_that_cannot_send_closes_the_group(
    sender: NcclSender, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("unhandled system error\nmore")

    monkeypatch.setattr(nccl, "_send", fails)
    handle = sender.pack(weights(0).items(), 0)
    handle.init_info(3)
    assert group.destroyed.wait(300)
    with pytest.raises(TransferRefusedError, match=r"^nccl .*: unhandled system error$"):
        sender.pack(weights(1).items(), 1).init_info(3)


def test_a_refusal_sends_all_that_follows_through_the_object_store(sender: NcclSender) -> None:
    second = sender.pack(weights(1).items(), 1)
    assert isinstance(second, NcclWeights)
    for version, sent in (
        (1, sender.resend(1, "no such link")),
        (2, sender.pack(weights(2).items(), 2)),
    ):
        got = dict(pickle.loads(pickle.dumps(sent)).weights())
        assert all(torch.equal(got[name], weight) for name, weight in weights(version).items())
    with pytest.raises(
        TransferRefusedError, match="no such link"
    ):  # which was allocated to other data in the meantime
        second.init_info(3)


def test_strangers_get_nothing(sender: NcclSender) -> None:
    handle = sender.pack(weights(0).items(), 0)
    assert handle.rendezvous.secret not in repr(handle) and handle.group_id not in repr(handle)
    stranger = nccl.Rendezvous(HOST, handle.rendezvous.port, "guess").connect()
    handle.init_info(1)
    assert not stranger.check(["workers"]) and not stranger.check(["round/0"])


class Stream:
    """A stream that runs its work when told to, not before."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], Any]] = []

    def record_event(self) -> list[Callable[[], Any]]:
        return list(self.tasks)

    def wait_event(self, event: list[Callable[[], Any]]) -> None:
        self.tasks += event

    def run(self) -> None:
        for task in self.tasks:
            task()


def test_each_stream_that_reads_a_part_waits_for_its_copy(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's sender alternates between two streams."""
    streams = [Stream(), Stream()]
    turn = 0
    got = dict[str, Tensor]()
    users = set[Stream]()

    def cuda(flat: Tensor, non_blocking: bool) -> Tensor:
        copy = torch.full_like(flat, torch.nan)
        streams[turn].tasks.append(lambda: copy.copy_(flat))
        return copy

    def read(name: str, weight: Tensor) -> None:
        got[name] = weight.clone()

    # The weights of an offloaded learner on one device are in host memory that is not pinned.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "cuda", cuda)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: users.add(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[turn])
    for name, weight in nccl._Kept(list(handle.in_parts(weights(3).items(), None))):
        streams[turn].tasks.append(partial(read, name, weight))
        turn = 1 - turn
    for stream in reversed(streams):
        stream.run()
    assert all(torch.equal(got[name], weight) for name, weight in weights(3).items())
    assert users == set(streams)
