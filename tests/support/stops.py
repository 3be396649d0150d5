"""Stop strings by their definition, and a tokenizer whose tokens have one to three bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from torchrl_grpo.generation.base import Engine, SamplingParams
from torchrl_grpo.generation.stops import StopStrings

LETTERS = "abcdefghijkl"
SPECIAL = ["<|pad|>", "<|end|>", "<|x|>", "<|y|>", "<|z|>"]


def make_merged_tokenizer() -> tuple[PreTrainedTokenizerFast, list[bytes]]:
    """Return a byte-level tokenizer of 261 tokens, and the text of each: ASCII, halves of é, and
    merged letters.
    """
    singles = [*"".join(map(chr, range(33, 127))), "Ġ", "Ċ", "Ã", "©"]
    pairs = [(first, second) for first in LETTERS for second in LETTERS]
    triples = [("ab", letter) for letter in LETTERS] + [("cd", "e"), ("cd", "f")]
    merges = [*pairs, *triples]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *singles, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    pieces = [
        *(text.encode() for text in SPECIAL),
        *(bytes([byte]) for byte in (*range(33, 127), 32, 10, 0xC3, 0xA9)),
    ]
    pieces += [a.encode() + b.encode() for a, b in merges]
    assert len(pieces) == 261
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>"
    ), pieces


def first_end(tokens: Sequence[int], pieces: Sequence[bytes], strings: Sequence[str]) -> int | None:
    """Return the number of tokens at which the first stop string is complete."""
    for length in range(1, len(tokens) + 1):
        text = b"".join(pieces[token] for token in tokens[:length])
        if any(string.encode() in text for string in strings):
            return length
    return None


def assert_stop_strings_end_responses(
    engine: Engine, prompts: Sequence[Tensor], repeats: bool = True
) -> None:
    """Check a string that spans two tokens, one within a token, and one that never occurs.

    ``repeats`` says that the engine draws the same tokens again from the same seed, so that all
    kinds of ends occur.
    """
    tokenizer, pieces = make_merged_tokenizer()
    engine.seed(0)
    params = SamplingParams(24, temperature=2.0)
    free = engine.generate(prompts, 8, params)
    rows = [done.tokens.tolist() for group in free for done in group]
    # The string spans the two tokens; the one within a token has more text after it.
    a, b = next((a, b) for row in rows for a, b in pairwise(row) if a > 4 < b and a < 99 > b)
    longer = next(token for row in rows for token in row if len(pieces[token]) > 1 and token > 4)
    for strings, many in (
        ([(pieces[a] + pieces[b]).decode()], False),
        ([pieces[longer][:1].decode(), "é"], True),
    ):
        ends_there = replace(params, stop=StopStrings(strings, tokenizer))
        reports = []
        engine.seed(0)
        groups = engine.generate(
            prompts, 8, ends_there, on_finished=lambda *what, reports=reports: reports.append(what)
        )
        ended, beyond = 0, 0
        for done in (done for group in groups for done in group):
            tokens = done.tokens.tolist()
            end = first_end(tokens, pieces, strings)
            assert (len(tokens), done.finish_reason) == (
                (24, "length") if end is None else (end, "stop")
            )
            assert len(done.log_probs) == len(tokens)
            ended += end is not None
            beyond += end is not None and not pieces[tokens[-1]].endswith(strings[0].encode())
        assert len(reports) == len(rows)
        if repeats:
            assert (ended > len(rows) // 2 and beyond > 0) if many else ended > 0
    # The tokens up to the stop string are those of a run without it.
    greedy = SamplingParams(24, temperature=0)
    [[whole]] = engine.generate(prompts[:1], 1, greedy)
    string = next(
        pieces[token].decode() for token in whole.tokens.tolist()[3:] if pieces[token].isascii()
    )
    cut = StopStrings([string], tokenizer)
    [[part]] = engine.generate(prompts[:1], 1, replace(greedy, stop=cut))
    end = first_end(whole.tokens.tolist(), pieces, [string])
    assert (
        end is not None
        and part.finish_reason == "stop"
        and torch.equal(part.tokens, whole.tokens[:end])
    )
    torch.testing.assert_close(part.log_probs, whole.log_probs[:end], rtol=0, atol=1e-5)
