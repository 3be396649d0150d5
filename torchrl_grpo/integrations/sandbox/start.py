"""First code in a sandbox: limits its own process and all its descendants, and then runs a program.

The package does not import this file. Its only argument is JSON: the limits and the program's path.
"""

from __future__ import annotations

import json
import os
import sys

_FORBIDDEN = {
    "x86_64": (0xC000003E, (
        319, 447, 29, 68, 64, 240, 278, 253, 294, 300, 54,
        101, 310, 311, 438, 425, 321, 298, 248, 249, 250, 141, 142, 144, 203, 314,
    ), 302, 41),
    "aarch64": (0xC00000B7, (
        279, 447, 194, 186, 190, 180, 75, 26, 262, 208,
        117, 270, 271, 438, 425, 280, 241, 217, 218, 219, 140, 118, 119, 122, 274,
    ), 261, 198),
}  # fmt: skip
"""For each architecture, its audit number; the numbers of system calls for memory outside any
address space (memfd_create, memfd_secret, shmget, msgget, semget, mq_open, vmsplice, inotify_init,
inotify_init1, fanotify_init, and setsockopt, which can enlarge a socket's buffer up to the
machine's limit), for other processes and the kernel (ptrace, process_vm_readv, process_vm_writev,
pidfd_getfd, io_uring_setup, bpf, perf_event_open, add_key, request_key, keyctl) and for a share of
the CPU that looks like a busy machine (setpriority, sched_setparam, sched_setscheduler,
sched_setaffinity, sched_setattr);
the number of prlimit64, allowed only for the process's own limits; and the number of socket.
"""
_FAMILIES = 1, 2, 10
"""Allowed socket families: local ones, and network ones, though there is no network. Sockets of
virtual machines could reach the host.
"""


def limit(limits: dict[str, int]) -> None:
    """Set resource limits by the suffixes of their names; macOS has no limit on memory."""
    import resource

    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (AttributeError, ValueError, OSError):
            continue


def forbid() -> None:
    """Make system calls fail that the limits do not cover.

    Raises:
        OSError: the kernel or this architecture has no such filter.
    """
    import ctypes
    import errno
    import struct

    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _FORBIDDEN:
        raise OSError(f"no system call filter for {sys.platform} on {machine}")
    audit, calls, prlimit, socket = _FORBIDDEN[machine]
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06
    refuse = (leave, 0, 0, 0x50000 | errno.EPERM)
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, audit),
        refuse,
        (load, 0, 0, 0),
        (at_least, 0, 1, 2**30),
        refuse,
    ]
    for call in calls:
        steps += [(equal, 0, 1, call), refuse]
    for call, allowed in ((prlimit, (0,)), (socket, _FAMILIES)):
        steps += [(equal, 0, len(allowed) + 2, call), (load, 0, 0, 16)]  # its first argument
        steps += [(equal, len(allowed) - i, 0, value) for i, value in enumerate(allowed)] + [refuse]
    steps.append((leave, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    control = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, filter_calls = 38, 22
    if control(no_new_privileges, 1, 0, 0, 0) or control(filter_calls, 2, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refused the system call filter")


def main() -> None:
    """Limit this process, report that by an empty line on standard output, and run the program."""
    settings = json.loads(sys.argv.pop())
    limit(settings["limits"])
    try:
        forbid()
    except (ImportError, OSError):
        if settings["strict"]:
            raise
    sys.path[:] = [path for path in sys.path if path]
    with open(settings["program"], encoding="utf-8") as source:
        code = compile(source.read(), "program.py", "exec", dont_inherit=True)
    os.write(1, b"\n")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
