"""A reward model: a Hugging Face sequence classifier with one output, in one process per machine.

All processes of a run that score on a machine share the model's process
(``graders/reward_scorer.py``). They find it by the name of a socket: whoever binds the name first
starts the process, and whoever finds it bound connects. The process ends with its last connection. If
it ends earlier, the next request starts another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torchrl_grpo.host.children import start_python
from torchrl_grpo.host.event_loop import event_loop

MAX_REQUEST_BYTES = 2**26
"""Maximum size of a conversation, as JSON."""

_DEVICES = "CUDA_VISIBLE_DEVICES"
_MAX_ATTEMPTS = 3
"""Processes that may end while they score a conversation."""
_MAX_WAITING = 128
"""Processes that may connect while the model's process starts."""
_CONNECT_PAUSE_S = 0.01

_Messages = Sequence[Mapping[str, Any]]
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[_Client]]]
_clients = WeakKeyDictionary()
_started: list[subprocess.Popen[bytes]] = []  # referenced until they have ended


class _RewardModel:
    """Return the logit of a reward model for a conversation.

    Each machine of a run loads the model once, and scores the conversations that wait for it in
    batches. The model's input is the conversation in its own chat template; without one, the texts
    of the messages, separated by empty lines.

    Args:
        messages: the conversation, ending with the response.
        model: name on the hub, or folder.
        device: device of the model, such as ``cuda:3``, among those that the script sees; the run
            does not reserve it.

    Raises:
        ValueError: the model has several outputs, its chat template leaves out a message, or the
            conversation is too long for it.
        RuntimeError: the model could not be loaded, or its process ended several times.
    """

    def __init__(self) -> None:
        # Pickled with the task, so equal in all processes of a run.
        self._run = secrets.token_hex(16)
        self._devices = os.environ.get(_DEVICES)  # an actor sees only its own

    async def __call__(self, messages: _Messages, *, model: str, device: str = "cpu") -> float:
        return await self._ask(messages, model, device)

    def load_model(self, model: str, device: str = "cpu") -> None:
        """Load the model on this machine, if no other process of the run has.

        Raises:
            ValueError or RuntimeError: see the class.
        """
        asyncio.run_coroutine_threadsafe(self._ask(None, model, device), event_loop()).result()

    async def _ask(self, messages: _Messages | None, model: str, device: str) -> float:
        """Return the score of a conversation; of None, 0 as soon as the model is loaded."""
        key = hashlib.sha256(repr((self._run, model, device)).encode()).hexdigest()[:32]
        clients = _clients.setdefault(asyncio.get_running_loop(), {})
        for _ in range(_MAX_ATTEMPTS):
            if key not in clients:
                clients[key] = asyncio.ensure_future(self._connect(key, model, device))
            client = clients[key]
            try:
                return await (await asyncio.shield(client)).ask(messages)
            except OSError:
                if clients.get(key) is client:
                    del clients[key]
        raise RuntimeError(
            f"the process of the reward model {model} on {device} must not end, but "
            f"{_MAX_ATTEMPTS} did: see the run's output, or use a device with more memory."
        )

    async def _connect(self, key: str, model: str, device: str) -> _Client:
        """Connect to the model's process, after starting it if there is none."""
        address = f"\0torchrl_grpo-reward-{key}"
        if sys.platform != "linux":  # only for this process
            address = f"{tempfile.gettempdir()}/{key}-{os.getpid()}"
            Path(address).unlink(missing_ok=True)
        _started[:] = [process for process in _started if process.poll() is None]
        while True:
            with suppress(ConnectionRefusedError, FileNotFoundError):
                return await _open(address)
            with socket.socket(socket.AF_UNIX) as listening:
                try:
                    listening.bind(address)
                except OSError:  # another process was faster
                    await asyncio.sleep(_CONNECT_PAUSE_S)
                    continue
                listening.listen(_MAX_WAITING)
                client = await _open(address)
                environment = dict(os.environ)
                environment.pop(_DEVICES, None)
                environment |= {} if self._devices is None else {_DEVICES: self._devices}
                _started.append(
                    start_python(
                        "torchrl_grpo.integrations.graders.reward_scorer:serve",
                        listening.fileno(),
                        model,
                        device,
                        stdin=subprocess.DEVNULL,
                        env=environment,
                    )
                )
            if sys.platform != "linux":
                Path(address).unlink()
            return client


reward_model = _RewardModel()
"""The reward ``reward_model``."""


class _Client(asyncio.Protocol):
    """Connection to the model's process, for many requests at a time."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._received = b""

    async def ask(self, messages: _Messages | None) -> float:
        """Return the score of a conversation.

        Raises:
            OSError: the process ended.
        """
        number = next(self._numbers)
        text = json.dumps([number, messages], default=lambda image: None)
        if len(text) >= MAX_REQUEST_BYTES:
            raise ValueError(
                f"a conversation for a reward model must be shorter than {MAX_REQUEST_BYTES} "
                f"bytes, but it has {len(text)}: use a smaller max_new_tokens."
            )
        if self._transport.is_closing():
            raise ConnectionResetError
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(f"{text}\n".encode())
            value, kind, message = await self._waiting[number]
        finally:
            del self._waiting[number]
        if kind:
            raise (ValueError if kind == "ValueError" else RuntimeError)(message)
        return float(value)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            number, *answer = json.loads(line)
            future = self._waiting.get(number)
            if future is not None and not future.done():  # else it took too long
                future.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError())


async def _open(address: str) -> _Client:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(address)  # here, because uvloop, which Ray uses, cannot read such names
        if not is_own(peer):
            raise RuntimeError("another user answers at the address of the reward model's process.")
        _, client = await asyncio.get_running_loop().create_unix_connection(_Client, sock=peer)
    except BaseException:
        peer.close()
        raise
    return client


def is_own(peer: Any) -> bool:
    """Return whether this user's process is at the other end of a socket. Linux's socket names have
    no permissions.
    """
    if sys.platform != "linux":
        return True
    size = struct.calcsize("3i")
    values = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return values[1] == os.geteuid()
