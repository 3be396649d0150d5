"""Broadcast of weights over gloo: readers in this process and in others, readers that die, and strangers."""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchrl_grpo.weights import BroadcastSender, broadcast, handle
from torchrl_grpo.weights.broadcast import Broadcast
from torchrl_grpo.weights.handle import Reader

HOST = "127.0.0.1"


def weights(version: int) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.full((i + 1, 1000), float(version)) + i for i in range(7)}


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[BroadcastSender]:
    monkeypatch.setattr(handle, "PART_BYTES", 20_000)  # several parts, and weights larger than one
    sender = BroadcastSender(torch.float32, "gloo", HOST, timeout_s=20)
    yield sender
    sender.close()
    sender.close()
    assert serving() == 0


def serving() -> int:
    """Threads that wait for readers or answer them."""
    return [thread.name for thread in threading.enumerate()].count("weights")


def sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 15
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def equal(got: dict[str, Tensor], version: int) -> bool:
    expected = weights(version)
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_readers_in_one_and_two_processes_get_the_version_they_ask_for(sender: BroadcastSender) -> None:
    old, new = (sender.pack(weights(version).items(), version) for version in (1, 2))
    assert [len(layout) for _, layout in old.parts] == [2, 1, 1, 1, 1, 1]
    readers = [Reader("one"), Reader("two", 0, 2), Reader("two", 1, 2)]

    def read(reader: Reader, handle: Broadcast) -> dict[str, Tensor]:
        return dict(handle.weights(reader))

    with ThreadPoolExecutor(3) as pool:
        for first, second, versions in ((old, new, (1, 2, 2)), (new, old, (2, 1, 1)), (new, new, (2, 2, 2))):
            got = list(pool.map(read, readers, (first, second, second)))
            assert all(equal(one, version) for one, version in zip(got, versions, strict=True))
    sender.release(1)
    assert set(sender._kept) == {2}


READING = """
import pickle, sys, time
from torchrl_grpo.weights.handle import Reader
weights = pickle.loads(bytes.fromhex(sys.argv[1])).weights(Reader(sys.argv[2]))
print(next(weights)[0] if sys.argv[3] == "half" else len(list(weights)), flush=True)
time.sleep(100)
"""


def read_and_wait(handle: Broadcast, name: str, much: str) -> subprocess.Popen[str]:
    """A process that has read the weights, or half of them, and is there until it is killed."""
    command = [sys.executable, "-c", READING, pickle.dumps(handle).hex(), name, much]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == ("layer.0\n" if much == "half" else "7\n")
    return process


@pytest.mark.slow
def test_a_reader_that_dies_in_the_middle_holds_up_nobody_else(sender: BroadcastSender) -> None:
    handle = sender.pack(weights(1).items(), 1)
    with read_and_wait(handle, "dying", "half") as process:
        assert equal(dict(handle.weights(Reader("other"))), 1)
        process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    later = sender.pack(weights(2).items(), 2)
    sender.release(1)
    assert equal(dict(later.weights(Reader("other"))), 2)
    assert equal(dict(later.weights(Reader("made again"))), 2)
    assert time.monotonic() - start < 10  # half of the timeout


@pytest.mark.slow
def test_readers_that_die_between_updates_leave_no_thread_and_no_socket(sender: BroadcastSender) -> None:
    handle = sender.pack(weights(1).items(), 1)
    before = serving(), sockets()
    readers = [read_and_wait(handle, f"dying {number}", "all") for number in range(4)]
    assert serving() == before[0] + 4
    for reader in readers:
        reader.kill()
        reader.communicate()
    assert until(lambda: (serving(), sockets()) == before), (serving(), sockets(), before)
    assert equal(dict(sender.pack(weights(2).items(), 2).weights(Reader("next"))), 2)


