"""Interface of the generation engines: sampling parameters, completions, and ``Engine``.

An engine takes token ids and returns token ids with the log-probabilities of the distribution that
they were sampled from (temperature, min-p, top-k and top-p included). It neither reads nor writes
text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from torchrl_grpo.checks import MIN_TEMPERATURE
from torchrl_grpo.engines import ENGINES, KEY
from torchrl_grpo.errors import ReceiptError, RunLostError
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.host.objects import load_object
from torchrl_grpo.images import Prompt
from torchrl_grpo.weights import TransferHandle, WeightHandle
from torchrl_grpo.weights.receipts import Receipt


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    Args:
        max_new_tokens: maximum tokens of a response, at least 1.
        temperature: divides the logits, at least 0.01; or 0, which is greedy (log-probs are then
            those of temperature 1).
        top_p: nucleus mass in (0, 1]; 1 keeps all tokens.
        top_k: number of most likely tokens to keep; 0 keeps all.
        min_p: share in [0, 1) of the most likely token's probability that a token must have to be
            kept.
        stop_token_ids: a response ends with the first of these that is sampled; it is part of the
            response.
        stop: a response also ends with the token that completes one of these strings; None for no
            strings.
        return_kept: whether completions list the tokens that ``top_k`` keeps, which must be above
            0. A step then keeps at most ``top_k`` tokens, and so drops some of those tied with the
            last one.
        return_kept_log_probs: whether they list the log-probs of these tokens too.

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
    return_kept_log_probs: bool = False

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
        if self.return_kept_log_probs and not self.return_kept:
            raise ValueError("return_kept_log_probs=True needs return_kept=True: use both.")


@dataclass
class Completion:
    """One response to one prompt.

    Attributes:
        tokens: [T] int64, T >= 1, including the stop token or the tokens of the stop string, if
            any.
        log_probs: [T] float32, of the distribution that each token was sampled from.
        finish_reason: ``"stop"`` after a stop token or string, ``"length"`` when ``max_new_tokens``
            or the context ended it.
        versions: [T] int64, the ``policy_version`` of the weights that sampled each token; None
            where the engine's version cannot change during ``generate``.
        kept: [T, top_k] int32, the tokens that each token was drawn from, padded with -1; None
            without ``return_kept``.
        kept_log_probs: [T, top_k] float32, theirs, padded with -inf; None without
            ``return_kept_log_probs``.
    """

    tokens: Tensor
    log_probs: Tensor
    finish_reason: Literal["stop", "length"]
    versions: Tensor | None = None
    kept: Tensor | None = None
    kept_log_probs: Tensor | None = None


def cut_off(completion: Completion, max_tokens: int | None, end: int | None) -> Completion:
    """Return the beginning of a response, as a lower token limit or another stop string would have
    ended it.

    It has the same distribution as a response that was sampled with that limit or stop string.

    Args:
        completion: the response.
        max_tokens: maximum tokens, at least 1; None for no limit.
        end: number of tokens that complete a stop string; None if it has none.
    """
    size = len(completion.tokens)
    length = size if max_tokens is None else min(max_tokens, size)
    ends = end is not None and end <= length
    length = end if end is not None and ends else length
    if length == size:
        return replace(completion, finish_reason="stop") if ends else completion
    optional = (completion.versions, completion.kept, completion.kept_log_probs)
    return Completion(
        completion.tokens[:length],
        completion.log_probs[:length],
        "stop" if ends else "length",
        *(None if values is None else values[:length] for values in optional),
    )


OnFinished = Callable[[int, int, Completion], None]


@dataclass(frozen=True)
class AdapterSlots:
    """Size and target modules of LoRA adapters, for an engine that keeps them in slots, separate from
    its base weights.

    Attributes:
        rank: maximum rank of the adapters.
        modules: last component of the name of each module with adapters, such as ``q_proj``.
    """

    rank: int
    modules: tuple[str, ...]


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
        seed: of sampling.
        trust_remote_code: whether code from the model's repository may run.
        on_cpu: whether the engine is to run on a CPU.
        colocated: whether it shares its device with the other roles.
        num_sequences: responses that training samples at once.
        trains: whether the run trains, and so sends weights to the engine.
        slots: for the adapters that the engine gets instead of whole weights; None if it gets whole
            weights.
        number: index of the engine among the run's engines.
        folder: of the run, for a log; None for no log.
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
    slots: AdapterSlots | None = None
    number: int = 0
    folder: Path | None = None


class Engine(ABC):
    """Samples responses with a copy of the policy's weights.

    Lifecycle: ``generate`` and ``update_weights`` in any order, then ``close`` once or more; after
    ``close`` every call raises ``RuntimeError``. Only ``update_weights`` changes
    ``policy_version``. If it may run during ``generate``, completions have the version that sampled
    each token.

    Attributes:
        policy_version: version of the weights.
        receipt: of the weights; None before the first update.
        receipt_s: seconds that the receipts of the latest update took.
        concurrent: whether it samples for several threads at once.
        exclusive: a lock that threads hold while they use an engine that is not concurrent.
    """

    policy_version: int = 0
    receipt: Receipt | None = None
    receipt_s: float = 0.0
    concurrent: bool = False
    exclusive: AbstractContextManager[Any] = nullcontext()

    @classmethod  # noqa: B027
    def require(cls, *, on_cpu: bool) -> None:
        """Refuse a machine that cannot run the engine.

        Args:
            on_cpu: whether there is no accelerator.

        Raises:
            ValueError: a package is not installed, for example.
        """

    @classmethod  # noqa: B027
    def check(cls, request: EngineRequest) -> None:
        """Refuse models and options that the engine cannot run, as far as this is known before
        weights load.

        Raises:
            ValueError: the engine cannot run this model with these options.
        """

    @classmethod
    def takes_adapters(cls, context: Any) -> bool:
        """Return whether the engine of a run (``Context``) can hold its LoRA adapters separate from
        the base weights, unless ``EngineKind.adapters`` says so.
        """
        return True

    @classmethod
    def device_share(cls, request: EngineRequest) -> float | None:
        """Return the share of an accelerator's memory that the engine reserves when it starts; None
        for an engine that allocates memory as needed.
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
        """Make the engine that a run asks for; an engine in ``ENGINES`` overrides this.

        Args:
            request: checked.
            device: of the engine, or the first of several.
            load_model: loads the model onto the device, for an engine that samples with a PyTorch
                model.
            concurrent: whether several threads may call the engine at once, if its kind supports
                it.
        """
        raise NotImplementedError(
            f"{cls.__name__} cannot be made from a config: override Engine.make."
        )

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """Sample ``n`` responses to each prompt.

        Args:
            prompts: one [T] int64 tensor per prompt, T >= 1, or a ``Prompt`` with images; lengths
                may differ.
            n: responses per prompt; the prompt is computed once for all of them.
            params: parameters of sampling.
            on_finished: called with each completion as soon as it is finished, while others are
                still being sampled: the index of the prompt, the index of the response, and the
                completion. It must be quick, and may be called in another thread.

        Returns:
            for each prompt, in order, its ``n`` completions (CPU tensors).

        Raises:
            ValueError: a prompt leaves no room for one token in the model's context.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights.

        Args:
            weights: pairs (name in the Hugging Face checkpoint, tensor), every parameter once; a
                tied ``lm_head`` may be omitted. Values are copied before the call returns.
            version: the new ``policy_version``.

        Raises:
            RuntimeError: a name is unknown, missing, or has another shape; the engine then keeps
                its version.
        """

    def load(self, handle: WeightHandle, version: int) -> None:
        """Replace all weights with those that another process sends, and wake a sleeping engine.

        Args:
            handle: locates the weights; it must stay valid until the call returns.
            version: the new ``policy_version``.

        Raises:
            RuntimeError: as in ``update_weights``; or the weights could not be read.
            ReceiptError: the weights did not arrive, or equal the previous ones although training
                changed them.
        """
        before, changes = self.receipt, handle.changes and version != self.policy_version
        self._load(handle, version)
        if not isinstance(handle, TransferHandle):  # whose seconds are those of the workers too
            self.receipt_s += handle.receipt_s
        if changes and before and self.receipt == before:
            raise ReceiptError(
                f"the optimizer changed the weights of version {version}, but all {len(before)} tensors "
                "of the engine equal those of the previous version, so the trained weights are not "
                "the ones that are sent: check that the trained adapters or layers are part of the "
                "model. If the changes are too small for inference_model.dtype, use float32."
            )

    def _load(self, handle: WeightHandle, version: int) -> None:
        """Load the weights; ``load`` then checks that trained weights differ from the previous ones."""
        self.update_weights(handle.weights(), version)

    def seed(self, seed: int) -> None:  # noqa: B027
        """Make further sampling reproducible, as far as the engine can."""

    def sleep(self) -> None:  # noqa: B027
        """Release the device memory that is only needed for generating, until ``wake`` or new
        weights.
        """

    def wake(self) -> None:  # noqa: B027
        """Undo ``sleep``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next samples depend on, without the weights."""
        return {"policy_version": self.policy_version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""
        self.policy_version = state["policy_version"]

    def close(self) -> None:  # noqa: B027
        """End the engine and its processes. May be called again."""

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
    """Import the class of an engine in ``ENGINES``.

    Raises:
        ValueError: another package's cannot be imported, or is not a subclass of ``Engine``.
    """
    return load_object(
        backend,
        KEY,
        "subclass of Engine",
        lambda value: isinstance(value, type) and issubclass(value, Engine),
        {backend: ENGINES[backend].implementation},
    )


@contextmanager
def preserve_rng(engine: Engine) -> Iterator[None]:
    """Context that restores the engine's random state, so that sampling inside it changes nothing
    in the run.

    It leaves a concurrent engine alone: its samples depend on the timing of calls anyway, and
    restoring the state would repeat random numbers in the calls that are still running.
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
    """Return whether tokens are chosen by argmax."""
    return params.temperature == 0
