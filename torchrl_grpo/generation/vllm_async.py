"""The vLLM engine of the asynchronous loop: vLLM's ``AsyncLLM`` behind the ``Engine`` interface.

Many threads may call ``generate`` at once; vLLM computes their requests together (continuous
batching), and weights may change while they run. An event loop in a separate thread talks to
vLLM's scheduler process, which has the model shards in further processes. All of them end when
this process ends, however it ends.

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
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.checks import InFlight
from torchrl_grpo.errors import ReceiptError, TransferRefusedError
from torchrl_grpo.generation.base import (
    Completion,
    Engine,
    EngineDeadError,
    EngineRequest,
    OnFinished,
    SamplingParams,
)
from torchrl_grpo.generation.vllm import (
    RPC_TIMEOUT_S,
    VLLMBase,
    VLLMEngine,
    VLLMSettings,
    engine_arguments,
    require_vllm,
    starting_vllm,
    vllm_settings,
)
from torchrl_grpo.generation.vllm_answers import Answer
from torchrl_grpo.generation.vllm_images import check_returned, compose, images_alone
from torchrl_grpo.generation.vllm_stops import watch_for_stops
from torchrl_grpo.host.processes import die_with_parent, enable_stack_dump
from torchrl_grpo.images import Prompt
from torchrl_grpo.weights.worker import unname_queues

SHUTDOWN_TIMEOUT_S = 10.0
"""Seconds that vLLM's processes may take to end by themselves."""

_EXECUTOR = "GuardedExecutor_"

T = TypeVar("T")


