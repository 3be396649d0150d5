"""The engine of a server that somebody else started: token ids go out over HTTP, token ids and log-probs come back.

vLLM's server is meant (``vllm serve``), and SGLang's. Weights reach it through a folder that both see: they are written
aside as a safetensors file, renamed, and read by the server's own reload route, so that trainer and server need no
network of GPUs between them and no package in common.

A server answers with the label of the weights that sampled each token, or of those that it has. A label that this
engine did not give means that the server was restarted or is updated by others: it is then lost, as one that does not
answer is, and whoever drives the run makes another engine, which gives the server the published weights again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.checks import InFlight
from torchrl_grpo.generation.base import (
    Completion,
    Engine,
    EngineDeadError,
    EngineRequest,
    OnFinished,
    SamplingParams,
    cut_off,
    greedy,
)
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.weights.named import expected_weights

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable that has the servers' key, if they want one; vLLM's server reads the same."""

_CONNECT_S = 10.0
_ANSWER_S = 1800.0
"""Seconds in which a server must answer a request."""
_PROBE_S = 60.0
_COMES_BACK_S = 600.0
"""Seconds for which a new engine waits for a server that does not answer: it may be starting."""
_AT_A_TIME = 256
"""Prompts that are under way at a time; the server batches them."""
_CLOSE = 1e-3
"""Nats: log-probs that differ by less say nothing of a temperature."""


