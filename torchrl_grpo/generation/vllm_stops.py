"""Stop strings for vLLM. Quick to import: each of vLLM's processes does, see ``watch_for_stops``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_grpo.generation.stops import StopStrings

STOP = "stop_strings"
"""Key of a request's stop strings in the ``extra_args`` of its sampling parameters."""


def watch_for_stops(
    processor: Any = None, stops: Mapping[tuple[str, ...], StopStrings] | None = None
) -> None:
    """Make vLLM end each sample with the token that completes a stop string.

    vLLM searches for stop strings in text, for which it would need a tokenizer. Its
    ``OutputProcessor`` asks each sample's detokenizer whether new tokens end the sample, and
    reports that to the scheduler. Here, a ``_Reader`` answers in place of the detokenizer.

    This is an entry point of ``vllm.general_plugins``, so vLLM calls it in each of its processes. A
    processor that was not named has a tokenizer, and vLLM searches in text there. Engines call it
    as well, because a checkout has no entry points.

    Args:
        processor: vLLM's ``OutputProcessor``.
        stops: the stop strings, by the value that requests have under ``STOP``; it may grow.
    """
    if processor is not None:
        setattr(processor, STOP, stops)
    kind = import_module("vllm.v1.engine.output_processor").OutputProcessor
    add = kind.add_request
    if add.__module__ == __name__:
        return

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        strings = (getattr(request.sampling_params, "extra_args", None) or {}).get(STOP)
        known = getattr(self, STOP, None)
        if strings and known is None:
            request.sampling_params.stop = strings
        add(self, request, *args, **kwargs)
        if strings and known is not None:
            reader = self.request_states[request.request_id].detokenizer
            reader.update = _Reader(reader.token_ids, known[tuple(strings)]).update

    kind.add_request = add_request


class _Reader:
    """Reads the tokens of one sample.

    Args:
        token_ids: vLLM's list of the sample's tokens.
        stop: the strings that end the sample.
    """

    def __init__(self, token_ids: list[int], stop: StopStrings) -> None:
        self._token_ids = token_ids
        self._after = stop.table.numpy()
        self._end = stop.end
        self._state = 0

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool) -> str | None:
        """Append new tokens, up to one that ends the sample; return None if it continues."""
        for token in new_token_ids:
            self._token_ids.append(token)
            if token < self._after.shape[1]:  # the model may have more tokens than the tokenizer
                self._state = self._after[self._state, token]
            if self._state == self._end:
                return STOP
        return None
