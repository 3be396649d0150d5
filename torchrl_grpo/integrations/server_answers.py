"""Readers of inference servers' answers: each takes an answer's JSON and returns plausible values,
or refuses it.

A reader checks everything that it returns, so its callers don't have to, and raises a
``ValueError`` that names the field, the rule and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrl_grpo.generation.base import Completion, SamplingParams

TOLERANCE = 1e-3
"""In nats: log-probs that differ by less count as equal, and may exceed 0 by this much."""
LARGEST_VOCABULARY = 2**24
"""float32 cannot represent all larger ids exactly."""
_LEAST_LOG_PROB = -1000.0
"""No arithmetic samples a token below this; servers write -9999 for -inf and NaN."""
_CONTEXT_RESERVE = 8
"""Tokens of its context that a server may reserve for itself (SGLang)."""

_NUMBER = (int, float)

Label = tuple[str, int, int]
"""The label of some weights, the first token that they sampled, and the first after their last."""


@dataclass(frozen=True)
class SampleRequest:
    """A request for responses, with everything that the reader of the answer needs.

    Attributes:
        prompt: token ids.
        n: number of responses.
        limit: maximum tokens of each.
        room: tokens that the context has left for a response, at least ``limit``.
        params: of sampling.
        vocabulary: number of the model's token ids.
        labels: versions of the weights that the server received, by label; None if it keeps its
            own.
        oldest: version of the weights when the request was sent.
        adapters: name of the adapters to sample with; None for the base weights.
    """

    prompt: list[int]
    n: int
    limit: int
    room: int
    params: SamplingParams
    vocabulary: int
    labels: Mapping[str, int] | None
    oldest: int
    adapters: str | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the parameters that have the same name in both kinds of server."""
        params = self.params
        return {
            "n": self.n,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            # A server may have other defaults, which the trainer's log-probs would not include.
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # only stop_token_ids decide
        }


