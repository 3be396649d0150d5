"""Routes of the servers that somebody else started: vLLM's and SGLang's, as an engine and as a
teacher.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchrl_grpo.generation import answers
from torchrl_grpo.generation.answers import TOLERANCE, SampleRequest, entry
from torchrl_grpo.generation.base import Completion, EngineDeadError
from torchrl_grpo.host.event_loop import wait_for_result
from torchrl_grpo.host.http_client import BadAnswerError, HttpClient, NoAnswerError, may_pass

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable that has the servers' key, if they want one; vLLM's server reads the same.
"""
AT_A_TIME = 256
"""Requests that are under way at a time; the server batches them."""
COMES_BACK_S = 600.0
"""Seconds for which a server that does not answer is waited for: it may be starting."""

Role = Literal["engine", "teacher"]
_FIELDS: dict[Role, str] = {"engine": "inference_model.address", "teacher": "teacher.address"}
_ANSWER_S = 1800.0
"""Seconds in which a server must answer a request, all attempts together."""
_PROBE_S = 60.0
_SCORE_AGAIN = 3
"""Further attempts at scoring, which changes nothing at the server."""
_SOME = 5
"""Likely tokens that a probe asks for."""
_LARGEST_ANSWER = 2**20
"""Bytes of an answer, ..."""
_LARGEST_TOKEN = 512
"""... and further ones for each log-prob in it."""


def require_httpx(field: str) -> None:
    """Refuse an installation without the package that talks to servers.

    Raises:
        ValueError: it is missing.
    """
    if find_spec("httpx") is None:
        raise ValueError(
            f"{field} needs the package httpx, which is not installed: pip install httpx."
        )


T = TypeVar("T")
_AS_IT_IS: Any = lambda answer: answer  # noqa: E731


class WrongAnswerError(EngineDeadError, ValueError):
    """A server answers what cannot be true: it is refused before a run, and lost during one."""


class Server(ABC):
    """Routes of one kind of server, for many threads.

    Attributes:
        name: of the kind.
        role: of the server in the run.
        max_model_len: longest prompt plus response, in tokens.
        vocabulary: ids that the model has.
    """

    name: str
    starts: Mapping[Role, str]
    """Command lines with which the server can have a role."""

    def __init__(self, address: str, role: Role = "engine") -> None:
        self.address, self.role = address, role
        self.max_model_len, self.vocabulary = 0, answers.LARGEST_VOCABULARY
        self._client = HttpClient(address, key_variable=KEY_VARIABLE, proxies=False)

    @property
    def field(self) -> str:
        """Key of the config that names the server."""
        return _FIELDS[self.role]

    @property
    def restart(self) -> str:
        """The fix for what the server refuses."""
        return f"start it as {self.starts[self.role]}"

    @abstractmethod
    def greet(self) -> None:
        """Read what the server says of itself.

        Raises:
            ValueError: it cannot have its role.
        """

    @abstractmethod
    def complete(self, request: SampleRequest) -> list[Completion | None]:
        """Return the responses that are asked for, None for an aborted one."""

    @abstractmethod
    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        """Return some candidates for the next token with their log-probs."""

    @abstractmethod
    def score(self, tokens: list[int], start: int, top_k: int = 0) -> list[dict[int, float]]:
        """Return log-probs of given tokens, at temperature 1.

        Args:
            tokens: ids.
            start: index of the first one that is scored, at least 1.
            top_k: how many of the most likely tokens are told beside each.

        Returns:
            for each token from ``start`` on, the log-probs by id: its own, and those of the likely
            ones.
        """

    @abstractmethod
    def pause(self, mode: str) -> None:
        """Stop sampling: ``mode`` says what becomes of the requests that are running."""

    @abstractmethod
    def load(self, folder: Path, label: str) -> None:
        """Read the checkpoint in a folder, drop what was computed with the old weights, and have
        answers labeled.
        """

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
        if len(common) < 2 or (gap := warm[common[-1]] - warm[common[0]]) < TOLERANCE:
            return
        if abs((cold[common[-1]] - cold[common[0]]) / gap - 2) > 0.1:
            raise ValueError(
                f"inference_model.address: the server at {self.address} must state log-probs of "
                "the distribution that it samples from, temperature included, and states those of "
                f"temperature 1: {self.restart}."
            )

    def check_vocabulary(self, size: int) -> None:
        """Compare the server's vocabulary with the model's.

        Raises:
            ValueError: they differ.
        """
        known = self._takes(size - 1)
        if not known or self._takes(size):
            model = {"engine": "the model that is trained", "teacher": "teacher.model"}[self.role]
            raise ValueError(
                f"{self.field}: the server at {self.address} must serve {model}, whose vocabulary "
                f"has {size} tokens, and its own is {'larger' if known else 'smaller'}: start it "
                "with that model."
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
            longest: prompt and response, in tokens; a server that scores them must sample one more
                (vLLM).

        Raises:
            ValueError: it is shorter.
        """
        what, needed = "prompt and response", longest
        if self.role == "teacher":
            what, needed = "prompt, response and one token more", longest + 1
        if self.max_model_len < needed:
            raise ValueError(
                f"{self.field}: the server at {self.address} has a context of {self.max_model_len} "
                f"tokens, and {what} may take {needed}: restart it with a larger one, or use a "
                "smaller inference_model.max_new_tokens or env.max_prompt_tokens."
            )

    def check_scores(self, top_k: int) -> None:
        """Check that the server states log-probs of given tokens, and of so many likely ones.

        Raises:
            ValueError: it refuses, or what it states are no log-probs.
        """
        self.score([0, 0], 1, top_k or _SOME)

    def has(self, route: str) -> bool:
        """Whether the server has a route.

        Raises:
            EngineDeadError: it does not answer.
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
        """Return what a reader takes from an answer.

        Args:
            method: of HTTP.
            route: with its slash.
            what: the action that is asked for, for messages.
            body: sent as JSON.
            read: takes the answer's JSON, and raises ``ValueError`` for what cannot be.
            log_probs: most of them that the answer has.
            retries: see ``HttpClient.request``.
            query: parameters of the URL.

        Raises:
            EngineDeadError: the server does not answer, fails or stays overloaded.
            WrongAnswerError: its answer cannot be read.
            ValueError: it refuses what is asked.
        """
        limit, largest = _ANSWER_S / (1 + retries), _LARGEST_ANSWER + _LARGEST_TOKEN * log_probs
        sent = self._client.request(
            method, route, body, query, timeout_s=limit, largest=largest, retries=retries
        )
        try:
            answer = wait_for_result(sent)
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
            f"{self.field}: the server at {self.address} must answer as {self.name} does when it "
            f"is to {what}; in its answer, {error}: {self.restart}."
        )

    def close(self) -> None:
        """End the connections."""
        wait_for_result(self._client.close())


