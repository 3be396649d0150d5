"""The vLLM engine of the asynchronous loop: vLLM's ``AsyncLLM`` behind the ``Engine`` interface.

Many threads may call ``generate`` at once; vLLM computes their requests together (continuous
batching), and weights may change while they run. An event loop in a thread of its own talks to
vLLM's scheduler, which is a process, and the model shards are further ones. All of them end with
this process, however it ends.

vLLM is imported when an engine is made, never before.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import os
import select
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

from torch import Tensor

from torchrl_grpo.checks import InFlight
from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.generation.base import Completion, EngineDeadError, OnFinished, SamplingParams
from torchrl_grpo.generation.vllm import (
    RPC_TIMEOUT_S,
    VLLMBase,
    VLLMSettings,
    engine_arguments,
    require_vllm,
    starting_vllm,
)
from torchrl_grpo.generation.vllm_answers import Answer, watch_for_stops
from torchrl_grpo.host.processes import die_with_parent, enable_stack_dump
from torchrl_grpo.weights.worker import unname_queues

SHUTDOWN_TIMEOUT_S = 10.0
"""Seconds that vLLM's processes may take to end by themselves."""

_EXECUTOR = "GuardedExecutor_"

T = TypeVar("T")


class AsyncVLLMEngine(VLLMBase):
    """Samples with vLLM for many threads at once, and takes new weights meanwhile.

    ``in_flight`` says what an update does to the requests that are running:

    - ``"wait"``: calls of ``generate`` that come after the update wait for it, it waits for those
      before it. Every response is of one version.
    - ``"keep"``: they stop between two tokens and continue with the new weights. vLLM drops their keys
      and values and computes them again, so that a token's log-prob is that of the weights that
      sampled it, given all tokens before, and nothing of the old weights stays.
      ``Completion.versions`` says which weights sampled which token: vLLM's scheduler labels each
      token in the process that samples it.
    - ``"abort"``: they start again from their prompt with the new weights; the caller only waits
      longer. ``restarted_requests`` counts them. A request is restarted whole, with the responses
      that had already ended: replacing only the others would favour short responses.

    Requests carry no seed of their own (vLLM's CPU sampler fails when a paused one does), so the
    draws depend on how the responses were batched: ``seed`` and ``state_dict`` repeat them only
    where one response is sampled at a time.

    Attributes:
        restarted_requests: how often an update with ``in_flight="abort"`` made a request start
            again.

    Args:
        model_path: a ``save_pretrained`` folder or a name on the Hugging Face hub; no tokenizer is
            needed.
        in_flight: what an update does to running requests.
        update_timeout: seconds that an update may wait for running requests.
        **settings: see ``VLLMSettings``.

    Raises:
        ValueError: vLLM is not installed, or cannot run this model on this machine.

    Examples:
        >>> engine = AsyncVLLMEngine("path/to/model", in_flight="keep")  # doctest: +SKIP
        >>> with ThreadPoolExecutor() as pool:  # doctest: +SKIP
        ...     groups = pool.map(lambda prompt: engine.generate([prompt], 8, params), prompts)
        ...     engine.update_weights(named_weights(model), version=1)
        >>> engine.close()  # doctest: +SKIP
    """

    concurrent = True

    def __init__(
        self,
        model_path: str,
        *,
        in_flight: InFlight = "wait",
        update_timeout: float = RPC_TIMEOUT_S,
        **settings: Unpack[VLLMSettings],
    ) -> None:
        require_vllm()
        self.restarted_requests = 0
        self._in_flight, self._update_timeout = in_flight, update_timeout
        self._updates, self._closing = threading.Lock(), threading.Lock()
        self._request_ids = itertools.count()
        self._running = 0
        self._workers: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="AsyncVLLMEngine", daemon=True
        )
        self._thread.start()
        try:
            with starting_vllm(None, settings.get("log_file")):
                config, arguments = engine_arguments(model_path, settings)
                # All of vLLM's objects live in the loop's thread. A process that is to die with its
                # parent dies, in truth, with the thread that started it, and this one lasts until
                # the end.
                model_config = asyncio.run_coroutine_threadsafe(
                    self._start(arguments), self._loop
                ).result()
                workers = self._llm.vllm_config.parallel_config.world_size
                super().__init__(config, model_config, workers)
                watch_for_stops(self._llm.output_processor, self._stops)
                # The scheduler says that it is ready before it has connected the socket on which it
                # answers: only an answer shows that the files of the sockets are not needed any
                # more.
                self._workers = [os.pidfd_open(pid) for pid in self._rpc("die_with_parent")]
                self._rpc("finish_setup")
                self._call(self._set_version(0))
        except BaseException:
            self.close()
            raise

    async def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self._admitting, self._idle = asyncio.Event(), asyncio.Event()
        self._admitting.set()
        self._idle.set()
        self._end: asyncio.Future[str] = (
            asyncio.get_running_loop().create_future()
        )  # why nothing can be done any more
        self._llm = AsyncLLM(
            # Without a context it serves 128 sequences and 2,048 tokens a step on any device; the
            # server's, with smaller steps for shorter waits, is not for us.
            AsyncEngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS),
            executor_class=_guarded_executor(),
            log_stats=False,
            log_requests=False,
        )
        self._sentinels = {
            p.sentinel: p.pid for p in self._llm.engine_core.resources.engine_manager.processes
        }
        for sentinel, pid in self._sentinels.items():
            asyncio.get_running_loop().add_reader(
                sentinel,
                self._finish,
                f"the vLLM engine's process {pid} has ended: make a new engine.",
            )
        return self._llm.model_config

    def _finish(self, reason: str) -> None:
        """Makes every call, the waiting ones included, raise; runs in the loop."""
        while self._sentinels:
            asyncio.get_running_loop().remove_reader(self._sentinels.popitem()[0])
        if not self._end.done():
            self._end.set_result(reason)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and waits for it, or for the end of the engine.

        Raises:
            RuntimeError: the engine is closed, or its process has ended.
        """
        loop = self._loop
        if loop is None:
            coroutine.close()
            raise RuntimeError("the engine is closed.")
        return asyncio.run_coroutine_threadsafe(self._until_end(coroutine), loop).result()

    async def _until_end(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task: asyncio.Future[Any] = asyncio.ensure_future(coroutine)
        await asyncio.wait({task, self._end}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not (task.exception() and self._llm.errored):
            return task.result()
        task.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # or asyncio reports it
        task.cancel()
        del task  # its traceback would keep vLLM's objects alive with our error
        await asyncio.wait(
            {self._end}, timeout=5
        )  # vLLM may have seen the end of its process a moment before us
        raise EngineDeadError(
            self._end.result() if self._end.done() else "the vLLM engine failed: make a new engine."
        )

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._call(self._ask_workers(method, *args))

    async def _ask_workers(self, method: str, *args: Any) -> list[Any]:
        try:
            return await asyncio.wait_for(
                self._llm.collective_rpc(method, args=args), RPC_TIMEOUT_S
            )
        except TimeoutError:
            raise TimeoutError(
                f"vLLM's workers did not answer {method!r} in {RPC_TIMEOUT_S:.0f} s."
            ) from None

    def generate(
        self,
        prompts: Sequence[Tensor],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """See ``Engine``; any number of threads may call it at the same time, even during an
        update.

        With ``in_flight="abort"``, where what is finished may be sampled again, ``on_finished`` is
        not called.

        Raises:
            ValueError: a prompt leaves no room for one token in the model's context.
            RuntimeError: the engine is closed, before or during the call, or its process has ended.
        """
        on_finished = None if self._in_flight == "abort" else on_finished
        sampling = [
            self._sampling_params(len(prompt), n, params, on_finished is not None)
            for prompt in prompts
        ]
        return self._call(self._generate(prompts, sampling, n, on_finished))

    async def _generate(
        self,
        prompts: Sequence[Tensor],
        sampling: Sequence[Any],
        n: int,
        on_finished: OnFinished | None,
    ) -> list[list[Completion]]:
        while not self._admitting.is_set():
            await self._admitting.wait()
        self._running += 1
        self._idle.clear()
        try:
            requests = enumerate(zip(prompts, sampling, strict=True))
            return await asyncio.gather(
                *(
                    self._request(prompt, own, Answer(i, n, own.n, on_finished))
                    for i, (prompt, own) in requests
                )
            )
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _request(self, prompt: Tensor, sampling: Any, answer: Answer) -> list[Completion]:
        from vllm import TokensPrompt

        while True:
            request, reasons = TokensPrompt(prompt_token_ids=prompt.tolist()), set()
            async for output in self._llm.generate(request, sampling, str(next(self._request_ids))):
                answer.add(output.outputs)
                reasons |= {sample.finish_reason for sample in output.outputs}
            reasons -= {"stop", "length", None}
            if not reasons:
                return answer.completions()
            if reasons != {"abort"}:
                raise RuntimeError(
                    f"vLLM ended a request with {sorted(reasons)}: its log has the error."
                )
            self.restarted_requests += 1
            answer.restart()

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        """Context of an update, in which running requests are treated as ``in_flight`` says.

        Raises:
            EngineDeadError: the workers did not load the weights, or not in time; or the engine's
                process has ended.
            TimeoutError: requests ran for longer than ``update_timeout``; the engine continues with
                the weights and the version that it has.
        """
        with self._updates:
            try:
                self._call(self._pause(version))
                try:
                    yield
                except TransferRefusedError:
                    raise
                except BaseException as error:
                    # A part of the weights may have been loaded. It is the engine that is lost, and
                    # not the run.
                    reason = (
                        f"vLLM's workers did not load the weights of version {version} ({error}): "
                        "make a new engine."
                    )
                    if self._loop is not None:
                        self._loop.call_soon_threadsafe(self._finish, reason)
                    raise EngineDeadError(reason) from error
                self._call(self._set_version(version))
            finally:
                self._call(self._resume())

    async def _pause(self, version: int) -> None:
        waiting_for = ""
        try:
            async with asyncio.timeout(self._update_timeout):
                if self._in_flight == "wait":
                    self._admitting.clear()
                    waiting_for = "running calls of generate to end"
                    await self._idle.wait()
                waiting_for = "vLLM to pause"
                # Also drops all keys and values: the prefix cache, and what paused requests have
                # computed.
                await self._llm.pause_generation(mode=self._in_flight)
        except TimeoutError:
            raise TimeoutError(
                f"the update to version {version} waited over {self._update_timeout:g} s for "
                f"{waiting_for} ({self._running} calls of generate are running)."
            ) from None

    async def _resume(self) -> None:
        self._admitting.set()
        try:
            await asyncio.wait_for(self._llm.resume_generation(), SHUTDOWN_TIMEOUT_S)
        except TimeoutError:
            self._finish(
                f"vLLM did not resume within {SHUTDOWN_TIMEOUT_S:g} s of an update: make a new "
                "engine."
            )

    async def _set_version(self, version: int) -> None:
        """Make vLLM's scheduler label what is sampled from here on."""
        await self._llm.update_weight_version(str(version))
        self.policy_version = version

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._call(self._set_version(self.policy_version))

    def close(self) -> None:
        """Ends the engine and every process of its own; calls that are waiting raise. May be called
        again.
        """
        with self._closing:
            loop, self._loop = self._loop, None
            if loop is None:
                return
            if self._llm is not None:
                loop.call_soon_threadsafe(self._finish, "the engine was closed.")
                self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()
            self._llm = None
            for worker in self._workers:
                _end_process(worker)
            gc.collect()  # its message queues hold shared memory until they are collected