class ServerEngine(Engine):
    """Samples with a server, for many threads at once.

    Args:
        address: of the server, such as ``http://127.0.0.1:8000``.
        folder: where weights are left for the server, which must see it under the same path; None leaves the server the
            weights that it has, for an evaluation.
        dtype: of the weights on their way.
        tied: names of weights that are another one's memory, as pairs (name, the other one's).
        in_flight: what an update does to the requests that are running: ``"wait"`` for their end, ``"keep"`` them and
            go on with the new weights, or ``"abort"`` them and start them again.
        starts_within_s: how long to wait for a server that does not answer.

    Raises:
        EngineDeadError: the server does not answer.
        ValueError: it is no server that can be trained against.
    """

    concurrent = True

    def __init__(
        self,
        address: str,
        *,
        folder: Path | None = None,
        dtype: torch.dtype = torch.float32,
        tied: Mapping[str, str] | None = None,
        in_flight: InFlight = "wait",
        starts_within_s: float = _COMES_BACK_S,
    ) -> None:
        self.address = address
        self._server = _connect(address, starts_within_s)
        self.max_model_len = self._server.max_model_len
        self._folder, self._dtype, self._tied, self._in_flight = folder, dtype, dict(tied or {}), in_flight
        self._label = uuid.uuid4().hex[:8]
        self._given = False  # whether the server has weights of ours
        self._updates = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="server")
        self._closed = False

    @classmethod
    def require(cls, *, on_cpu: bool) -> None:
        if find_spec("httpx") is None:
            raise ValueError(
                "inference_model.backend=server needs the package httpx, which is not installed: pip install httpx."
            )

    @classmethod
    def check(cls, request: EngineRequest) -> None:
        options = request.options
        for address in options.address:
            server = _connect(address, 0)
            try:
                server.check_options(options.in_flight)
                server.check_sampling()
                needed = request.max_dialog_tokens + options.max_new_tokens
                if server.max_model_len < needed:
                    raise ValueError(
                        f"inference_model.address: the server at {address} has a context of {server.max_model_len} "
                        f"tokens, and prompt and response may take {needed}: restart it with a larger one, or use a "
                        f"smaller inference_model.max_new_tokens or env.max_prompt_tokens."
                    )
                server.check_vocabulary(request.model_config.get_text_config().vocab_size)
            finally:
                server.close()

    @classmethod
    def make(
        cls,
        request: EngineRequest,
        device: torch.device,
        load_model: Callable[[], PreTrainedModel],
        *,
        concurrent: bool = False,
    ) -> Engine:
        options = request.options
        address = options.address[request.number]
        folder = Path(options.weights_folder or request.folder or tempfile.mkdtemp(prefix="served-")).absolute()
        return cls(
            address,
            folder=folder / f"served_weights_{request.number}" if request.trains else None,
            dtype=getattr(torch, options.dtype),
            tied=_tied_weights(request),
            in_flight=options.in_flight,
        )

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        """See ``Engine``; any number of threads may call it at the same time, even during an update."""
        if self._closed:
            raise RuntimeError("the engine is closed.")
        for prompt in prompts:
            if len(prompt) >= self.max_model_len:
                raise ValueError(
                    f"a prompt must leave room for one token in the context of {self.max_model_len} tokens of the "
                    f"server at {self.address}, this one has {len(prompt)}: drop it, or restart the server with a "
                    "longer context."
                )

        def ask(number: int) -> list[Completion]:
            answers = self._ask(prompts[number].tolist(), n, params)
            for index, completion in enumerate(answers if on_finished is not None else ()):
                on_finished(number, index, completion)  # type: ignore[misc]
            return answers

        return list(self._threads.map(ask, range(len(prompts))))

    def _ask(self, prompt: list[int], n: int, params: SamplingParams) -> list[Completion]:
        """Return the responses to a prompt; what an update aborted is asked for again, as a whole."""
        limit = min(params.max_new_tokens, self.max_model_len - len(prompt))
        samples = 1 if greedy(params) else n  # where all n are the same
        while True:
            answers = self._server.complete(prompt, samples, limit, params)
            if not any(answer.aborted for answer in answers):
                break
        if failed := {answer.reason for answer in answers} - {"stop", "length"}:
            raise EngineDeadError(f"the server at {self.address} ended a response with {sorted(failed)}: see its log.")
        completions = [self._completion(answer, params.stop) for answer in answers]
        return [completions[index % samples] for index in range(n)]

    def _completion(self, answer: _Answer, stop: StopStrings | None) -> Completion:
        versions = torch.empty(len(answer.tokens), dtype=torch.int64)
        labels = list(answer.labels)
        if sum(end - start for _, start, end in labels) < len(answer.tokens):
            labels.append(("without a label", 0, 0))
        for label, start, end in labels if self._given else ():
            mark, _, version = label.rpartition("-")
            if mark != self._label:
                raise EngineDeadError(
                    f"the server at {self.address} answered with weights {label!r}, not with those of version "
                    f"{self.policy_version} that it was given: it was restarted, or others update it too."
                )
            versions[start:end] = int(version)
        done = Completion(
            tokens=torch.tensor(answer.tokens, dtype=torch.int64),
            log_probs=torch.tensor(answer.log_probs, dtype=torch.float32),
            finish_reason="stop" if answer.stopped else "length",
            versions=versions if self._given else None,
        )
        return cut_off(done, None, stop)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See ``Engine``; the weights go through the folder, and without one the server keeps its weights.

        Raises:
            EngineDeadError: the server did not take the weights.
        """
        if self._folder is None:
            self.policy_version = version
            return
        with self._updates:
            file = self._write(weights)
            try:
                self._server.pause(self._in_flight)
                try:
                    self._server.load(file.parent, f"{self._label}-{version}")
                finally:
                    self._server.go_on()
            finally:
                file.unlink(missing_ok=True)
            self._given, self.policy_version = True, version

    def _write(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Write a checkpoint for the server: aside, and then under its name."""
        from safetensors.torch import save_file

        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        values = {name: weight.detach().to("cpu", self._dtype).contiguous() for name, weight in weights}
        # A server that keeps a packed copy of a tied head would keep the old one.
        values |= {name: values[other].clone() for name, other in self._tied.items() if name not in values}
        aside, file = self._folder / "model.partial", self._folder / "model.safetensors"
        save_file(values, aside, metadata={"format": "pt"})
        os.replace(aside, file)
        return file

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores nothing but the version until new weights come: the server draws as it does."""
        super().load_state_dict(state)
        self._given = False

    def close(self) -> None:
        """Ends the connections; the server goes on, with the weights that it has. May be called again."""
        if not self._closed:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._server.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _tied_weights(request: EngineRequest) -> dict[str, str]:
    """The weights that are another one's memory, with the name of the other."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(request.model_config, trust_remote_code=request.trust_remote_code)
    shapes, tied = expected_weights(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not tied or head is None or head.weight is not embedding.weight:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    pair = (f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight")
    return {tie: next(name for name in pair if name != tie) for tie in tied if tie in pair and tie in shapes}


class _Answer:
    """A server's response.

    Attributes:
        tokens: ids.
        log_probs: of each.
        reason: why it ended: stop, length or abort.
        labels: of the weights that sampled tokens, each with the first token and the one after the last.
    """

    def __init__(
        self, tokens: list[int], log_probs: list[float], reason: str, labels: Sequence[tuple[str, int, int]]
    ) -> None:
        self.tokens, self.log_probs, self.reason, self.labels = tokens, log_probs, reason, labels

    @property
    def stopped(self) -> bool:
        return self.reason == "stop"

    @property
    def aborted(self) -> bool:
        return self.reason == "abort"


class _Server(ABC):
    """Routes of one kind of server.

    Attributes:
        name: of the kind.
        max_model_len: longest prompt plus response, in tokens.
    """

    name: str
    restart: str
    """Command line with which the server can be trained against."""

    def __init__(self, address: str) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it has a line for each request
        key = os.environ.get(KEY_VARIABLE)
        self.address = address
        self._unanswered: type[Exception] = httpx.HTTPError
        self._client = httpx.Client(
            base_url=address.rstrip("/"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self.max_model_len = 0

    @abstractmethod
    def greet(self) -> None:
        """Read what the server says of itself.

        Raises:
            ValueError: it cannot be trained against.
        """

    @abstractmethod
    def complete(self, prompt: list[int], n: int, limit: int, params: SamplingParams) -> list[_Answer]:
        """Return ``n`` responses of at most ``limit`` tokens to a prompt."""

    @abstractmethod
    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        """Return some candidates for the next token with their log-probs."""

    @abstractmethod
    def pause(self, mode: str) -> None:
        """Stop sampling: ``mode`` says what becomes of the requests that are running."""

    @abstractmethod
    def load(self, folder: Path, label: str) -> None:
        """Read the checkpoint in a folder, drop what was computed with the old weights, and have answers labeled."""

    @abstractmethod
    def go_on(self) -> None:
        """Sample again."""

    def check_options(self, in_flight: str) -> None:  # noqa: B027
        """Refuse what this kind of server cannot do.

        Raises:
            ValueError: it cannot.
        """

    def check_sampling(self) -> None:
        """Compare how the server states log-probs with how it is needed: after the temperature.

        Raises:
            ValueError: they are those of temperature 1.
        """
        cold, warm = (self.candidates([0], temperature) for temperature in (0.5, 1.0))
        common = sorted(cold.keys() & warm.keys(), key=warm.__getitem__)
        if len(common) < 2 or (gap := warm[common[-1]] - warm[common[0]]) < _CLOSE:
            return
        if abs((cold[common[-1]] - cold[common[0]]) / gap - 2) > 0.1:
            raise ValueError(
                f"inference_model.address: the server at {self.address} must state log-probs of the distribution that "
                f"it samples from, temperature included, and states those of temperature 1: {self.restart}."
            )

    def check_vocabulary(self, size: int) -> None:
        """Compare the server's vocabulary with the model's.

        Raises:
            ValueError: they differ.
        """
        known = self._takes(size - 1)
        if not known or self._takes(size):
            raise ValueError(
                f"inference_model.address: the server at {self.address} must serve the model that is trained, whose "
                f"vocabulary has {size} tokens, and its own is {'larger' if known else 'smaller'}: start it with that "
                "model."
            )

    def _takes(self, token: int) -> bool:
        try:
            self.candidates([token], 1.0)
        except ValueError:
            return False
        return True

    def has(self, route: str) -> bool:
        """Whether the server has a route.

        Raises:
            EngineDeadError: it does not answer.
        """
        try:
            return bool(self._client.get(route, timeout=_PROBE_S).status_code == 200)
        except self._unanswered as error:
            raise EngineDeadError(f"{type(error).__name__} {error}") from error

    def ask(self, method: str, route: str, what: str, body: Any = None, **query: str) -> Any:
        """Return the JSON of an answer.

        Raises:
            EngineDeadError: the server does not answer, or fails.
            ValueError: it refuses what is asked.
        """
        try:
            answer = self._client.request(method, route, json=body, params=query)
        except self._unanswered as error:
            raise EngineDeadError(
                f"the server at {self.address} was to {what}: {type(error).__name__} {error}"
            ) from error
        if answer.status_code >= 500:
            raise EngineDeadError(
                f"the server at {self.address} was to {what}: status {answer.status_code}, {answer.text[:300]}"
            )
        if answer.status_code >= 400:
            raise ValueError(
                f"inference_model.address: the server at {self.address} refuses to {what} (status "
                f"{answer.status_code}, {answer.text[:300]}): {self.restart}."
            )
        return answer.json() if answer.content else None

    def close(self) -> None:
        self._client.close()


class _VLLM(_Server):
    """``vllm serve``, through ``/inference/v1/generate`` and the routes of its development mode."""

    name = "vLLM"
    restart = (
        "start it as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
    )

    def greet(self) -> None:
        [model, *_] = self.ask("GET", "/v1/models", "name its model")["data"]
        self.max_model_len = int(model["max_model_len"])
        self.ask("GET", "/weight_info", "say which weights it has")

    def complete(self, prompt: list[int], n: int, limit: int, params: SamplingParams) -> list[_Answer]:
        sampling = {
            "n": n,
            "max_tokens": limit,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # stop_token_ids alone decide
            "logprobs": 0,
            "detokenize": False,
        }
        if params.stop is not None:  # its own search may end a response earlier than the token that ours ends it with
            sampling |= {"stop": list(params.stop.strings), "detokenize": True}
        answer = self.ask(
            "POST", "/inference/v1/generate", "sample", {"token_ids": prompt, "sampling_params": sampling}
        )
        return [
            _Answer(
                choice["token_ids"],
                [one["logprob"] for one in choice["logprobs"]["content"]],
                choice["finish_reason"],
                [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()],
            )
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        sampling = {"max_tokens": 1, "temperature": temperature, "logprobs": 5, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": sampling}
        answer = self.ask("POST", "/inference/v1/generate", "sample from token ids", body)
        [first, *_] = answer["choices"][0]["logprobs"]["content"]
        return {one["token_id"]: one["logprob"] for one in first["top_logprobs"]}

    def pause(self, mode: str) -> None:
        self.ask("POST", "/pause", "pause", mode=mode)

    def load(self, folder: Path, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask("POST", "/collective_rpc", f"load the weights in {folder}", body)
        self.ask("POST", "/reset_prefix_cache", "drop its cache", reset_running_requests="true")
        self.ask("POST", "/update_weight_version", "label its weights", {"new_version": label})

    def go_on(self) -> None:
        self.ask("POST", "/resume", "go on")


class _SGLang(_Server):
    """SGLang's server, by its documented routes."""

    name = "SGLang"
    restart = "start it as python -m sglang.launch_server --model-path MODEL"

    def check_options(self, in_flight: str) -> None:
        if in_flight == "keep":  # it labels a response as a whole
            raise ValueError(
                f"inference_model.in_flight=keep must be another one with the SGLang server at {self.address}, which "
                "does not say which weights sampled which token: use wait or abort."
            )

    def greet(self) -> None:
        self.ask("GET", "/get_model_info", "name its model")
        info = self.ask("GET", "/get_server_info", "say how it was started")
        self.max_model_len = int(info.get("context_length") or info["max_total_num_tokens"])

    def complete(self, prompt: list[int], n: int, limit: int, params: SamplingParams) -> list[_Answer]:
        sampling: dict[str, Any] = {
            "n": n,
            "max_new_tokens": limit,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "stop": [] if params.stop is None else list(params.stop.strings),
            "no_stop_trim": True,
        }
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        answer = self.ask("POST", "/generate", "sample", body)
        return [self._answer(one["meta_info"]) for one in (answer if isinstance(answer, list) else [answer])]

    @staticmethod
    def _answer(info: Mapping[str, Any]) -> _Answer:
        sampled = info["output_token_logprobs"]
        tokens, log_probs = [one[1] for one in sampled], [one[0] for one in sampled]
        label = str(info.get("weight_version", ""))
        return _Answer(tokens, log_probs, info["finish_reason"]["type"], [(label, 0, len(tokens))])

    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 5,
        }
        info = self.ask("POST", "/generate", "sample from token ids", body)["meta_info"]
        return {token: log_prob for log_prob, token, *_ in info["output_top_logprobs"][0]}

    def pause(self, mode: str) -> None:
        # What is aborted is asked for again: each response is then of one version.
        self.ask("POST", "/pause_generation", "pause", {"mode": "abort"})

    def load(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        answer = self.ask("POST", "/update_weights_from_disk", f"load the weights in {folder}", body)
        if not answer.get("success", False):
            raise EngineDeadError(f"the server at {self.address} did not load the weights: {answer.get('message')}")

    def go_on(self) -> None:
        self.ask("POST", "/continue_generation", "go on", {})


def _connect(address: str, within_s: float) -> _Server:
    """Connect to a server, whichever kind it is; wait for one that does not answer."""
    until = time.monotonic() + within_s
    while True:
        try:
            server = _greeted(address)
            if within_s:
                with contextlib.suppress(ValueError):  # an engine that was lost in the middle of an update
                    server.go_on()
            return server
        except EngineDeadError as error:
            if time.monotonic() > until:
                if within_s:
                    raise
                raise ValueError(
                    f"inference_model.address={address} must be a server that answers: {error}. Start it first."
                ) from error
        time.sleep(1)


def _greeted(address: str) -> _Server:
    """Connect to a server that answers."""
    server: _Server = _VLLM(address)
    try:
        if server.has("/get_model_info"):
            server.close()
            server = _SGLang(address)
        server.greet()
    except BaseException:
        server.close()
        raise
    return server
