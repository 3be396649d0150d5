"""Broadcast of weights over gloo: readers in this process, in others, and such as die."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torchrl_grpo.weights import BroadcastSender, handle
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
    assert "weights" not in [thread.name for thread in threading.enumerate()]


def equal(got: dict[str, Tensor], version: int) -> bool:
    expected = weights(version)
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_readers_in_one_and_two_processes_get_the_version_they_ask_for(sender: BroadcastSender) -> None:
    old, new = (sender.pack(weights(version).items(), version) for version in (1, 2))
    assert [len(old.parts), sum(old.parts)] == [6, 7]
    readers = [Reader("one"), Reader("two", 0, 2), Reader("two", 1, 2)]

    def read(reader: Reader, handle: Broadcast) -> dict[str, Tensor]:
        return dict(handle.weights(reader))

    with ThreadPoolExecutor(3) as pool:
        for first, second, versions in ((old, new, (1, 2, 2)), (new, old, (2, 1, 1)), (new, new, (2, 2, 2))):
            got = list(pool.map(read, readers, (first, second, second)))
            assert all(equal(one, version) for one, version in zip(got, versions, strict=True))
    sender.release(1)
    assert set(sender._kept) == {2}


DYING = """
import pickle, sys, time
from torchrl_grpo.weights.handle import Reader
weights = pickle.loads(bytes.fromhex(sys.argv[1])).weights(Reader("dying"))
print(next(weights)[0], flush=True)
time.sleep(100)
"""


def test_a_reader_that_dies_in_the_middle_holds_up_nobody_else(sender: BroadcastSender) -> None:
    handle = sender.pack(weights(1).items(), 1)
    command = [sys.executable, "-c", DYING, pickle.dumps(handle).hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "layer.0\n"
        assert equal(dict(handle.weights(Reader("other"))), 1)
        process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    later = sender.pack(weights(2).items(), 2)
    sender.release(1)
    assert equal(dict(later.weights(Reader("other"))), 2)
    assert equal(dict(later.weights(Reader("made again"))), 2)
    assert time.monotonic() - start < 10  # half of the timeout


def test_a_reader_that_stopped_in_the_middle_can_begin_again(sender: BroadcastSender) -> None:
    handle, reader = sender.pack(weights(1).items(), 1), Reader("hasty")
    half = handle.weights(reader)
    assert next(half)[0] == "layer.0"
    half.close()  # type: ignore[attr-defined]
    assert equal(dict(handle.weights(reader)), 1)


def test_a_wait_that_is_in_vain_says_for_what(sender: BroadcastSender) -> None:
    handle = replace(sender.pack(weights(1).items(), 1), timeout_s=1.0)
    with pytest.raises(
        RuntimeError, match=r"version 3 did not come: waited .* to send part 1 of 6, and got: .*=object_store"
    ):
        next(replace(handle, version=3).weights(Reader("early")))  # rank 0 drops the connection
    silent = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with pytest.raises(
        RuntimeError, match=r"waited 1\.\d s \(at most 1\) for rank 0 of the trainer at 127\.0\.0\.1:\d+ and"
    ):
        next(replace(handle, port=silent.port).weights())
    port = silent.port
    del silent
    with pytest.raises(RuntimeError, match=r"for rank 0 of the trainer at 127\.0\.0\.1:\d+ to be reached"):
        next(replace(handle, port=port).weights())
