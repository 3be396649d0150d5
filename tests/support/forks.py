"""Start Python processes as forks of a server that has everything imported, which saves seconds
(Linux only).

A process that starts others has a server as its child, which has no threads and has done the slow
imports. The server forks itself for a Python command line, with the environment and the files of
the new process. The parent of the fork is the process that requested it, as usual; only Ray workers
are children of the server of the process that started Ray. Each of these processes has a server of
its own, so its children are forks too.

A process that ``subprocess`` starts, and all of its descendants, are new interpreters. Tests of
startup and imports use these.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torchrl_grpo.host import startup
from torchrl_grpo.host.processes import die_with_parent
from torchrl_grpo.runtime import cluster

SERVER = "test-forks"
"""Name of the servers' processes."""
ADDRESS = "TORCHRL_GRPO_TEST_FORKS"
"""Environment variable with the server's address; without it a Ray starts new interpreters, see ``ray_worker.py``."""
WITH_VLLM = "TORCHRL_GRPO_TEST_WITH_VLLM"
"""Environment variable: what is started, and workers of a Ray, have imported vLLM too."""
_MOST_BYTES = 2**20
_MOST_FILES = 64
_LONGEST_START_S = 120
_OUT_OF_THE_WAY = 512  # requests never use this file descriptor or a higher one
_OF_RAY = ("google.protobuf.json_format", "jsonschema", "msgpack", "requests", "uvloop")
"""What Ray imports, in half of the time that its own import takes."""
_FIRST = "TORCHRL_GRPO_TEST_FIRST"
"""The environment variable that comes first. It stays in its place, before which Ray looks for the command line."""
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36

_own: tuple[int, str] | None = None
"""The process that the server is for, and the server's address."""
_one_at_a_time = threading.Lock()


def start() -> None:
    """Start this process's server if it has none. The main thread must do it, because the server
    ends with its thread.
    """
    if _own is not None:
        return
    address = _new_address()
    command = f"""
from torchrl_grpo.host.startup import quick_imports
with quick_imports():
    from tests.support.forks import _import_and_serve
_import_and_serve({address!r}, {os.getpid()})
"""
    others = {name: value for name, value in os.environ.items() if name != _FIRST}
    subprocess.Popen(
        [sys.executable, "-c", command],
        cwd=Path(__file__).parents[2],  # a test may have changed to a folder of its own
        env={_FIRST: ""} | others | {"OMP_NUM_THREADS": "1"},
    )
    _use(address)
    _patch()


class Popen(subprocess.Popen[str]):
    """Like ``subprocess.Popen`` for a command line that begins with ``sys.executable``, without the
    time for imports.

    It starts a new interpreter where there is no Linux.
    """

    def _execute_on_linux(self, args: Sequence[Any], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any,
        cwd: Any, env: Mapping[str, str] | None, startupinfo: Any, creationflags: Any, shell: bool, p2cread: int,
        p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: bool, gid: Any,
        gids: Any, uid: Any, umask: int, start_new_session: bool, *rest: Any) -> None:  # fmt: skip
        start()
        assert args[0] == sys.executable and preexec_fn is None and not shell
        wanted = enumerate((p2cread, c2pwrite, errwrite))
        files = {target: target if file == -1 else file for target, file in wanted} | {
            file: file for file in pass_fds
        }
        arguments = [os.fspath(argument) for argument in args[1:]]
        env = os.environ if env is None else env
        vllm = WITH_VLLM in env or any(argument.endswith("=vllm") for argument in arguments)
        self.pid = _fork(arguments, env, cwd, files, start_new_session, vllm)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    if sys.platform == "linux":
        _execute_child = _execute_on_linux


def _fork(
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: Any,
    files: Mapping[int, int],
    session: bool,
    vllm: bool,
) -> int:
    """Return the process id of a new child that runs a Python command line, with files by
    descriptor.
    """
    assert _own is not None
    request = {
        "arguments": list(arguments),
        "env": dict(env),
        "cwd": os.fspath(cwd or os.getcwd()),
        "files": list(files),
        "session": session,
        "adopted": True,
        "vllm": vllm,
    }
    prctl = ctypes.CDLL(None).prctl
    with _one_at_a_time, _connected(_own[1]) as connection:
        prctl(
            _PR_SET_CHILD_SUBREAPER, 1
        )  # orphans below us, such as this child, become our children
        try:
            socket.send_fds(connection, [json.dumps(request).encode()], list(files.values()))
            pid = int(connection.recv(32))
            assert connection.recv(8) == b"adopted"
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return pid


def _connected(address: str) -> socket.socket:
    deadline = time.monotonic() + _LONGEST_START_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address)
            return connection
        except ConnectionRefusedError:  # it imports
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _new_address() -> str:
    return f"\0torchrl-grpo-test-{os.getpid()}-{time.monotonic_ns()}"


def _use(address: str) -> None:
    global _own
    _own = os.getpid(), address
    os.environ[ADDRESS] = address[1:]