class AsyncVLLMEngine(VLLMBase):
    """Samples with vLLM for many threads at once, and accepts new weights meanwhile.

    ``in_flight`` decides what an update does to running requests:

    - ``"wait"``: the update waits for running calls of ``generate``, and later calls wait for the
      update. All tokens of a response come from one version. An update of adapters in ``slots``
      waits only for calls that use adapters older than the current ones; other running calls
      continue with the adapters that they started with.
    - ``"keep"``: requests pause between two tokens and continue with the new weights. vLLM drops
      their keys and values and computes them again, so that each token's log-prob is that of the
      weights that sampled it, given all tokens before, and nothing of the old weights remains.
      ``Completion.versions`` has the version of each token: vLLM's scheduler labels tokens in the
      process that samples them.
    - ``"abort"``: requests restart from their prompt with the new weights, and their callers wait
      longer. ``restarted_requests`` counts them. A request is restarted with all its responses,
      even finished ones, because replacing only the others would favor short responses.

    Requests have no seed of their own (vLLM's CPU sampler fails if a paused one does), so samples
    depend on batching: ``seed`` and ``state_dict`` make them reproducible only if responses are
    sampled one at a time.

    Attributes:
        restarted_requests: number of restarts by updates with ``in_flight="abort"``.

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

    @classmethod
    def make(
        cls,
        request: EngineRequest,
        device: torch.device,
        load_model: Callable[[], PreTrainedModel],
        *,
        concurrent: bool = False,
    ) -> Engine:
        """Make this engine or, for a single caller, a ``VLLMEngine``."""
        settings = vllm_settings(request)
        if concurrent:
            return cls(request.path, in_flight=request.options.in_flight, **settings)
        own = device if request.options.devices_per_engine == 1 else None
        return VLLMEngine(request.path, device=own, enable_sleep=request.colocated, **settings)

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
        self._request_ids, self._numbers = itertools.count(), itertools.count(1)
        # Running calls of ``generate`` by their adapters.
        self._running: Counter[Any] = Counter()
        self._workers: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="AsyncVLLMEngine", daemon=True
        )
        self._thread.start()
        try:
            with starting_vllm(None, settings.get("log_file")):
                config, arguments = engine_arguments(model_path, settings)
                # All of vLLM's objects live in the loop's thread. A process that asks to die with
                # its parent really dies with the thread that started it, and this thread lasts
                # until the end.
                asyncio.run_coroutine_threadsafe(self._start(arguments), self._loop).result()
                super().__init__(config, self._llm.vllm_config)
                watch_for_stops(self._llm.output_processor, self._stops)
                # The scheduler reports that it is ready before it has connected the socket for
                # answers; only an answer shows that the socket files are not needed anymore.
                self._workers = [os.pidfd_open(pid) for pid in self._rpc("die_with_parent")]
                self._rpc("finish_setup")
                self._call(self._set_version(0))
        except BaseException:
            self.close()
            raise

    async def _start(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self._admitting, self._ended = asyncio.Event(), asyncio.Event()
        self._admitting.set()
        # The reason why the engine cannot be used anymore.
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._llm = AsyncLLM(
            # Without a context the limit is 128 sequences and 2,048 tokens per step on any device;
            # the server's context prefers short waits to throughput.
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

    def _finish(self, reason: str) -> None:
        """Make every call raise, waiting ones included. Runs in the loop."""
        while self._sentinels:
            asyncio.get_running_loop().remove_reader(self._sentinels.popitem()[0])
        if not self._end.done():
            self._end.set_result(reason)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it, or for the end of the engine.

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
        # Retrieve the exception, which asyncio would report otherwise.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        task.cancel()
        del task  # its traceback would keep vLLM's objects alive with our error
        # vLLM may notice the end of its process a moment before us.
        await asyncio.wait({self._end}, timeout=5)
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
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """See ``Engine``; any number of threads may call it at the same time, even during an
        update.

        ``on_finished`` is not called with ``in_flight="abort"``, because finished responses may be
        sampled again.

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
        prompts: Sequence[Tensor | Prompt],
        sampling: Sequence[Any],
        n: int,
        on_finished: OnFinished | None,
    ) -> list[list[Completion]]:
        while not self._admitting.is_set():
            await self._admitting.wait()
        adapters, version = self._adapters
        self._running[adapters] += 1
        known = version if adapters is not None and self._in_flight == "wait" else None
        try:
            requests = enumerate(zip(prompts, sampling, strict=True))
            return await asyncio.gather(
                *(
                    self._request(prompt, own, Answer(i, n, own.n, on_finished, known), adapters)
                    for i, (prompt, own) in requests
                )
            )
        finally:
            self._running[adapters] -= 1
            self._ended.set()

    async def _request(
        self, prompt: Tensor | Prompt, sampling: Any, answer: Answer, adapters: Any
    ) -> list[Completion]:
        alone = images_alone(prompt, self._llm.renderer, self._hf_config)
        rendered = await self._llm.renderer.render_cmpl_async(alone) if alone else ()
        request = compose(prompt, rendered)
        while True:
            reasons = set()
            number = str(next(self._request_ids))
            outputs = self._llm.generate(request, sampling, number, lora_request=adapters)
            async for output in outputs:
                if output.finished:
                    check_returned(prompt, output)
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
            adapters, _ = self._adapters

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        """Context of an update, which treats running requests as ``in_flight`` says.

        Raises:
            EngineDeadError: the workers did not load the weights in time, or the engine's process
                has ended.
            TimeoutError: requests ran for longer than ``update_timeout``; the engine keeps its
                weights and version.
        """
        with self._updates:
            try:
                self._call(self._pause(version))
                try:
                    yield
                except (TransferRefusedError, ReceiptError):
                    raise
                except BaseException as error:
                    # The weights may be partly loaded, so the engine is lost, but not the run.
                    reason = (
                        f"vLLM's workers did not load the weights of version {version} ({error}): "
                        "make a new engine."
                    )
                    if self._loop is not None:
                        self._loop.call_soon_threadsafe(self._finish, reason)
                    if not isinstance(error, Exception):
                        raise
                    raise EngineDeadError(reason) from error
                self._call(self._set_version(version))
            finally:
                self._call(self._resume())

    @contextmanager
    def _attaching(self, version: int) -> Iterator[tuple[int, list[int]]]:
        if self._in_flight != "wait":  # requests continue, or start again, with the new adapters
            with self._updating(version):
                yield 1, []
            return
        with self._updates:
            current = self._adapters[0]
            self._call(self._pause(version, current))
            yield next(self._numbers), [] if current is None else [current.lora_int_id]
            self.policy_version = version

    async def _pause(self, version: int, *spared: Any) -> None:
        """Pause, finish or restart running requests, depending on ``in_flight``; or, with ``spared``,
        wait for the requests with other adapters to finish.
        """
        waiting_for = ""
        try:
            async with asyncio.timeout(self._update_timeout):
                if self._in_flight == "wait":
                    if not spared:
                        self._admitting.clear()
                    waiting_for = "running calls of generate to end"
                    while any(self._running[other] for other in self._running.keys() - {*spared}):
                        self._ended.clear()
                        await self._ended.wait()
                if not spared:
                    waiting_for = "vLLM to pause"
                    # Also drops all keys and values: the prefix cache and those of paused requests.
                    await self._llm.pause_generation(mode=self._in_flight)
        except TimeoutError:
            raise TimeoutError(
                f"the update to version {version} waited over {self._update_timeout:g} s for "
                f"{waiting_for} ({self._running.total()} calls of generate are running)."
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
        """Make vLLM's scheduler label further tokens with a version."""
        await self._llm.update_weight_version(str(version))
        self.policy_version = version

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._call(self._set_version(self.policy_version))

    def close(self) -> None:
        """End the engine and all its processes; waiting calls raise. May be called again."""
        with self._closing:
            loop, self._loop = self._loop, None
            if loop is None:
                return
            if self._llm is not None:
                from psutil import NoSuchProcess

                loop.call_soon_threadsafe(self._finish, "the engine was closed.")
                with suppress(NoSuchProcess):  # one that ended just before vLLM killed it
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
    """Cancel the other tasks of the loop and wait for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # Callers' tasks end by themselves, with the reason, and must not see a cancellation.
    _, pending = await asyncio.wait(tasks, timeout=1) if tasks else ((), ())
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def _end_process(pidfd: int) -> None:
    """Wait for a process, and kill it if it does not end by itself."""
    if not select.select([pidfd], [], [], 1)[0]:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], SHUTDOWN_TIMEOUT_S)
    os.close(pidfd)


@functools.cache
def _guarded_executor() -> type:
    """Return vLLM's executor under our own name, which brings our code into the scheduler's
    process; see ``__getattr__``.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    class GuardedExecutor(MultiprocExecutor):
        def _init_executor(self) -> None:
            super()._init_executor()
            enable_stack_dump()
            unname_queues()

    # Pickle finds it in this module, under a name that tells a new process its parent's id.
    GuardedExecutor.__qualname__ = f"{_EXECUTOR}{os.getpid()}"
    globals()[GuardedExecutor.__qualname__] = GuardedExecutor
    return GuardedExecutor


def __getattr__(name: str) -> Any:
    """Provide the executor to the new scheduler process, which looks it up here while reading its
    arguments.

    This is the first moment at which our code runs in that process, so here it is told to die with
    its parent.
    """
    if not name.startswith(_EXECUTOR):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    die_with_parent(int(name.removeprefix(_EXECUTOR)))
    return _guarded_executor()
