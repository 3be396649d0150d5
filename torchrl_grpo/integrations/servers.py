"""Clients of servers that the run did not start, vLLM's and SGLang's, as engines or teachers."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchrl_grpo.generation.base import Completion, EngineDeadError
from torchrl_grpo.host.event_loop import wait_for_result
from torchrl_grpo.integrations import server_answers as answers
from torchrl_grpo.integrations.http_client import (
    BadAnswerError,
    HttpClient,
    NoAnswerError,
    may_pass,
)
from torchrl_grpo.integrations.server_answers import TOLERANCE, SampleRequest, entry

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the servers' key, if they require one; vLLM's server reads it too."""
AT_A_TIME = 256
"""Maximum concurrent requests; the server batches them."""
COMES_BACK_S = 600.0
"""Seconds to wait for a server that does not answer: it may be starting."""

Role = Literal["engine", "teacher"]
_FIELDS: dict[Role, str] = {"engine": "inference_model.address", "teacher": "teacher.address"}
_ANSWER_S = 1800.0
"""Seconds within which a server must answer a request, including retries."""
_PROBE_S = 60.0
_SCORE_RETRIES = 3
"""Retries of scoring, which changes no state of the server."""
_PROBE_TOP_K = 5
"""Most likely tokens that a probe asks for."""
_LARGEST_ANSWER = 2**20
"""Maximum bytes of an answer, ..."""
_LARGEST_TOKEN = 512
"""... plus these for each log-prob in it."""


def require_httpx2(field: str) -> None:
    """Refuse an installation without the HTTP client.

    Raises:
        ValueError: httpx2 is not installed.
    """
    if find_spec("httpx2") is None:
        raise ValueError(
            f"{field} needs the package httpx2, which is not installed: pip install httpx2."
        )


T = TypeVar("T")
_AS_IT_IS: Any = lambda answer: answer  # noqa: E731


class WrongAnswerError(EngineDeadError, ValueError):
    """A server's answer cannot be valid: before a run this is bad input, during a run the engine
    is lost.
    """