def use_in_ray() -> None:
    """Let Ray clusters of this process have forks as workers; ``cluster.start`` does so by itself.

    Without a server of forks, as on other systems than Linux, Ray starts new interpreters.
    """
    constants: Any = import_module("ray._private.ray_constants")
    constants.SETUP_WORKER_FILENAME = os.path.join(os.path.dirname(__file__), "ray_worker.py")


def _patch() -> None:
    """Make ``multiprocessing`` and Ray start processes this way, here and in all forks."""
    real, start_here = multiprocessing.util.spawnv_passfds, cluster._start_here

    def spawnv_passfds(path: Any, args: Any, passfds: Any) -> int:
        if _own is None or _own[0] != os.getpid() or "--multiprocessing-fork" not in args:
            return real(path, args, passfds)
        files = {file: file for file in (0, 1, 2, *passfds)}
        arguments = [os.fsdecode(argument) for argument in args[1:]]
        return _fork(arguments, os.environ, None, files, False, bool(sys.modules.get("vllm")))

    def start_with_forks(folder: str) -> None:
        use_in_ray()
        start_here(folder)

    multiprocessing.util.spawnv_passfds = spawnv_passfds
    cluster._start_here = start_with_forks


# The server. It does not import Ray, which reads its process's environment at import.

_set_by_imports: dict[str, str] = {}
"""Environment variables."""


def _import_and_serve(address: str, parent: int) -> None:
    sys.path.remove("")
    for module in (
        "torchrl_grpo.runtime.actors",
        "torchrl_grpo.assembly.run",
        "torchrl_grpo.scripts.job",
    ):
        import_module(module)
    for module in ("pytest", "psutil"):
        import_module(module)
    for module in _OF_RAY:
        with suppress(ImportError):
            import_module(module)
    from tests.support import known_prompts
    from tests.support.configs import compose_config
    from torchrl_grpo.assembly.prepare import prepare

    _patch()
    known_prompts.keep()
    prepare(compose_config(), [])  # select the prompts
    gc.freeze()
    _serve(address, parent)


def _serve(address: str, parent: int) -> None:
    try:
        die_with_parent(parent)
    except SystemExit:  # the script has already ended; its standard error is not ours
        os._exit(0)
    _be_named(SERVER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        while True:
            connection, _ = listener.accept()
            with connection:
                data, files, *_ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
                if data:
                    _answer(connection, listener, json.loads(data), files)


def _be_named(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _reap(*_: Any) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _answer(
    connection: socket.socket, listener: socket.socket, request: dict[str, Any], files: list[int]
) -> None:
    if request["vllm"] and "vllm" not in sys.modules:
        before = dict(os.environ)
        sys.modules["ray"] = None  # type: ignore[assignment]  # or vLLM imports it, with the token of this environment
        import_module("vllm.v1.engine.core")
        import_module("vllm.v1.executor.multiproc_executor")
        del sys.modules["ray"]
        _set_by_imports.update(
            {name: value for name, value in os.environ.items() if before.get(name) != value}
        )
        gc.freeze()
    child = os.fork()
    if child:
        if request["adopted"]:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
            connection.send(b"adopted")
        for file in files:
            os.close(file)
        return
    if request["adopted"]:
        between = os.getpid()
        if child := os.fork():
            connection.send(str(child).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
    listener.close()
    connection.close()
    _be_new(request, files)


def _be_new(request: dict[str, Any], files: list[int]) -> None:
    """Become a new interpreter with a server of its own; never returns."""
    _be_named("python")
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    elif request.get("group"):
        os.setpgid(0, 0)
    duplicates = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for file in files]
    for file in files:
        os.close(file)
    for file, target in zip(duplicates, request["files"], strict=True):
        os.dup2(file, target)
        os.close(file)
    for name in os.environ.keys() - {_FIRST}:
        del os.environ[name]
    os.environ.update(
        {
            name: value
            for name, value in (_set_by_imports | request["env"]).items()
            if name != _FIRST
        }
    )
    os.chdir(request["cwd"])
    own = os.getpid()
    address = _new_address()
    if os.fork() == 0:
        for target in request["files"]:
            if target > 2:
                os.close(target)
        _serve(address, own)
    _use(address)
    _take_environment()
    status = 0
    try:
        _run_command_line(request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        status = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(own, signal.SIGINT)
    os._exit(status)


def _take_environment() -> None:
    """Apply the environment variables that libraries read when they are imported."""
    import torch

    startup._started_at = time.monotonic()
    tempfile.tempdir = None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if (vllm_logger := sys.modules.get("vllm.logger")) is not None:
        vllm_logger._configure_vllm_root_logger()
    sys.path[:0] = [
        one
        for one in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if one and one not in sys.path
    ]


def _run_command_line(arguments: list[str]) -> None:
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        arguments = arguments[2 if arguments[0] == "-X" else 1 :]
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")
