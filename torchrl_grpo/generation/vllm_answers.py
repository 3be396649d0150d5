"""vLLM's answers as completions. vLLM itself is not imported here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.generation.base import Completion, OnFinished

_NO_LOG_PROB = -9000.0
"""At most this is the log-prob of a token that was not kept: -inf, or -9999 in a server's JSON."""


class Answer:
    """vLLM's answer to a request, converted to completions. It arrives at once, or in parts that
    each contain some of its samples.

    Args:
        request: index of the request, for ``on_finished``.
        n: number of responses.
        samples: number of vLLM's samples; a greedy request has one for all responses.
        on_finished: as in ``Engine.generate``.
        version: version that samples all tokens; None to use the versions that vLLM's scheduler
            reports.
    """

    def __init__(
        self,
        request: int,
        n: int,
        samples: int,
        on_finished: OnFinished | None,
        version: int | None = None,
    ) -> None:
        self._version = version
        self._request, self._n, self._samples, self._on_finished = request, n, samples, on_finished
        self._parts: dict[int, list[Any]] = defaultdict(list)
        self._done: dict[int, Completion] = {}

    def add(self, samples: Iterable[Any]) -> None:
        """Add new output of some samples; call ``on_finished`` for those that have ended."""
        for sample in samples:
            self._parts[sample.index].append(sample)
            if sample.finish_reason in ("stop", "length"):
                for number in range(sample.index, self._n, self._samples):
                    completion = _completion(self._parts[sample.index], self._version)
                    self._done[number] = completion
                    if self._on_finished is not None:
                        self._on_finished(self._request, number, completion)

    def restart(self) -> None:
        """Discard everything received, because the request is sent again."""
        self._parts.clear()
        self._done.clear()

    def completions(self) -> list[Completion]:
        """Return all completions, once they have ended."""
        return [self._done[number] for number in range(self._n)]


def _completion(parts: Sequence[Any], version: int | None) -> Completion:
    tokens = torch.tensor([token for part in parts for token in part.token_ids], dtype=torch.int64)
    versions = None if version is None else torch.full_like(tokens, version)
    for span in () if version is not None else parts[-1].weight_versions or ():
        if span.version.isdecimal():  # "default" until the scheduler receives a version
            versions = torch.full_like(tokens, -1) if versions is None else versions
            versions[span.start : span.end] = int(span.version)
    # Each token's own log-prob, followed by the largest ones in order if they were asked for.
    values = [value for part in parts for value in part.logprobs.logprobs]
    shape = (len(tokens), len(values) // max(1, len(tokens)))
    log_probs = torch.tensor(values, dtype=torch.float32).view(shape)
    kept = of_kept = None
    if shape[1] > 1:
        ids = [token for part in parts for token in part.logprobs.token_ids]
        kept, of_kept = kept_tokens(torch.tensor(ids, dtype=torch.int32).view(shape), log_probs)
    return Completion(
        tokens=tokens,
        log_probs=log_probs[:, :1].flatten(),
        finish_reason="stop" if parts[-1].finish_reason == "stop" else "length",
        versions=versions,
        kept=kept,
        kept_log_probs=of_kept,
    )


def kept_tokens(ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that each sampled one was drawn from, those with a probability, and their
    log-probs.

    Args:
        ids: [T, 1 + K] int32, the sampled token and the K most likely ones, in order.
        log_probs: [T, 1 + K], theirs, -inf for a token that was not kept.

    Returns:
        [T, K] int32, padded with -1, and [T, K], padded with -inf. A sampled token that ties with
        the last one is among them.
    """
    exists = log_probs[:, 1:] > _NO_LOG_PROB
    kept = ids[:, 1:].where(exists, -1)
    tied = ~(kept == ids[:, :1]).any(1)
    kept[tied, -1] = ids[tied, 0]
    return kept, log_probs[:, 1:].where(exists, -torch.inf)
