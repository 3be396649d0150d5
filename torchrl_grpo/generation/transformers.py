"""The ``transformers`` engine: samples from Hugging Face models on any device of PyTorch.

It is not a server: one call generates a batch and returns. Each prompt is computed once for its
whole group, waiting groups take the places of finished rows, and log-probs are those of the
sampled distribution in float32.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torchrl import torchrl_logger
from transformers import PreTrainedModel

from torchrl_grpo.checks import context_length
from torchrl_grpo.generation.adapters import remove_adapters, set_adapters
from torchrl_grpo.generation.base import (
    Completion,
    Engine,
    EngineRequest,
    OnFinished,
    SamplingParams,
)
from torchrl_grpo.generation.decoder import Decoder, GenericDecoder
from torchrl_grpo.generation.fused_decoder import FusedDecoder, can_fuse
from torchrl_grpo.generation.sampling import sample
from torchrl_grpo.generation.stops import ending
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.threads import limit_threads
from torchrl_grpo.images import Prompt, tokens_of
from torchrl_grpo.weights import WeightHandle, load_weights
from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.receipts import Digests

_CHECK_EVERY = 4
"""Steps between two checks for finished rows, because each check waits for the device."""

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest result of ``probe`` that rounding explains; 1e-3 for other dtypes."""


