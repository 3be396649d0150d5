"""Stop strings, found in tokens: engines neither read nor write text.

A string may span several tokens or be inside one, and a token may be part of a character. So an
automaton (Aho and Corasick, 1975) reads the bytes of the tokens. Its transitions for whole tokens
are a table that is made once; for each sampled token, an engine looks up one number.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode


class StopStrings:
    """Ends a response with the token that completes one of some strings.

    Attributes:
        strings: the stop strings.
        table: [S, V] int32, the state after a token. State 0 means an empty response; the last
            state is the end, and stays.

    Args:
        strings: texts, not empty; keep them short, as each of their bytes is a state.
        tokenizer: maps tokens to bytes. Special tokens stand for their names.

    Raises:
        ValueError: the tokenizer cannot write one of the strings.

    Examples:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_grpo.starter import starter_path
        >>> tokenizer = AutoTokenizer.from_pretrained(starter_path())
        >>> stop, state = StopStrings(["2+2"], tokenizer), 0
        >>> for token in tokenizer("12+2", add_special_tokens=False)["input_ids"]:
        ...     state = stop.table[state, token].item()
        >>> state == stop.end
        True
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings = tuple(strings)
        pieces = token_bytes(tokenizer)
        self.table = torch.from_numpy(
            _table(_automaton([text.encode() for text in strings]), pieces)
        )
        for text in self.strings:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            round_trip = b"".join(pieces[token] for token in tokens)
            if text.encode() not in round_trip:
                raise ValueError(
                    f"inference_model.stop={list(strings)} must have strings that the tokenizer "
                    f"can write, but it writes {text!r} as "
                    f"{round_trip.decode(errors='replace')!r}: use another string."
                )

    @property
    def end(self) -> int:
        """The state of a response that has ended."""
        return len(self.table) - 1

    def completed_at(self, tokens: Sequence[int]) -> int | None:
        """Return how many of a response's tokens complete the first string; None if none is
        complete.
        """
        state = 0
        for number, token in enumerate(tokens, start=1):
            state = int(self.table[state, token]) if token < self.table.shape[1] else state
            if state == self.end:
                return number
        return None


def completed_at(
    strings: Sequence[str], tokens: Sequence[int], pieces: Sequence[bytes]
) -> int | None:
    """Return the same as ``StopStrings.completed_at`` without a table, for a single search.

    Args:
        strings: texts, not empty.
        tokens: of the response.
        pieces: the bytes of each token (``token_bytes``).
    """
    of_tokens = [pieces[token] if token < len(pieces) else b"" for token in tokens]
    text = b"".join(of_tokens)
    ends = [text.find(stop) + len(stop) for stop in map(str.encode, strings) if stop in text]
    if not ends:
        return None
    lengths = list(accumulate(map(len, of_tokens)))
    return bisect_left(lengths, min(ends)) + 1


def ending(stop: StopStrings | None, stop_token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """Return ``StopStrings.table``, [S, vocab_size], in which stop tokens lead to the end too.

    Args:
        stop: strings that end a response; None for no strings.
        stop_token_ids: ids outside the vocabulary are ignored.
        vocab_size: of the model; tokens that the tokenizer lacks change no state.
    """
    states = 2 if stop is None else len(stop.table)
    table = torch.arange(states, dtype=torch.int32).unsqueeze(-1).repeat(1, vocab_size)
    if stop is not None:
        table[:, : stop.table.shape[1]] = stop.table[:, :vocab_size]
    table[:, [i for i in stop_token_ids if 0 <= i < vocab_size]] = states - 1
    return table


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes that each token stands for; ids without a token have no bytes."""
    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder: Any = json.loads(backend.to_str())["decoder"] if backend is not None else None
    kinds = (
        {}
        if decoder is None
        else {part["type"]: part for part in [decoder, *decoder.get("decoders", ())]}
    )
    pieces = [b""] * (max([*tokenizer.get_vocab().values(), *added]) + 1)
    in_bytes = {character: byte for byte, character in bytes_to_unicode().items()}
    for token, token_id in tokenizer.get_vocab().items():
        if token_id in added:
            pieces[token_id] = added[token_id].encode()
        elif "ByteLevel" in kinds and all(character in in_bytes for character in token):
            pieces[token_id] = bytes(in_bytes[character] for character in token)
        elif "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x"):
            pieces[token_id] = bytes.fromhex(token[3:5])
        else:
            # sentencepiece's sign for a space
            pieces[token_id] = token.replace("\u2581", " ").encode()
    return pieces


def _automaton(texts: Sequence[bytes]) -> np.ndarray:
    """Return [S, 256] int32, the state after a byte; a state is the longest prefix of a text that
    the bytes so far end with.
    """
    starts = sorted({text[:length] for text in texts for length in range(len(text))}, key=len)
    number = {start: state for state, start in enumerate(starts)}
    steps = np.zeros((len(starts) + 1, 256), dtype=np.int32)
    steps[-1] = len(starts)
    for state, start in enumerate(starts):
        for byte in set(b"".join(texts)):
            suffix = start + bytes([byte])
            if suffix.endswith(tuple(texts)):
                steps[state, byte] = len(starts)
            else:
                steps[state, byte] = next(
                    number[suffix[i:]] for i in range(len(suffix) + 1) if suffix[i:] in number
                )
    return steps


def _table(steps: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """Return [S, V] int32, the state after all bytes of a token."""
    # Longest first, so that the tokens with a byte at some position are a slice.
    order = sorted(range(len(pieces)), key=lambda token: -len(pieces[token]))
    lengths = np.array([len(pieces[token]) for token in order])
    table = np.repeat(np.arange(len(steps), dtype=np.int32)[:, None], len(pieces), axis=1)
    for place in range(lengths.max(initial=0)):
        count = int((lengths > place).sum())
        column = np.array([pieces[token][place] for token in order[:count]])
        table[:, :count] = steps[table[:, :count], column]
    unsorted = np.empty_like(table)
    unsorted[:, order] = table
    return unsorted
