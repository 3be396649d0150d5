"""Interface of the generation engines: sampling parameters, completions, and ``Engine``.

An engine is given token ids and gives back token ids with the log-probabilities of the distribution
that they were sampled from (temperature, min-p, top-k and top-p included). Text never enters and
never leaves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from torchrl_grpo.checks import MIN_TEMPERATURE
from torchrl_grpo.errors import RunLostError
from torchrl_grpo.generation.engines import ENGINES
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.weights import WeightHandle


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    Args:
        max_new_tokens: most tokens that one response may have, at least 1.
        temperature: the logits are divided by it, at least 0.01; or 0, which is greedy (log-probs
            are then those of temperature 1).
        top_p: nucleus mass in (0, 1]; 1 keeps all tokens.
        top_k: number of most likely tokens to keep; 0 keeps all.
        min_p: share in [0, 1) of the most likely token's probability that a token must have to be
            kept.
        stop_token_ids: a response ends with the first of these that is sampled; it is part of the
            response.
        stop: a response also ends with the token that completes one of these strings; None is none.
        return_kept: whether completions have the tokens that are kept. A step then keeps ``top_k``
            tokens at most, which must be above 0, and of those tied with the last one only some.

    Raises:
        ValueError: a value is out of its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: StopStrings | None = None
    return_kept: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {self.max_new_tokens}: use 1 or more."
            )
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got "
                f"{self.temperature}: use 1.0."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be in (0, 1], got {self.top_p}: use 1.0 to keep all tokens."
            )
        if self.top_k < 0:
            raise ValueError(
                f"top_k must be at least 0, got {self.top_k}: use 0 to keep all tokens."
            )
        if not 0 <= self.min_p < 1:
            raise ValueError(
                f"min_p must be in [0, 1), got {self.min_p}: use 0 to keep all tokens."
            )
        if self.return_kept and not self.top_k:
            raise ValueError("return_kept=True needs a top_k, got 0: use top_k=50.")


@dataclass
class Completion:
    """One response to one prompt.

    Attributes:
        tokens: [T] int64, T >= 1, with the stop token, or the tokens that hold the stop string,
            when there is one.
        log_probs: [T] float32, of the distribution that each token was sampled from.
        finish_reason: ``"stop"`` after a stop token or string, ``"length"`` when ``max_new_tokens``
            or the context ended it.
        versions: [T] int64, the ``policy_version`` of the weights that sampled each token; None
            where the engine's version cannot change during ``generate``.
        kept: [T, top_k] int32, the tokens that each token was drawn from, and then -1; None unless
            ``return_kept`` asks for them.
    """

    tokens: Tensor
    log_probs: Tensor
    finish_reason: Literal["stop", "length"]
    versions: Tensor | None = None
    kept: Tensor | None = None


def cut_off(done: Completion, max_tokens: int | None, end: int | None) -> Completion:
    """The beginning of a response that ends where fewer tokens, or another stop string, end it.

    It has the distribution that it would have, had it been sampled so.

    Args:
        done: the response.
        max_tokens: most tokens, at least 1; None is no limit.
        end: tokens that complete a stop string; None where none does.
    """
    length = len(done.tokens) if max_tokens is None else min(max_tokens, len(done.tokens))
    ends = end is not None and end <= length
    length = end if end is not None and ends else length
    if length == len(done.tokens):
        return replace(done, finish_reason="stop") if ends else done
    return Completion(
        done.tokens[:length],
        done.log_probs[:length],
        "stop" if ends else "length",
        *(None if values is None else values[:length] for values in (done.versions, done.kept)),
    )


OnFinished = Callable[[int, int, Completion], None]


class EngineDeadError(RunLostError):
    """A process of the engine has ended: every further call fails, and a new engine must be made."""


@dataclass(frozen=True)
class EngineRequest:
    """The engine that a run asks for.

    Attributes:
        name: the model, as messages call it.
        path: its folder, or its name on the Hugging Face hub.
        model_config: its Hugging Face config.
        options: the config's ``inference_model``; an engine reads the fields that concern it.
        max_dialog_tokens: longest prompt, earlier turns included.
        seed: of the draws.
        trust_remote_code: whether code from the model's repository may run.
        on_cpu: whether the engine is to run on a CPU.
        colocated: whether it shares its device with the other roles.
        num_sequences: responses that training samples at a time.
        trains: whether the run trains, so that the engine will be given weights.
        number: of the engine, among those of the run.
        folder: of the run, for a log; None is none.
    """

    name: str
    path: str
    model_config: PretrainedConfig
    options: Any
    max_dialog_tokens: int
    seed: int
    trust_remote_code: bool
    on_cpu: bool
    colocated: bool
    num_sequences: int
    trains: bool = True
    number: int = 0
    folder: Path | None = None


class Engine(ABC):
    """Samples responses with a copy of the policy's weights.

    Lifecycle: ``generate`` and ``update_weights`` in any order, then ``close`` once or more; after
        ``close`` every call
    raises ``RuntimeError``. ``policy_version`` changes in ``update_weights`` alone. Where that may
    happen while ``generate`` runs, the completions say themselves which version sampled each token.

    Attributes:
        policy_version: version of the weights.
        concurrent: whether it samples for several threads at a time.
        exclusive: entered by all who use an engine that is not concurrent, where it is shared by
            several threads.
    """

    policy_version: int = 0
    concurrent: bool = False
    exclusive: AbstractContextManager[Any] = nullcontext()

    @classmethod  # noqa: B027
    def require(cls, *, on_cpu: bool) -> None:
        """Refuse a machine that lacks what the engine needs.

        Args:
            on_cpu: whether there is no accelerator.

        Raises:
            ValueError: a package is not installed, for example.
        """

    @classmethod  # noqa: B027
    def check(cls, request: EngineRequest) -> None:
        """Refuse models and options that the engine cannot run, as far as known before weights
        load.

        Raises:
            ValueError: the engine cannot run this model, or not with these options.
        """

    @classmethod
    def device_share(cls, request: EngineRequest) -> float | None:
        """Return the share of an accelerator's memory that the engine takes at its start; None
        takes what it needs.
        """
        return None

    @classmethod
    def make(
        cls,
        request: EngineRequest,
        device: torch.device,
        load_model: Callable[[], PreTrainedModel],
        *,
        concurrent: bool = False,
    ) -> Engine:
        """Makes the engine that a run asks for; an engine in ``ENGINES`` overrides this.

        Args:
            request: checked.
            device: of the engine, the first one of several.
            load_model: loads the model onto the device, for an engine that samples with a PyTorch
                model.
            concurrent: whether several threads may call the engine at a time, if it can do that at
                all.
        """
        raise NotImplementedError(
            f"{cls.__name__} cannot be made from a config: override Engine.make."
        )

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Tensor],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """Samples ``n`` responses to each prompt.

        Args:
            prompts: one [T] int64 tensor a prompt, T >= 1; lengths may differ.
            n: responses a prompt; the prompt is computed once for all of them.
            params: how to sample.
            on_finished: told each completion as soon as it is finished, while others are still
                sampled: the index of the prompt, the number of the response, and the completion. It
                must be quick, and may be called in another thread.

        Returns:
            for each prompt, in order, its ``n`` completions (CPU tensors).

        Raises:
            ValueError: a prompt leaves no room for one token in the model's context.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights.

        Args:
            weights: pairs (name in the Hugging Face checkpoint, tensor), every parameter once; a
                tied ``lm_head`` may be left out. Values are copied before the call returns.
            version: the new ``policy_version``.

        Raises:
            RuntimeError: a name is unknown, missing, or has another shape; the engine then keeps
                its version.
        """

    def load(self, handle: WeightHandle, version: int) -> None:
        """Replace all weights by those that another process sends, and wake a sleeping engine.

        Args:
            handle: says where they are; it must stay valid until the call returns.
            version: the new ``policy_version``.

        Raises:
            RuntimeError: as in ``update_weights``; or the weights are gone or could not be had.
        """
        self.update_weights(handle.weights(), version)

    def seed(self, seed: int) -> None:  # noqa: B027
        """Makes the draws from here on reproducible, as far as the engine can."""

    def sleep(self) -> None:  # noqa: B027
        """Release the device memory that is only needed for generating, until ``wake`` or new
        weights.
        """

    def wake(self) -> None:  # noqa: B027
        """Undoes ``sleep``."""

    def state_dict(self) -> dict[str, Any]:
        """The state, apart from the weights, that the next draws depend on."""
        return {"policy_version": self.policy_version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave."""
        self.policy_version = state["policy_version"]

    def close(self) -> None:  # noqa: B027
        """Ends the engine and its processes. May be called again."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: pass GenerationPolicy a function "
            "that makes the engine."
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def engine_class(backend: str) -> type[Engine]:
    """Imports the class of an engine in ``ENGINES``."""
    module, _, name = ENGINES[backend].implementation.partition(":")
    return cast(type[Engine], getattr(import_module(module), name))


@contextmanager
def preserve_rng(engine: Engine) -> Iterator[None]:
    """Context that restores the engine's random state, so that sampling inside it changes nothing
    in the run.

    An engine that samples for several callers at a time is left as it is: its draws depend on how
    the calls meet anyway, and those that are running would draw the numbers between the two states
    a second time.
    """
    if engine.concurrent:
        yield
        return
    with engine.exclusive:
        state = engine.state_dict()
        try:
            yield
        finally:
            engine.load_state_dict(state)


def greedy(params: SamplingParams) -> bool:
    """Whether tokens are taken by argmax."""
    return params.temperature == 0