class TransformersEngine(Engine):
    """Samples with a copy of a Hugging Face model.

    ``load`` keeps LoRA adapters separate from the weights.
    Models of the Llama architecture use a hand-written decoder, all others their own forward with a
    cache. On a short probe, the decoder's logits must equal those of the model's forward without a
    cache. A small model on a CPU runs on one thread (``threads``).

    Attributes:
        model: the model that it samples with; ``update_weights`` changes its weights, and ``close``
            releases it.

    Args:
        model: a causal language model, on its device and in its dtype; the adapters of a peft model
            are merged.
        copy: whether to work on a copy; False gives the model to the engine, which saves memory.
        kv_cache_bytes: maximum memory for keys and values; groups that do not fit wait until others
            have finished, or until all have if the model uses its own forward.

    Raises:
        ValueError: the model cannot be sampled from token by token; the message says why.

    Example:
        >>> import torch
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        >>> engine = TransformersEngine(Qwen2ForCausalLM(Qwen2Config(vocab_size=50, **sizes, **heads)))
        >>> engine.seed(0)
        >>> [group] = engine.generate([torch.tensor([3, 1, 4])], n=2, params=SamplingParams(max_new_tokens=5))
        >>> [(len(completion.tokens), completion.finish_reason) for completion in group]
        [(5, 'length'), (5, 'length')]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        copy: bool = True,
        kv_cache_bytes: int = 4 << 30,
    ) -> None:
        own: Any = deepcopy(model) if copy else model
        own = own.merge_and_unload() if hasattr(own, "merge_and_unload") else own
        self.model: PreTrainedModel = own.requires_grad_(False).eval()
        limit_threads(self.model)
        self._kv_cache_bytes = kv_cache_bytes
        self._context = context_length(self.model.config)
        self._vocab_size = self.model.get_output_embeddings().weight.shape[0]
        self._generator = torch.Generator()
        self._closed = False
        self.exclusive = threading.RLock()
        self.policy_version = 0
        self.decoder: Decoder = _choose_decoder(self.model)

    @classmethod
    def make(
        cls,
        request: EngineRequest,
        device: torch.device,
        load_model: Callable[[], PreTrainedModel],
        *,
        concurrent: bool = False,
    ) -> Engine:
        return cls(load_model(), copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(TransformersEngine, copy=False, kv_cache_bytes=self._kv_cache_bytes)
        return make, (self.model,), self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        self._check_open()
        self._check_request(prompts, n)
        # One number for every token that may be drawn, by its position in the request, so that a
        # token does not depend on the other rows in the batch.
        shape = (len(prompts), n, params.max_new_tokens)
        uniform = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        # Longest prompts first, so that later prompts fit into the same cache.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        groups: list[list[Any]] = [[None] * n for _ in prompts]

        def finish(row: int, completion: Completion) -> None:
            i, number = order[row // n], row % n
            groups[i][number] = completion
            if on_finished is not None:
                on_finished(i, number, completion)

        try:
            if prompts:
                self._generate(
                    [prompts[i] for i in order], n, params, uniform[order].flatten(0, 1), finish
                )
        except torch.OutOfMemoryError as error:
            explain, at_most = load_extra("explain_sampling_memory"), self._kv_cache_bytes
            rows = len(prompts[order[0]]), len(prompts), n
            raise explain(self.model, self.decoder, at_most, *rows, params, error) from error
        return groups

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._check_open()
        with self.exclusive:
            digests = load_weights(self.model, weights)
            remove_adapters(self.model)
            self._note(digests, version)

    def _note(self, digests: Digests, version: int) -> None:
        """Record the version and the digests of new weights."""
        self.receipt, self.receipt_s = digests.receipt(), digests.seconds
        self.policy_version = version

    def _load(self, handle: WeightHandle, version: int) -> None:
        if not isinstance(handle, AdapterHandle):
            super()._load(handle, version)
            return
        self._check_open()
        with self.exclusive:
            self._note(set_adapters(self.model, handle), version)

    def sleep(self) -> None:
        self._check_open()
        self.decoder.kept = None

    def seed(self, seed: int) -> None:
        self._check_open()
        self._generator.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        self._check_open()
        return super().state_dict() | {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_open()
        super().load_state_dict(state)
        # Another kind of device has a state of another size.
        if state["generator"].shape == self._generator.get_state().shape:
            self._generator.set_state(state["generator"])

    def close(self) -> None:
        self._closed = True
        self.__dict__.pop("decoder", None)
        self.__dict__.pop("model", None)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed: make a new TransformersEngine.")

    def _check_request(self, prompts: Sequence[Tensor | Prompt], n: int) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}: use 1 or more responses per prompt.")
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) < self._context:
                raise ValueError(
                    f"prompts[{i}] must have 1 to {self._context - 1} tokens to leave room for one "
                    f"in a context of {self._context}, got {len(prompt)}: drop or shorten it."
                )
            tokens = tokens_of(prompt)
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
                raise ValueError(
                    f"prompts[{i}] must have token ids in [0, {self._vocab_size}), got "
                    f"{int(tokens.min())} to {int(tokens.max())}: use the tokenizer that belongs "
                    "to the model."
                )

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        uniform: Tensor,
        tell: Callable[[int, Completion], None],
    ) -> None:
        """Draw tokens until every row has ended or is at its limit.

        Row ``r`` is response ``r % n`` to prompt ``r // n``. Prompts that did not fit at first take
        the places of finished rows.

        Args:
            prompts: the longest first.
            n: rows per prompt.
            params: parameters of sampling.
            uniform: [R, max_new_tokens] float64 in [0, 1).
            tell: called with each row that has ended, and its response.
        """
        device = self.model.device
        waiting = [p if isinstance(p, Prompt) else p.to(device) for p in prompts]
        limits = torch.tensor([min(params.max_new_tokens, self._context - len(p)) for p in prompts])
        limits = limits.repeat_interleave(n).to(device)
        # The state of a response after a token; the last state is its end.
        after = ending(params.stop, params.stop_token_ids, self._vocab_size).to(device)
        if device.type == "mps":  # which has no float64
            uniform = uniform.float().clamp_(max=1 - 2**-24)
        flight = _InFlight(params, uniform.to(device), limits, after, tell)
        freed = True
        while waiting or len(flight.rows):
            is_empty = not len(flight.rows)
            if is_empty:
                batch, logits = self.decoder.start(flight.steps), uniform.new_empty(0)
            if waiting and freed and (is_empty or batch.refills):
                most, rows = params.max_new_tokens, flight.rows.tolist()
                room = self._room_for(len(prompts[0]), n, most, rows)
                added, waiting = waiting[:room], waiting[room:]
                if added:
                    new = batch.add(added, n).repeat_interleave(n, dim=0)
                    logits = new if is_empty else torch.cat((logits, new))
                    flight.add(len(new))
            latest = flight.draw(logits)
            kept = flight.drop_finished()
            freed = kept is not None
            if kept is not None:
                latest = latest[kept]
                if len(kept):
                    batch.keep(kept)
            if len(latest):
                logits = batch.step(latest)

    def _room_for(self, longest: int, n: int, max_new_tokens: int, rows: Sequence[int]) -> int:
        """Return how many groups fit into the cache with these rows, if all responses reach their
        maximum length; at least one if there are no rows.
        """
        groups = Counter(row // n for row in rows).values()
        used = sum(self.decoder.cache_bytes(longest, size, max_new_tokens) for size in groups)
        size = self.decoder.cache_bytes(longest, n, max_new_tokens)
        return max(0 if rows else 1, (self._kv_cache_bytes - used) // size)


@dataclass
class _InFlight:
    """The responses of a call that are being drawn, and the tokens of all responses.

    Attributes:
        params: parameters of sampling.
        uniform: [N, T] float in [0, 1), a number for each token that may be drawn.
        limits: [N] int64, the maximum length of each response.
        after: [states, V], the state of a response after a token; the last state is its end.
        tell: called with each response that has ended, and its tokens.
        rows: [R] int64, the response of each row of the decoder's batch.
        steps: maximum length of a response.
    """

    params: SamplingParams
    uniform: Tensor
    limits: Tensor
    after: Tensor
    tell: Callable[[int, Completion], None]

    def __post_init__(self) -> None:
        self.steps = int(self.limits.max())
        self.rows = self._lengths = self.limits.new_empty(0)
        self._states = self.after.new_empty(0)  # of the rows, before their next token
        self._added = self._step = 0
        self._ends = set[int]()  # the steps after which no row of an addition continues
        shape, top_k, float32 = (len(self.limits), self.steps), self.params.top_k, torch.float32
        width, scored = top_k * self.params.return_kept, top_k * self.params.return_kept_log_probs
        self._values = (  # tokens, their log-probs, and those of the kept tokens
            self.limits.new_zeros(shape),
            self.limits.new_zeros(shape, dtype=float32),
            self.limits.new_zeros(*shape, width, dtype=torch.int32),
            self.limits.new_zeros(*shape, scored, dtype=float32),
        )

    def add(self, count: int) -> None:
        """Append rows for the next responses."""
        new = torch.arange(self._added, self._added + count, device=self.rows.device)
        self._added += count
        self._ends.add(self._step + int(self.limits[new].max()))
        self.rows = torch.cat((self.rows, new))
        self._lengths = torch.cat((self._lengths, torch.zeros_like(new)))
        self._states = torch.cat((self._states, self._states.new_zeros(count)))
        self._alive = torch.ones_like(self.rows, dtype=torch.bool)

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each row from logits [R, V]. Return the tokens, [R] int64."""
        at = self.rows, self._lengths
        drawn = sample(logits, self.params, self.uniform[at])
        for values, of_step in zip(self._values, drawn, strict=True):
            values[at] = of_step
        # A finished row stays in the batch and keeps overwriting the token after its end.
        self._lengths = self._lengths + self._alive
        self._step += 1
        latest = self._values[0][at]
        self._states = torch.where(self._alive, self.after[self._states, latest], self._states)
        self._alive = self._alive & ~self._stopped & (self.limits[self.rows] > self._lengths)
        return latest

    @property
    def _stopped(self) -> Tensor:
        """Whether each row has ended before its limit, [R] bool."""
        return self._states == len(self.after) - 1

    def drop_finished(self) -> Tensor | None:
        """Report the finished rows and drop them, every few steps. Return the positions of the rows
        that are kept, in their new order; None if no row was dropped.
        """
        if self._step % _CHECK_EVERY and self._step not in self._ends:
            return None
        kept, done = _compact(self._alive), ~self._alive
        if len(kept) == len(done):
            return None
        rows = self.rows[done]
        ends = self._lengths[done].tolist(), self._stopped[done].tolist()
        sampled = [values[rows].cpu() for values in self._values]
        # Copied outside of inference mode, so that autograd can save the tensors.
        with torch.inference_mode(False):
            for row, *parts, length, stop in zip(rows.tolist(), *sampled, *ends, strict=True):
                ids, log_probs, *of_kept = (part[:length].clone() for part in parts)
                kept_ids, kept_log_probs = (part if part.shape[1] else None for part in of_kept)
                reason: Literal["stop", "length"] = "stop" if stop else "length"
                self.tell(row, Completion(ids, log_probs, reason, None, kept_ids, kept_log_probs))
        self.rows, self._lengths = self.rows[kept], self._lengths[kept]
        self._states, self._alive = self._states[kept], self._alive[kept]
        return kept