class VLLM(Server):
    """``vllm serve``, through ``/inference/v1/generate`` and the routes of its development mode."""

    name = "vLLM"
    starts: Mapping[Role, str] = {
        "engine": (
            "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode "
            "processed_logprobs"
        ),
        "teacher": "vllm serve MODEL, with --max-logprobs for a policy.teacher_top_k above 20",
    }

    def greet(self) -> None:
        def read(answer: Any) -> int:
            size: int = entry(int, answer, "data", 0, "max_model_len")
            return size

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
        if (
            params.stop is not None
        ):  # its own search may end a response earlier than the token that ours ends it with
            sampling |= {"stop": list(params.stop.strings), "detokenize": True}
        return self.ask(
            "POST",
            "/inference/v1/generate",
            "sample",
            {"token_ids": request.prompt, "sampling_params": sampling},
            read=lambda answer: answers.read_vllm_samples(answer, request),
            log_probs=request.n * request.limit,
        )

    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        sampling = {"max_tokens": 1, "temperature": temperature, "logprobs": 5, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": sampling}
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
            retries=_SCORE_AGAIN,
        )

    def pause(self, mode: str) -> None:
        self.ask("POST", "/pause", "pause", mode=mode)

    def load(self, folder: Path, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask("POST", "/collective_rpc", f"load the weights in {folder}", body)
        self.ask("POST", "/reset_prefix_cache", "drop its cache", reset_running_requests="true")
        self.ask("POST", "/update_weight_version", "label its weights", {"new_version": label})

    def go_on(self) -> None:
        self.ask("POST", "/resume", "resume")


class SGLang(Server):
    """SGLang's server, by its documented routes."""

    name = "SGLang"
    starts: Mapping[Role, str] = dict.fromkeys(
        _FIELDS, "python -m sglang.launch_server --model-path MODEL"
    )

    def check_options(self, in_flight: str) -> None:
        if in_flight == "keep":  # it labels a response as a whole
            raise ValueError(
                "inference_model.in_flight=keep must be another one with the SGLang server at "
                f"{self.address}, which does not say which weights sampled which token: use wait "
                "or abort."
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
            {"input_ids": request.prompt, "sampling_params": sampling, "return_logprob": True},
            read=lambda answer: answers.read_sglang_samples(answer, request),
            log_probs=request.n * request.limit,
        )

    def candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 5,
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
            "logprob_start_len": start - 1,  # the first one has no log-prob
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
            retries=_SCORE_AGAIN,
        )

    def pause(self, mode: str) -> None:
        # What is aborted is asked for again: each response is then of one version.
        self.ask("POST", "/pause_generation", "pause", {"mode": "abort"})

    def load(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        what = f"load the weights in {folder}"
        answer: Any = self.ask("POST", "/update_weights_from_disk", what, body)
        if type(answer) is not dict or answer.get("success") is not True:
            raise EngineDeadError(
                f"the server at {self.address} did not {what}: it answered {str(answer)[:300]!r}"
            )

    def go_on(self) -> None:
        self.ask("POST", "/continue_generation", "resume", {})


def connect(address: str, within_s: float, role: Role = "engine") -> Server:
    """Connect to a server, whichever kind it is.

    Args:
        address: of the server.
        within_s: how long to wait for one that does not answer; 0 refuses it as one that the user
            gave.
        role: of the server in the run.

    Raises:
        EngineDeadError: it does not answer in time.
        ValueError: it cannot have that role.
    """
    until = time.monotonic() + within_s
    while True:
        try:
            server = _greeted(address, role)
            if within_s and role == "engine":
                with contextlib.suppress(
                    ValueError
                ):  # an engine that was lost in the middle of an update
                    server.go_on()
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
    """Connect to a server that answers."""
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