def test_a_reader_that_stopped_in_the_middle_can_begin_again(sender: BroadcastSender) -> None:
    handle, reader = sender.pack(weights(1).items(), 1), Reader("hasty")
    half = handle.weights(reader)
    assert next(half)[0] == "layer.0"
    half.close()  # type: ignore[attr-defined]
    assert equal(dict(handle.weights(reader)), 1)


def test_a_wait_that_is_in_vain_says_for_what(sender: BroadcastSender) -> None:
    handle = replace(sender.pack(weights(1).items(), 1), timeout_s=1.0)
    with pytest.raises(
        TimeoutError, match=r"version 3 did not come: waited .* to send part 1 of 6, and got: .*=object_store"
    ):
        next(replace(handle, version=3).weights(Reader("early")))  # rank 0 drops the connection
    with closing(socket.create_server((HOST, 0))) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            TimeoutError,
            match=r"waited 1\.\d s \(at most 1\) for rank 0 of the trainer at 127\.0\.0\.1:\d+ to be reached",
        ):
            next(replace(handle, ports=(port, handle.ports[1]), secret="silent").weights())
    with pytest.raises(TimeoutError, match=r"for rank 0 of the trainer at 127\.0\.0\.1:\d+ to be reached"):
        next(replace(handle, ports=(port, port), secret="closed").weights())


def test_both_ports_listen_on_the_given_address_alone(sender: BroadcastSender) -> None:
    ports = sender.pack(weights(1).items(), 1).ports
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    assert {(address.ip, address.port) for address in listening if address.port in ports} == {
        (HOST, port) for port in ports
    }


def test_without_the_secret_nobody_gets_weights_or_stops_the_syncs(sender: BroadcastSender) -> None:
    handle = sender.pack(weights(1).items(), 1)
    assert handle.secret not in repr(handle) and len(handle.secret) == 64
    other = BroadcastSender(torch.float32, "gloo", HOST)._handle
    assert handle.secret != other.secret
    before = serving()
    for request in (b'0\n["stranger", 1]\n1\n', b"null\n", b"\n" * 5000, b"\xff" * 5000, b""):
        with socket.create_connection((HOST, handle.ports[0])) as stranger:
            stranger.sendall(request)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            assert no_answer(stranger)
    guess = replace(handle, secret="0" * 64, timeout_s=1.0)
    with pytest.raises(TimeoutError, match="did not come"):
        next(guess.weights(Reader("stranger")))
    store = TCPStore(HOST, handle.ports[1], is_master=False, timeout=timedelta(seconds=5))
    store.queue_push("requests", "null")  # the message that once stopped it
    store.queue_push("requests", '["stranger", 1, 1]')
    assert equal(dict(handle.weights(Reader("known"))), 1)
    assert not any(handle.secret in key for key in store.list_keys())  # a store lists its keys to whoever asks
    assert until(lambda: serving() == before + 1)


def no_answer(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_silent_strangers_hold_up_nobody_and_close_ends_them(sender: BroadcastSender) -> None:
    handle = sender.pack(weights(1).items(), 1)
    strangers = [socket.create_connection((HOST, handle.ports[0])) for _ in range(3)]
    assert equal(dict(handle.weights(Reader("known"))), 1)
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 5 and serving() == 0
    for stranger in strangers:
        stranger.close()


def test_groups_that_are_made_at_the_same_time_all_have_waits_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of rank 0 make theirs; nccl reads the variable when a group is made, and no group may miss it."""
    import os

    import torch.distributed.distributed_c10d as c10d

    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    both, first_done, seen = threading.Barrier(2, timeout=10), threading.Event(), []

    class Group:
        class Options:
            _timeout = None

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            if both.wait() == 0:  # the other one is made and its thread goes on
                assert first_done.wait(10)
                time.sleep(0.1)
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Group, raising=False)
    handle = BroadcastSender(torch.float32, "nccl", HOST, timeout_s=5)._handle
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def make(name: str) -> None:
        broadcast._join(replace(handle, ports=(0, store.port)), name, 0, 2)
        first_done.set()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, ("one", "two")))
    assert seen == ["1", "1"]
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