def _compact(alive: Tensor) -> Tensor:
    """Return the rows that are alive, in an order that moves few of them: the last ones fill the
    gaps.

    Args:
        alive: [R] bool.

    Returns:
        [number alive] int64.
    """
    survivors = alive.nonzero().squeeze(-1)
    order = torch.arange(len(survivors), device=alive.device)
    gaps = (~alive[: len(survivors)]).nonzero().squeeze(-1)
    order[gaps] = survivors[len(survivors) - len(gaps) :]
    return order


def _choose_decoder(model: PreTrainedModel) -> Decoder:
    name, tolerance = type(model).__name__, _TOLERANCE.get(model.dtype, 1e-3)
    if can_fuse(model):
        fused = FusedDecoder(model)
        difference = probe(fused, model)
        if difference <= tolerance:
            return fused
        torchrl_logger.warning(
            f"the fast decoder's logits differ from {name}'s by {difference:.2g} of their spread: "
            "the model's own forward is used instead, which is slower."
        )
    generic = GenericDecoder(model)
    problem = ""
    try:
        difference = probe(generic, model)
        if not difference <= tolerance:
            problem = f"off by {difference:.2g} of their spread"
    except Exception as error:  # a model's own code may raise anything
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if problem:
        raise ValueError(
            "inference_model.backend=transformers needs a model whose logits are the same token "
            "by token, with a cache and padding on the left, as for whole sequences, but those of "
            f"{name} are not ({problem}): use another model, or inference_model.backend=vllm."
        )
    return generic


