"""Program that runs the program of a response on one test after another, each with its own limits.

The package does not import this file. The first line of its standard input describes the program,
and each further line is a test; each line of its standard output is the outcome of a test, or asks
whether a program that is late must end, which the next line answers. It does not know the expected
results. The program runs in child processes: one for each test of standard
input, otherwise one that answers tests until it exits or is killed at a limit. In namespaces this
process is the first one, which the program cannot kill.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import json
import os
import resource
import selectors
import signal
import sys
import time
from contextlib import suppress
from typing import Any

_CHUNK = 2**16
_POLL_S = 0.05
_STARS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
)
"""Modules whose names contest programs may use without an import, in APPS' successors and
LiveCodeBench.
"""


def failed(answer: str) -> bool:
    """Return whether a child's answer, which its program may have forged, has an error."""
    try:
        return bool(json.loads(answer)["error"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return True


def leave() -> None:
    """Exit as Python does, but without freeing everything, which takes time."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # closed by the program
            stream.flush()
    os._exit(0)


def usual_imports() -> dict[str, Any]:
    """Return the scope of contest programs, with the usual imports."""
    scope: dict[str, Any] = {}
    for module in _STARS.split():
        exec(f"from {module} import *", scope)
    for module in _STARS.split()[:-2]:
        exec(f"import {module}", scope)
    return scope


class Program:
    """The program of a response.

    Args:
        source: its source.
        seconds: CPU time limit of each test.
        output: maximum output in bytes.
        kind: kind of its tests: ``assert``, ``call`` or ``stdin``; the last two as in contests,
            with the usual imports and any exit status.
        stub: text that it may continue.
        setup: statements to run after it.
        function: name of the function that tests call.
        exact: whether the keys of a dict as the only argument remain text, as in JSON.
        tests: number of tests.
    """

    def __init__(
        self,
        source: str,
        seconds: float,
        output: int,
        kind: str = "stdin",
        stub: str = "",
        setup: str = "",
        function: str | None = None,
        exact: bool = False,
        tests: int = 1,
    ) -> None:
        self.seconds = seconds
        self.output = output
        self.setup = setup
        self.function = function
        self.exact = exact
        self.statements = kind == "assert"
        self.stays = kind != "stdin"
        self.cpu_s = int(seconds * (tests + 1 if self.stays else 1)) + 2
        self.name = "solution" if self.stays else "__main__"
        self.names = {} if self.statements else usual_imports()
        self.sources = [f"{stub}\n{source}", stub + source, source] if stub else [source]
        self.child: Child | None = None
        self.ask: Any = None

    def load(self) -> dict[str, Any]:
        """Run the program as a module; return its scope."""
        for source in self.sources:
            try:
                code = compile(source, "solution.py", "exec", dont_inherit=True)
                break
            except Exception:
                if source is self.sources[-1]:
                    raise
        module = type(sys)(self.name)
        scope = vars(module)
        scope.update(self.names)
        scope["__name__"] = self.name
        sys.modules[self.name] = module
        vars(builtins).update(exit=sys.exit, quit=sys.exit)
        if not self.statements:
            scope.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)
            sys.setrecursionlimit(50_000)
            sys.set_int_max_str_digits(50_000)
        exec(code, scope)
        exec(compile(self.setup, "setup.py", "exec", dont_inherit=True), scope)
        return scope

    def play(self) -> None:
        """Run once, on a test's standard input."""
        with suppress(SystemExit):
            self.load()

    def answer(self) -> None:
        """Load the program, then run one test after another. An answer has the error, and a call's
        result as JSON.
        """
        requests = os.fdopen(os.dup(0))
        answers = os.fdopen(os.dup(1), "w")
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        # Keep references, because a program may replace them.
        run, translate, dumps, loads, write = exec, compile, json.dumps, json.loads, os.write
        fd = answers.fileno()

        def tell(result: str | None = None, error: BaseException | None = None) -> None:
            text = "" if error is None else f"{type(error).__name__}: {error}"[:500]
            data = dumps({"result": result, "error": text}).encode() + b"\n"
            while data:
                data = data[write(fd, data) :]

        try:
            scope = self.load()
            call = None if self.function is None else self.find_function(self.function, scope)
        except BaseException as error:
            return tell(error=error)
        tell()
        for line in requests:
            try:
                test = loads(line)
                if self.statements:
                    run(translate(test, "test.py", "exec", dont_inherit=True), scope)
                    result = None
                else:
                    result = dumps(call(*self.arguments(test)))  # type: ignore[misc]
            except BaseException as error:
                tell(error=error)
            else:
                tell(result)

    def find_function(self, name: str, scope: dict[str, Any]) -> Any:
        """Return a function of the program or of its class ``Solution``, excluding the usual
        imports.
        """
        function = scope.get(name)
        if function is None or function is self.names.get(name):
            function = getattr(scope["Solution"](), name)
        return function

    def arguments(self, test: list[Any]) -> list[Any]:
        """Return the arguments of a call."""
        if not self.exact and test and isinstance(test[0], dict):
            with suppress(ValueError):
                return [{int(key): value for key, value in test[0].items()}]
        return test

    def test(self, test: Any) -> dict[str, Any]:
        """Run a test; return its outcome (see ``Child.talk``) and the program's output."""
        if not self.stays:
            child = Child(self, self.play)
            end = child.talk(test.encode(errors="replace"), one_line=False)
            child.kill()
            return end
        loaded = True
        end = {}
        if self.child is None:
            self.child = Child(self, self.answer)
            end = self.child.talk(b"", one_line=True)
            loaded = end["end"] == "answer" and not failed(end["output"])
        if loaded:
            end = self.child.talk(json.dumps(test).encode() + b"\n", one_line=True)
        if not loaded or end["end"] != "answer":
            self.child.kill()
            self.child = None
        return end | {"loaded": loaded}


class Child:
    """Child process that runs a function and then exits as Python does.

    Args:
        program: the program, which has the limits.
        run: the function.
    """

    def __init__(self, program: Program, run: Any) -> None:
        self.program = program
        self.status: int | None = None
        child_end, self.stdin = os.pipe()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.pid = os.fork()
        if self.pid:
            for end in (child_end, out, err):
                os.close(end)
            os.set_blocking(self.stdin, False)
            return
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end, number in ((child_end, 0), (out, 1), (err, 2)):
            os.dup2(end, number)
        os.closerange(3, 64)
        resource.setrlimit(resource.RLIMIT_CPU, (program.cpu_s, program.cpu_s + 1))
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        run()
        leave()

    def cpu(self) -> float:
        """Return the CPU time of all its threads, or the wall-clock time if that is unknown."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return time.monotonic()

    def talk(self, data: bytes, *, one_line: bool) -> dict[str, Any]:
        """Write its input and read its output.

        Args:
            data: data for its standard input.
            one_line: whether a line is an answer; if not, its input ends after the data, and it
                must exit.

        Returns:
            ``end``: ``exit``, ``answer``, or why it must be killed: ``time`` (CPU time, or
            waiting), ``output``, or what the answer to a ``late`` was; and ``output``, ``errors``
            and ``status``.
        """
        printed = {self.stdout: bytearray(), self.stderr: bytearray()}
        start = mark = time.monotonic()
        start_cpu = self.cpu()
        seconds = self.program.seconds
        end = ""
        with selectors.DefaultSelector() as selector:
            if data or not one_line:
                selector.register(self.stdin, selectors.EVENT_WRITE)
            for stream in printed:
                selector.register(stream, selectors.EVENT_READ)
            while not end:
                exited = self.exited()
                tick_s = _POLL_S if selector.get_map() else 0.001
                events = selector.select(0 if exited else tick_s)
                for key, _ in events:
                    if key.fd == self.stdin:
                        data = self.feed(data)
                        if not data:
                            selector.unregister(self.stdin)
                            if not one_line:
                                os.close(self.stdin)
                                self.stdin = -1
                    elif chunk := os.read(key.fd, _CHUNK):
                        printed[key.fd] += chunk
                    else:
                        selector.unregister(key.fd)
                now = time.monotonic()
                cpu = self.cpu()
                has_output = any(key.fd != self.stdin for key, _ in events)
                if sum(map(len, printed.values())) > self.program.output:
                    end = "output"
                elif one_line and printed[self.stdout].endswith(b"\n"):
                    end = "answer"
                # Processes that it left behind may continue to print.
                elif exited and (now - mark > seconds or not has_output):
                    end = "exit"
                elif not exited and cpu - start_cpu > seconds:
                    end = "time"
                elif not exited and now - start > seconds and now - mark > seconds / 8:
                    mark = now
                    end = self.program.ask({"end": "late", "wall_s": now - start})
        output, errors = (bytes(part).decode(errors="replace") for part in printed.values())
        return {
            "end": end,
            "status": self.status,
            "output": output,
            "errors": errors[-2000:],
            "loaded": True,
        }

    def feed(self, data: bytes) -> bytes:
        """Write some of the data; return the rest, or nothing if the child no longer reads."""
        try:
            return data[os.write(self.stdin, data[:_CHUNK]) :] if data else b""
        except BlockingIOError:
            return data
        except OSError:
            return b""

    def exited(self) -> bool:
        """Return whether it has exited, and set its status, which is negative after a signal."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def kill(self) -> None:
        """Kill it with its process group or, in namespaces, with all processes."""
        with suppress(ProcessLookupError, PermissionError):
            if os.getpid() == 1:
                os.kill(-1, signal.SIGKILL)
            else:
                os.killpg(self.pid, signal.SIGKILL)
        if os.getpid() == 1:
            with suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        elif self.status is None:
            os.waitpid(self.pid, 0)
        for end in (self.stdin, self.stdout, self.stderr):
            with suppress(OSError):
                os.close(end)


def main() -> None:
    """Answer until standard input ends."""
    gc.freeze()  # children share this memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # other signals do not reach the first process
    lines = os.fdopen(0, "rb", closefd=False)
    program = Program(**json.loads(lines.readline()))

    def ask(message: Any) -> Any:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]
        return json.loads(lines.readline() or sys.exit())

    program.ask = ask
    test = ask(None)
    while True:
        test = ask(program.test(test))


if __name__ == "__main__":
    main()
