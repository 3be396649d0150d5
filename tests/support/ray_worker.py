"""The program that Ray starts for a worker in tests: it requests a process from a server of
``forks``, and falls back to Ray's own worker without one.

It must not import anything slow.
"""

import json
import os
import socket
import sys
import time
from importlib.util import find_spec


def main() -> None:
    context = {}
    arguments = []
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            arguments.append(argument)
    environment = dict(os.environ)
    environment |= {
        key: os.path.expandvars(value) for key, value in (context.get("env_vars") or {}).items()
    }
    request = {"arguments": arguments, "env": environment, "cwd": os.getcwd(), "files": [0, 1, 2]}
    request |= {
        "session": False,
        "adopted": False,
        "vllm": "TORCHRL_GRPO_TEST_WITH_VLLM" in environment,
    }
    request["group"] = os.getpgrp() == os.getpid()  # Ray ends it together with the worker
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        address = os.environ.get("TORCHRL_GRPO_TEST_FORKS")
        deadline = time.monotonic() + 30
        there = False
        while address and not there and time.monotonic() < deadline:  # it imports
            there = connection.connect_ex(f"\0{address}") == 0
            time.sleep(0 if there else 0.05)
        if not there:
            ray = os.path.dirname(find_spec("ray").origin)
            usual = os.path.join(ray, "_private", "workers", "setup_worker.py")
            os.execv(sys.executable, [sys.executable, usual, *sys.argv[1:]])
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        connection.recv(1)  # closed once the worker exists


main()