@torch.inference_mode()
def probe(decoder: Decoder, model: PreTrainedModel) -> float:
    """Compare a decoder with a model's own forward over a few tokens after two prompts of
    different lengths.

    Returns:
        the mean absolute difference of the logits, in standard deviations of the model's logits
        over the vocabulary.
    """
    device, vocab_size = model.device, model.get_output_embeddings().weight.shape[0]
    tokens = torch.randint(vocab_size, (20,), generator=torch.Generator().manual_seed(0)).to(device)
    prompts, response = [tokens[:7], tokens[7:11]], tokens[11:15]
    whole = [
        model(input_ids=torch.cat((prompt, response))[None], use_cache=False).logits[0]
        for prompt in prompts
    ]
    expected = torch.stack([logits[-len(response) - 1 :] for logits in whole]).float()

    batch = decoder.start(len(response) + 1)
    steps = [batch.add(prompts, 2)]
    of_prompt = torch.tensor([0, 0, 1, 1], device=device)
    for step, token in enumerate(response):
        if step == 2:
            kept = torch.tensor([3, 0], device=device)
            batch.keep(kept)
            of_prompt = of_prompt[kept]
        logits = batch.step(token.expand(len(of_prompt)))
        steps.append(torch.stack([logits[of_prompt == prompt].mean(0) for prompt in (0, 1)]))
    difference = (torch.stack(steps, 1).float() - expected).abs().mean()
    return (difference / expected.std(-1).mean()).item()