class Server(ABC):
    """Client of one kind of server, for many threads.

    Attributes:
        name: of the kind.
        role: of the server in the run.
        max_model_len: longest prompt plus response, in tokens.
        vocabulary: number of the model's token ids.
        adapters: name of the adapters that ``candidates`` samples with; None for the base weights.
    """

    name: str
    adapters: str | None = None
    _lora = ""
    starts: Mapping[Role, str]
    """Command lines that start the server for each role."""

    def __init__(self, address: str, role: Role = "engine") -> None:
        self.address, self.role = address, role
        self.max_model_len, self.vocabulary = 0, answers.LARGEST_VOCABULARY
        self._client = HttpClient(address, key_variable=KEY_VARIABLE, proxies=False)

    @property
    def field(self) -> str:
        """The config key that names the server."""
        return _FIELDS[self.role]

    @property
    def restart(self) -> str:
        """The fix for a request that the server refuses."""
        return f"start it as {self.starts[self.role]}"

    @abstractmethod
    def greet(self) -> None:
        """Read the server's description of itself.

        Raises:
            ValueError: the server cannot have its role.
        """

    @abstractmethod
    def complete(self, request: SampleRequest) -> list[Completion | None]:
        """Return the requested responses, with None for an aborted one."""

    @abstractmethod
    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        """Return some candidates for the next token with their log-probs."""

    @abstractmethod
    def score(self, tokens: list[int], start: int, top_k: int = 0) -> list[dict[int, float]]:
        """Return log-probs of given tokens, at temperature 1.

        Args:
            tokens: ids.
            start: index of the first token that is scored, at least 1.
            top_k: number of most likely tokens whose log-probs are added at each position.

        Returns:
            for each position from ``start`` on, log-probs by token id: of the token itself and of
            the most likely ones.
        """

    @abstractmethod
    def pause(self, mode: str) -> None:
        """Stop sampling; ``mode`` says what happens to running requests."""

    @abstractmethod
    def load(self, folder: Path, label: str) -> None:
        """Read the checkpoint in a folder, drop caches of the old weights, and label answers."""

    @abstractmethod
    def resume(self) -> None:
        """Continue sampling."""

    def change_adapters(self, action: Literal["load", "unload"], **body: str) -> None:
        """Load adapters in peft's format for requests that name them, or unload them.

        Args:
            action: what to do.
            body: ``lora_name``, and ``lora_path`` to load them: their folder.
        """
        with contextlib.suppress(WrongAnswerError):  # vLLM answers with plain text
            route = f"{self._lora}/{action}_lora_adapter"
            self.ask("POST", route, f"{action} adapters", body)

    def check_options(self, in_flight: str) -> None:  # noqa: B027
        """Refuse options that this kind of server does not support.

        Raises:
            ValueError: an option is not supported.
        """

    def check_sampling(self) -> None:
        """Check that the server's log-probs include the temperature.

        Raises:
            ValueError: they are at temperature 1.
        """
        cold, warm = (self.candidates([0], temperature) for temperature in (0.5, 1.0))
        common = sorted(cold.keys() & warm.keys(), key=warm.__getitem__)
        if len(common) < 2 or (gap := warm[common[-1]] - warm[common[0]]) < TOLERANCE:
            return
        if abs((cold[common[-1]] - cold[common[0]]) / gap - 2) > 0.1:
            raise ValueError(
                f"inference_model.address: the server at {self.address} must state log-probs of "
                "the distribution that it samples from, temperature included, but states those of "
                f"temperature 1: {self.restart}."
            )

    def check_vocabulary(self, size: int) -> None:
        """Compare the server's vocabulary with the model's.

        Raises:
            ValueError: they differ.
        """
        has_last = self._takes(size - 1)
        if not has_last or self._takes(size):
            model = {"engine": "the model that is trained", "teacher": "teacher.model"}[self.role]
            relation = "larger" if has_last else "smaller"
            raise ValueError(
                f"{self.field}: the server at {self.address} must serve {model}, with a vocabulary "
                f"of {size} tokens, but its vocabulary is {relation}: start it with that model."
            )

    def _takes(self, token: int) -> bool:
        try:
            if self.role == "engine":
                self.candidates([token], 1.0)
            else:
                self.score([token, token], 1)
        except WrongAnswerError:
            raise
        except ValueError:
            return False
        return True

    def check_context(self, longest: int) -> None:
        """Compare the server's context with the longest sequence.

        Args:
            longest: prompt and response, in tokens; a server that scores them samples one token
                more (vLLM).

        Raises:
            ValueError: the context is too short.
        """
        what, needed = "prompt and response", longest
        if self.role == "teacher":
            what, needed = "prompt, response and one more token", longest + 1
        if self.max_model_len < needed:
            raise ValueError(
                f"{self.field}: the server at {self.address} has a context of {self.max_model_len} "
                f"tokens, but {what} may take {needed}: restart it with a larger context, or use a "
                "smaller inference_model.max_new_tokens or env.max_prompt_tokens."
            )

    def check_scores(self, top_k: int) -> None:
        """Check that the server states log-probs of given tokens and of the ``top_k`` most likely.

        Raises:
            ValueError: the server refuses, or its answer has no valid log-probs.
        """
        self.score([0, 0], 1, top_k or _PROBE_TOP_K)

    def has(self, route: str) -> bool:
        """Return whether the server has a route.

        Raises:
            EngineDeadError: the server does not answer.
        """
        try:
            wait_for_result(
                self._client.request("GET", route, timeout_s=_PROBE_S, largest=_LARGEST_ANSWER)
            )
        except NoAnswerError as error:
            if error.status is None:
                raise EngineDeadError(error.problem) from error
            return False
        except BadAnswerError:
            return True
        return True

    def ask(
        self,
        method: str,
        route: str,
        what: str,
        body: Any = None,
        *,
        read: Callable[[Any], T] = _AS_IT_IS,
        log_probs: int = 0,
        retries: int = 0,
        **query: str,
    ) -> T:
        """Send a request and return the value that ``read`` makes of the answer.

        Args:
            method: HTTP method.
            route: with its slash.
            what: the requested action, for messages.
            body: sent as JSON.
            read: converts the answer's JSON, and raises ``ValueError`` if it cannot be valid.
            log_probs: maximum log-probs in the answer.
            retries: see ``HttpClient.request``.
            query: parameters of the URL.

        Raises:
            EngineDeadError: the server does not answer, fails or stays overloaded.
            WrongAnswerError: ``read`` refuses the answer.
            ValueError: the server refuses the request.
        """
        limit, largest = _ANSWER_S / (1 + retries), _LARGEST_ANSWER + _LARGEST_TOKEN * log_probs
        request = self._client.request(
            method, route, body, query, timeout_s=limit, largest=largest, retries=retries
        )
        try:
            answer = wait_for_result(request)
        except NoAnswerError as error:
            if may_pass(error.status):
                raise EngineDeadError(
                    f"the server at {self.address} did not {what}: {error.problem}"
                ) from error
            raise ValueError(
                f"{self.field}: the server at {self.address} refuses to {what} ({error.problem}): "
                f"{self.restart}."
            ) from error
        except BadAnswerError as error:
            raise self._wrong(what, error) from error
        try:
            return read(answer)
        except (ValueError, RecursionError) as error:
            raise self._wrong(what, error) from error

    def _wrong(self, what: str, error: Exception) -> WrongAnswerError:
        return WrongAnswerError(
            f"{self.field}: the server at {self.address} must answer as {self.name} does when "
            f"asked to {what}; in its answer, {error}: {self.restart}."
        )

    def close(self) -> None:
        """Close the connections."""
        wait_for_result(self._client.close())


