"""Stop strings, found in tokens: what ends a response is a text, and an engine neither reads nor
writes text.

A string may span several tokens or lie within one, and a token may be part of a character. So an
automaton (Aho and Corasick, 1975) reads the bytes that tokens stand for, and what each token does
to it is a table, made once: of a sampled token an engine looks up one number.
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
        strings: what is looked for.
        table: [S, V] int32, the state after a token. State 0 is that of a response without a token,
            the last one is the end and stays.

    Args:
        strings: texts, not empty; short ones, as each of their bytes is a state.
        tokenizer: says what the tokens stand for. Special tokens stand for their names.

    Raises:
        ValueError: the tokens that the tokenizer has for one of the strings do not stand for it.

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
            written = b"".join(
                pieces[token] for token in tokenizer(text, add_special_tokens=False)["input_ids"]
            )
            if text.encode() not in written:
                raise ValueError(
                    f"inference_model.stop={list(strings)} must have strings that the tokenizer "
                    f"can write, it writes {text!r} as {written.decode(errors='replace')!r}: use "
                    "another string."
                )

    @property
    def end(self) -> int:
        """The state of a response that has ended."""
        return len(self.table) - 1

    def completed_at(self, tokens: Sequence[int]) -> int | None:
        """Return how many of a response's tokens complete the first string, None where none does."""
        state = 0
        for number, token in enumerate(tokens, start=1):
            state = int(self.table[state, token]) if token < self.table.shape[1] else state
            if state == self.end:
                return number
        return None


def completed_at(
    strings: Sequence[str], tokens: Sequence[int], pieces: Sequence[bytes]
) -> int | None:
    """Return the same as ``StopStrings.completed_at`` without a table, for strings that are looked
    for once.

    Args:
        strings: texts, not empty.
        tokens: of the response.
        pieces: the bytes of each token (``token_bytes``).
    """
    read = [pieces[token] if token < len(pieces) else b"" for token in tokens]
    text = b"".join(read)
    ends = [text.find(stop) + len(stop) for stop in map(str.encode, strings) if stop in text]
    if not ends:
        return None
    lengths = list(accumulate(map(len, read)))
    return bisect_left(lengths, min(ends)) + 1


def ending(stop: StopStrings | None, stop_token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """Return ``StopStrings.table``, [S, vocab_size], with stop tokens that lead to the end as well.

    Args:
        stop: strings that end a response; None is none.
        stop_token_ids: those outside of the vocabulary are left out.
        vocab_size: of the model; tokens that the tokenizer does not have change no state.
    """
    states = 2 if stop is None else len(stop.table)
    table = torch.arange(states, dtype=torch.int32).unsqueeze(-1).repeat(1, vocab_size)
    if stop is not None:
        table[:, : stop.table.shape[1]] = stop.table[:, :vocab_size]
    table[:, [i for i in stop_token_ids if 0 <= i < vocab_size]] = states - 1
    return table


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes that each token stands for within a text; none for an id without a token."""
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
            pieces[token_id] = token.replace(
                "\u2581", " "
            ).encode()  # sentencepiece's sign for a space
    return pieces


def _automaton(texts: Sequence[bytes]) -> np.ndarray:
    """[S, 256] int32, the state after a byte; a state is the longest start of a text that has just
    been read.
    """
    starts = sorted({text[:length] for text in texts for length in range(len(text))}, key=len)
    number = {start: state for state, start in enumerate(starts)}
    steps = np.zeros((len(starts) + 1, 256), dtype=np.int32)
    steps[-1] = len(starts)
    for state, start in enumerate(starts):
        for byte in set(b"".join(texts)):
            read = start + bytes([byte])
            if read.endswith(tuple(texts)):
                steps[state, byte] = len(starts)
            else:
                steps[state, byte] = next(
                    number[read[i:]] for i in range(len(read) + 1) if read[i:] in number
                )
    return steps


def _table(steps: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """[S, V] int32, the state after all bytes of a token."""
    order = sorted(
        range(len(pieces)), key=lambda token: -len(pieces[token])
    )  # those that continue come first
    lengths = np.array([len(pieces[token]) for token in order])
    table = np.repeat(np.arange(len(steps), dtype=np.int32)[:, None], len(pieces), axis=1)
    for place in range(lengths.max(initial=0)):
        count = int((lengths > place).sum())
        read = np.array([pieces[token][place] for token in order[:count]])
        table[:, :count] = steps[table[:, :count], read]
    unsorted = np.empty_like(table)
    unsorted[:, order] = table
    return unsorted
