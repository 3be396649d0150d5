"""Simulate the hosts of a cluster by namespaces of one machine, each with its own address,
processes, /tmp and /dev/shm.

A ``Network`` is a switch in this process: each host's ``eth0`` is a TAP device, and a thread
forwards the frames between them. So a link can be cut, delayed or lossy on any kernel (``tc netem``
is an optional module). It needs root on Linux, and ``unshare``, ``nsenter`` and ``ip``.

All processes of a host end with its first process, which is killed when this process ends, however
it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1
_MTU = 9000
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return why this machine cannot have such hosts; empty if it can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "needs root on Linux"
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}"
    if Path(__file__).resolve().is_relative_to("/tmp"):
        return "needs a checkout outside of /tmp, because each host has its own /tmp"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return f"unshare fails: {done.stderr.decode().strip()}" if done.returncode else ""


class Host:
    """One host.

    Attributes:
        name: its host name.
        address: on the network.
        up: whether its link is up; may be set.
        delay_s: delay of each frame that it sends or receives.
        loss: share of these frames that are lost.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self.up, self.delay_s, self.loss = True, 0.0, 0.0
        flags = [
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        # As Debian has it: a host's own name is an address that no other host can reach.
        script = (
            f"mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && hostname {name} && "
            f"printf '127.0.0.1 localhost\\n127.0.1.1 {name}\\n' > /tmp/hosts && mount --bind /tmp/hosts /etc/hosts && "
            f"ip link set lo up && echo ready && exec sleep infinity"
        )
        self._process = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"host {name} did not start.")
        [first] = psutil.Process(self._process.pid).children()
        self.pid = first.pid
        self.tap = self._make_tap()
        for line in (
            f"addr add {self.address}/24 dev eth0",
            f"link set eth0 mtu {_MTU} up",
            "route add default dev eth0",
        ):
            self.run("ip", *line.split())

    def _make_tap(self) -> int:
        taps: list[int] = []

        def make() -> None:  # in a thread of its own: a namespace is entered by a thread
            with open(f"/proc/{self.pid}/ns/net") as namespace:
                if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_HEADER))
            taps.append(tap)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return taps[0]

    def popen(
        self, *command: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in the host; it ends with the host."""
        inside = ["nsenter", "--target", str(self.pid), "--all", f"--wd={os.getcwd()}", *command]
        return subprocess.Popen(inside, env=os.environ | (env or {}), **options)

    def run(self, *command: str) -> str:
        """Return the output of a command in the host."""
        with self.popen(*command, stdout=subprocess.PIPE, text=True) as process:
            printed, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(command)} on {self.name} ended with {process.returncode}."
            )
        return str(printed)

    def processes(self) -> list[psutil.Process]:
        """Return all processes in the host."""
        there = []
        mine = os.readlink(f"/proc/{self.pid}/ns/pid") if Path(f"/proc/{self.pid}").exists() else ""
        for process in psutil.process_iter():
            try:
                if mine and os.readlink(f"/proc/{process.pid}/ns/pid") == mine:
                    there.append(process)
            except OSError:
                continue
        return there

    def actors(self) -> list[str]:
        """Return the kinds of Ray's actors in the host, such as ``LearnerActor``."""
        names = []
        for process in self.processes():
            try:
                title = process.cmdline()[:1]
            except psutil.Error:
                continue
            if title and title[0].startswith("ray::") and "Actor" in title[0]:
                names.append(title[0].removeprefix("ray::").partition(".")[0])
        return sorted(names)

    def kill(self) -> None:
        """Kill all processes in the host. May be called again."""
        self.up = False
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


class Network:
    """Hosts and the switch between them, to be used in a ``with``.

    Args:
        *names: of the hosts.
        seed: of the losses.
    """

    def __init__(self, *names: str, seed: int = 0) -> None:
        if reason := why_not():
            raise RuntimeError(
                f"hosts must have namespaces of their own, and this machine {reason}."
            )
        self.hosts: list[Host] = []
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="switch", daemon=True)
        try:
            for number, name in enumerate(names, start=1):
                self.hosts.append(Host(name, number))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts. May be called again."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        while self.hosts:
            host = self.hosts.pop()
            host.kill()
            os.close(host.tap)

    def _carry(self) -> None:
        """Forward each frame to the hosts that it may be for."""
        waiting: list[tuple[float, int, bytes, Host]] = []
        of_address: dict[bytes, Host] = {}
        number = 0
        while not self._ended.is_set():
            now = time.monotonic()
            timeout = max(0.0, waiting[0][0] - now) if waiting else 0.2
            ready, _, _ = select.select(
                [host.tap for host in self.hosts], [], [], min(timeout, 0.2)
            )
            for host in self.hosts:
                if host.tap not in ready:
                    continue
                for _ in range(64):
                    try:
                        frame = os.read(host.tap, _MTU + 64)
                    except OSError:  # no more, or the host is gone
                        break
                    of_address[frame[6:12]] = host
                    known = of_address.get(frame[:6])
                    for other in self.hosts if known is None else [known]:
                        if (
                            other is host
                            or not host.up
                            or self._random.random() < host.loss + other.loss
                        ):
                            continue
                        number += 1
                        due = time.monotonic() + host.delay_s + other.delay_s
                        heapq.heappush(waiting, (due, number, frame, other))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, frame, host = heapq.heappop(waiting)
                if host.up:
                    with suppress(OSError):  # its queue is full, or the host is gone
                        os.write(host.tap, frame)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