class VLLM(Server):
    """``vllm serve``, through ``/inference/v1/generate`` and the routes of its development mode."""

    name = "vLLM"
    _lora = "/v1"
    starts: Mapping[Role, str] = {
        "engine": (
            "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode "
            "processed_logprobs"
        ),
        "teacher": "vllm serve MODEL, with --max-logprobs for a policy.teacher_top_k above 20",
    }

    def greet(self) -> None:
        def read(answer: Any) -> int:
            return entry(int, answer, "data", 0, "max_model_len")

        self.max_model_len = self.ask("GET", "/v1/models", "name its model", read=read)
        if self.role == "engine":
            self.ask("GET", "/weight_info", "say which weights it has")

    def complete(self, request: SampleRequest) -> list[Completion | None]:
        params = request.params
        sampling = request.sampling() | {
            "max_tokens": request.limit,
            "top_k": params.top_k,
            "logprobs": 0,
            "detokenize": False,
        }
        if params.stop is not None:
            # Its own search in text may end a response a token earlier than ours does.
            sampling |= {"stop": list(params.stop.strings), "detokenize": True}
        return self.ask(
            "POST",
            "/inference/v1/generate",
            "sample",
            {"token_ids": request.prompt, "sampling_params": sampling, "model": request.adapters},
            read=lambda answer: answers.read_vllm_samples(answer, request),
            log_probs=request.n * request.limit,
        )

    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        sampling = {"max_tokens": 1, "temperature": temperature, "logprobs": 5, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": sampling, "model": self.adapters}
        return self.ask(
            "POST",
            "/inference/v1/generate",
            "sample from token ids",
            body,
            read=lambda answer: answers.read_vllm_candidates(answer, self.vocabulary),
        )

    def score(self, tokens: list[int], start: int, top_k: int = 0) -> list[dict[int, float]]:
        return self.ask(
            "POST",
            "/v1/completions",
            "score token ids",
            {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": top_k},
            read=lambda answer: answers.read_vllm_scores(
                answer, tokens, start, top_k, self.vocabulary
            ),
            log_probs=len(tokens) * (top_k + 1),
            retries=_SCORE_RETRIES,
        )

    def pause(self, mode: str) -> None:
        self.ask("POST", "/pause", "pause", mode=mode)

    def load(self, folder: Path, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask("POST", "/collective_rpc", f"load the weights in {folder}", body)
        self.ask("POST", "/reset_prefix_cache", "drop its cache", reset_running_requests="true")
        self.ask("POST", "/update_weight_version", "label its weights", {"new_version": label})

    def resume(self) -> None:
        self.ask("POST", "/resume", "resume")


class SGLang(Server):
    """SGLang's server, by its documented routes."""

    name = "SGLang"
    starts: Mapping[Role, str] = dict.fromkeys(
        _FIELDS, "python -m sglang.launch_server --model-path MODEL"
    )

    def check_options(self, in_flight: str) -> None:
        if in_flight == "keep":  # it labels whole responses
            raise ValueError(
                "inference_model.in_flight=keep must be wait or abort with the SGLang server at "
                f"{self.address}, which does not say which weights sampled which token: use wait."
            )

    def greet(self) -> None:
        def read(answer: Any) -> int:
            cache: int = entry(int, answer, "max_total_num_tokens")
            return min(cache, entry((int, type(None)), answer, "context_length") or cache)

        self.ask("GET", "/get_model_info", "name its model")
        self.max_model_len = self.ask(
            "GET", "/get_server_info", "say how it was started", read=read
        )

    def complete(self, request: SampleRequest) -> list[Completion | None]:
        params = request.params
        sampling = request.sampling() | {
            "max_new_tokens": request.limit,
            "min_new_tokens": 0,
            "top_k": params.top_k or -1,
            "stop": [] if params.stop is None else list(params.stop.strings),
            "no_stop_trim": True,
        }
        return self.ask(
            "POST",
            "/generate",
            "sample",
            {
                "input_ids": request.prompt,
                "sampling_params": sampling,
                "return_logprob": True,
                "lora_path": request.adapters,
            },
            read=lambda answer: answers.read_sglang_samples(answer, request),
            log_probs=request.n * request.limit,
        )

    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 5,
            "lora_path": self.adapters,
        }
        return self.ask(
            "POST",
            "/generate",
            "sample from token ids",
            body,
            read=lambda answer: answers.read_sglang_candidates(answer, self.vocabulary),
        )

    def score(self, tokens: list[int], start: int, top_k: int = 0) -> list[dict[int, float]]:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first token has no log-prob
            "top_logprobs_num": top_k,
        }
        return self.ask(
            "POST",
            "/generate",
            "score token ids",
            body,
            read=lambda answer: answers.read_sglang_scores(
                answer, tokens, start, top_k, self.vocabulary
            ),
            log_probs=len(tokens) * (top_k + 1),
            retries=_SCORE_RETRIES,
        )

    def pause(self, mode: str) -> None:
        # Aborted requests are sent again, so that each response comes from one version.
        self.ask("POST", "/pause_generation", "pause", {"mode": "abort"})

    def load(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        what = f"load the weights in {folder}"
        answer: Any = self.ask("POST", "/update_weights_from_disk", what, body)
        if type(answer) is not dict or answer.get("success") is not True:
            raise EngineDeadError(
                f"the server at {self.address} did not {what}: it answered {str(answer)[:300]!r}"
            )

    def resume(self) -> None:
        self.ask("POST", "/continue_generation", "resume", {})


def connect(address: str, within_s: float, role: Role = "engine") -> Server:
    """Connect to a server of either kind.

    Args:
        address: of the server.
        within_s: how long to wait for an answer; with 0, no answer is a ``ValueError``.
        role: of the server in the run.

    Raises:
        EngineDeadError: the server does not answer in time.
        ValueError: the server cannot have that role.
    """
    until = time.monotonic() + within_s
    while True:
        try:
            server = _greeted(address, role)
            if within_s and role == "engine":
                # An engine that was lost in the middle of an update leaves its server paused.
                with contextlib.suppress(ValueError):
                    server.resume()
            return server
        except EngineDeadError as error:
            if time.monotonic() > until:
                if within_s or isinstance(error, WrongAnswerError):
                    raise
                raise ValueError(
                    f"{_FIELDS[role]}={address} must be a server that answers: {error}. Start it "
                    "first."
                ) from error
        time.sleep(1)


def _greeted(address: str, role: Role) -> Server:
    """Connect to a server and read its description."""
    server: Server = VLLM(address, role)
    try:
        if server.has("/get_model_info"):
            server.close()
            server = SGLang(address, role)
        server.greet()
    except BaseException:
        server.close()
        raise
    return server