def entry(kind: type | tuple[type, ...], container: Any, *path: str | int, where: str = "") -> Any:
    """Return an entry of nested JSON objects and arrays.

    Args:
        kind: exact type of the entry, or several allowed types.
        container: the outermost object or array.
        path: keys and indices that lead to the entry.
        where: location of the container, for the message.

    Raises:
        ValueError: the entry is missing or has another type.
    """
    value, place = container, where
    for key in path:
        by_name = isinstance(key, str)
        place = f"{place}.{key}".lstrip(".") if by_name else f"{place}[{key}]"
        is_container = type(value) is (dict if by_name else list)
        if not is_container or key not in (value if by_name else range(len(value))):
            raise ValueError(f"{place} is missing")
        value = value[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{place} must be {names}, got {_shown(value)}")
    return value


def read_vllm_samples(answer: Any, request: SampleRequest) -> list[Completion | None]:
    """Read an answer of vLLM's ``/inference/v1/generate``; an aborted response is None."""
    choices = entry(list, answer, "choices")
    places = [f"choices[{number}]" for number in range(len(choices))]
    indices = [entry(int, answer, "choices", number, "index") for number in range(len(choices))]
    if sorted(indices) != list(range(request.n)):
        raise ValueError(
            f"choices must have each index from 0 to {request.n - 1} once, got {_shown(indices)}"
        )
    answers: list[Completion | None] = []
    for _, choice, where in sorted(zip(indices, choices, places, strict=True)):
        reason = entry(str, choice, "finish_reason", where=where)
        if reason == "abort":
            answers.append(None)
            continue
        tokens = entry(list, choice, "token_ids", where=where)
        content = entry(list, choice, "logprobs", "content", where=where)
        inside = f"{where}.logprobs.content[]"
        log_probs = [entry(_NUMBER, token, "logprob", where=inside) for token in content]
        labels = [] if request.labels is None else _vllm_labels(choice, where)
        answers.append(_sample(request, tokens, log_probs, reason, labels, where))
    return answers


def _vllm_labels(choice: Any, where: str) -> list[Label]:
    where = f"{where}.weight_versions"
    spans = choice.get("weight_versions") and entry(list, choice, "weight_versions")
    return [
        (
            entry(str, span, "version", where=where),
            entry(int, span, "start", where=where),
            entry(int, span, "end", where=where),
        )
        for span in spans or ()
    ]


def read_sglang_samples(answer: Any, request: SampleRequest) -> list[Completion | None]:
    """Read an answer of SGLang's ``/generate``: one object, or a list with one for each response;
    an aborted response is None.
    """
    responses = answer if type(answer) is list else [answer]
    if len(responses) != request.n:
        raise ValueError(f"there must be {request.n} responses, got {len(responses)}")
    answers: list[Completion | None] = []
    for number, response in enumerate(responses):
        where = f"[{number}].meta_info"
        info = entry(dict, response, "meta_info", where=f"[{number}]")
        reason = entry(str, info, "finish_reason", "type", where=where)
        if reason == "abort":
            answers.append(None)
            continue
        tokens, log_probs = [], []
        inside = f"{where}.output_token_logprobs[]"
        for pair in entry(list, info, "output_token_logprobs", where=where):
            log_probs.append(entry(_NUMBER, pair, 0, where=inside))
            tokens.append(entry(int, pair, 1, where=inside))
        labels = []
        if request.labels is not None:
            labels = [(entry(str, info, "weight_version", where=where), 0, len(tokens))]
        answers.append(_sample(request, tokens, log_probs, reason, labels, where))
    return answers


def _sample(
    request: SampleRequest,
    tokens: Sequence[Any],
    log_probs: Sequence[int | float],
    reason: str,
    labels: Sequence[Label],
    where: str,
) -> Completion:
    """Return a response after checking that tokens, log-probs and finish reason fit together."""
    length, stops = len(tokens), request.params.stop_token_ids
    if not 1 <= length <= request.limit:
        raise ValueError(f"{where} must have 1 to {request.limit} tokens, got {length}")
    if len(log_probs) != length:
        raise ValueError(
            f"{where} must have a log-prob for each of {length} tokens, got {len(log_probs)}"
        )
    ids = tuple(_token(token, request.vocabulary, where) for token in tokens)
    if any(token in stops for token in ids[:-1]):
        raise ValueError(
            f"{where} must end with the first of the stop tokens {list(stops)}, got more: "
            f"{_shown(ids)}"
        )
    at_stop, at_limit = ids[-1] in stops, length == request.limit
    if reason == "stop":
        possible = at_stop or request.params.stop is not None
    else:
        full = not at_stop and length + _CONTEXT_RESERVE >= request.room
        possible = reason == "length" and (at_limit or full)
    if not possible:
        raise ValueError(
            f"{where} must end with a stop token, at {request.limit} tokens or as finish_reason "
            f"'abort', got {_shown(reason)} after {length} tokens that end with {ids[-1]}"
        )
    versions = None
    if request.labels is not None:
        of_tokens = _versions(request.labels, request.oldest, labels, length, where)
        versions = torch.tensor(of_tokens, dtype=torch.int64)
    return Completion(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor([_log_prob(value, where) for value in log_probs], dtype=torch.float32),
        "stop" if at_stop or reason == "stop" else "length",
        versions,
    )


def _versions(
    by_label: Mapping[str, int], oldest: int, labels: Sequence[Label], length: int, where: str
) -> list[int]:
    versions: list[int] = []
    for label, start, end in labels:
        if not len(versions) == start <= end <= length:
            raise ValueError(
                f"{where} must name the weights that sampled each token exactly once, got "
                f"{_shown(labels)}"
            )
        version = by_label.get(label, -1)
        if version < max([oldest, *versions[-1:]]):
            raise ValueError(
                f"{where} must be sampled with this run's weights, of version {oldest} or newer, "
                f"got {_shown(label)}: the server was restarted, or others update it too"
            )
        versions += [version] * (end - start)
    if len(versions) != length:
        raise ValueError(
            f"{where} must name the weights that sampled each token exactly once, got "
            f"{_shown(labels)}"
        )
    return versions


def read_vllm_candidates(answer: Any, vocabulary: int) -> dict[int, float]:
    """Read the most likely first tokens, with their log-probs, from an answer of vLLM's
    ``/inference/v1/generate``.
    """
    path = ("choices", 0, "logprobs", "content", 0, "top_logprobs")
    where = "choices[0].logprobs.content[0].top_logprobs[]"
    candidates = {}
    for candidate in entry(list, answer, *path):
        token = _token(entry(int, candidate, "token_id", where=where), vocabulary, where)
        candidates[token] = _stated_log_prob(candidate, "logprob", where)
    return candidates


def read_sglang_candidates(answer: Any, vocabulary: int) -> dict[int, float]:
    """Read the most likely first tokens, with their log-probs, from an answer of SGLang's
    ``/generate``.
    """
    candidates = entry(list, answer, "meta_info", "output_top_logprobs", 0)
    return dict(_pair(pair, vocabulary, "meta_info.output_top_logprobs[0]") for pair in candidates)


def read_vllm_scores(
    answer: Any, tokens: list[int], start: int, top_k: int, vocabulary: int
) -> list[dict[int, float]]:
    """Read the log-probs of given tokens, and of the most likely ones at each position, from an
    answer of vLLM's ``/v1/completions``.
    """
    entries = entry(list, answer, "choices", 0, "prompt_logprobs")
    if len(entries) != len(tokens):
        raise ValueError(
            f"prompt_logprobs must have an entry for each of {len(tokens)} tokens, got "
            f"{len(entries)}"
        )
    scores = []
    for index in range(start, len(tokens)):
        where = f"prompt_logprobs[{index}]"
        likely = {
            _decimal(token, vocabulary, where): _stated_log_prob(candidate, "logprob", where)
            for token, candidate in entry(dict, entries, index, where="prompt_logprobs").items()
        }
        scores.append(_score(likely, tokens[index], top_k, where))
    return scores


def read_sglang_scores(
    answer: Any, tokens: list[int], start: int, top_k: int, vocabulary: int
) -> list[dict[int, float]]:
    """Read the log-probs of given tokens, and of the most likely ones at each position, from an
    answer of SGLang's ``/generate``.
    """
    count = len(tokens) - start
    entries = entry(list, answer, "meta_info", "input_token_logprobs")
    likely: list[Any] = [[]] * len(entries)
    if top_k:
        likely = entry(list, answer, "meta_info", "input_top_logprobs")
    # The first requested token has no log-prob.
    if len(entries) not in (count, count + 1) or len(likely) != len(entries):
        raise ValueError(
            f"there must be log-probs for each of {count} tokens, got {len(entries)} and {len(likely)}"
        )
    scores = []
    for index in range(-count, 0):
        where = f"input_token_logprobs[{index}]"
        pairs = entry(list, likely, len(likely) + index, where="input_top_logprobs")
        others = dict(_pair(pair, vocabulary, where) for pair in pairs)
        if len(others) != top_k:
            raise ValueError(f"{where} must have {top_k} likely tokens, got {_shown(pairs)}")
        token, log_prob = _pair(entries[index], vocabulary, where)
        if token != tokens[index]:
            raise ValueError(f"{where} must be of token {tokens[index]}, got {token}")
        scores.append(_score(others | {token: log_prob}, token, top_k, where))
    return scores


def _score(likely: dict[int, float], token: int, top_k: int, where: str) -> dict[int, float]:
    """Return log-probs by token, after checking that they can belong to one position."""
    if token not in likely or not max(top_k, 1) <= len(likely) <= top_k + 1:
        raise ValueError(
            f"{where} must have the log-probs of token {token} and of the {top_k} most likely "
            f"ones, got those of {_shown(sorted(likely))}"
        )
    if sum(map(math.exp, likely.values())) > 1 + TOLERANCE:
        raise ValueError(
            f"{where} must have log-probs of probabilities that sum to at most 1, got "
            f"{_shown(likely)}"
        )
    return likely


def _pair(pair: Any, vocabulary: int, where: str) -> tuple[int, float]:
    """Return token and log-prob of SGLang's [log-prob, id, text]."""
    log_prob = _stated_log_prob(pair, 0, where)
    return _token(entry(int, pair, 1, where=where), vocabulary, where), log_prob


def _stated_log_prob(container: Any, key: str | int, where: str) -> float:
    return _log_prob(entry(_NUMBER, container, key, where=where), where)


def _decimal(text: str, vocabulary: int, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(f"{where} must have token ids as keys, got {_shown(text)}")
    return _token(int(text), vocabulary, where)


def _token(value: Any, vocabulary: int, where: str) -> int:
    if type(value) is not int or not 0 <= value < vocabulary:
        raise ValueError(
            f"{where} must have token ids from 0 to {vocabulary - 1}, got {_shown(value)}"
        )
    return value


def _log_prob(value: int | float, where: str) -> float:
    if not _LEAST_LOG_PROB <= value <= TOLERANCE:  # NaN is neither
        raise ValueError(
            f"{where} must have log-probs from {_LEAST_LOG_PROB:g} to 0, got {_shown(value)}"
        )
    return float(value)


def _shown(value: Any) -> str:
    """Return the beginning of a value on one line of ASCII: a server's text may be long, or contain
    control sequences.
    """
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