async def _cancel_all() -> None:
    """Cancels the other tasks of the loop and waits for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # A caller's task ends by itself, with the reason; it must not see a cancellation.
    _, pending = await asyncio.wait(tasks, timeout=1) if tasks else ((), ())
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def _end_process(pidfd: int) -> None:
    """Kills a process that does not end by itself, and waits for it."""
    if not select.select([pidfd], [], [], 1)[0]:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], SHUTDOWN_TIMEOUT_S)
    os.close(pidfd)


@functools.cache
def _guarded_executor() -> type:
    """vLLM's executor under a name of ours, which brings our code into the scheduler's process; see
    ``__getattr__``.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    class GuardedExecutor(MultiprocExecutor):
        def _init_executor(self) -> None:
            super()._init_executor()
            enable_stack_dump()
            unname_queues()

    # Pickle looks for it in this module, under a name that tells a new process whose child it is.
    GuardedExecutor.__qualname__ = f"{_EXECUTOR}{os.getpid()}"
    globals()[GuardedExecutor.__qualname__] = GuardedExecutor
    return GuardedExecutor


def __getattr__(name: str) -> Any:
    """Provide the executor to the new scheduler process, which looks it up here while reading its
    arguments.

    It is the first that we hear of that process, before it waits for anything from us, and the time
    to tie it to us.
    """
    if not name.startswith(_EXECUTOR):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    die_with_parent(int(name.removeprefix(_EXECUTOR)))
    return _guarded_executor()
