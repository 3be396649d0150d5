"""Stop strings: the table of each token's effect on them, and the engine that ends responses with
it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.support.models import make_tiny_model
from tests.support.stops import (
    LETTERS,
    assert_stop_strings_end_responses,
    first_end,
    make_merged_tokenizer,
)
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.generation.decoder import GenericDecoder
from torchrl_grpo.generation.stops import StopStrings, completed_at, ending, token_bytes


def make_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: spaces are a special sign, and characters without a token
    are written in bytes.
    """
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
    ]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_tokens_stand_for_their_bytes():
    tokenizer, pieces = make_merged_tokenizer()
    assert token_bytes(tokenizer) == pieces
    of_llama = token_bytes(make_sentencepiece_tokenizer())
    assert of_llama[2:5] == [b"</s>", b"\x00", b"\x01"] and of_llama[-1] == b" ab"
    written = make_sentencepiece_tokenizer()("b é ab", add_special_tokens=False)["input_ids"]
    assert b"".join(of_llama[token] for token in written) == "b é ab".encode()


@pytest.mark.parametrize(
    "strings",
    [
        ["a"],
        ["aab", "b\n"],
        ["abab", "ba"],
        ["é"],
        ["cdcdcd", "dcdce"],
        ["<|x|>", "x|>a"],
        ["aaaa", "aa é"],
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_string(strings):
    tokenizer, pieces = make_merged_tokenizer()
    stop = StopStrings(strings, tokenizer)
    draw = random.Random(0)
    alphabet = {byte for string in strings for byte in string.encode()}
    likely = [i for i, piece in enumerate(pieces) if set(piece) <= alphabet] + [
        pieces.index(b"a"),
        2,
    ]
    ends = 0
    for _ in range(300):
        tokens = draw.choices(likely, k=12)
        state, length = 0, None
        for place, token in enumerate(tokens):
            state = int(stop.table[state, token])
            length = place + 1 if length is None and state == stop.end else length
        assert length == first_end(tokens, pieces, strings)
        assert stop.completed_at(tokens) == completed_at(strings, tokens, pieces) == length
        assert (state == stop.end) == (length is not None)  # an end stays an end
        ends += length is not None
    assert ends > 10


def test_stop_tokens_end_a_response_too_and_unknown_tokens_do_not():
    tokenizer, pieces = make_merged_tokenizer()
    stop = StopStrings(["ab"], tokenizer)
    table = ending(stop, (1, 999, -1), 300)  # the model has more tokens than the tokenizer
    assert table.shape == (3, 300)
    assert table[:, 1].tolist() == [2, 2, 2]
    assert table[:, 280].tolist() == [0, 1, 2]
    assert table[:, pieces.index(b"a")].tolist() == [1, 1, 2]
    assert table[:, pieces.index(b"b")].tolist() == [0, 2, 2]
    assert table[:, pieces.index(b"lb")].tolist() == [0, 0, 2]
    assert ending(None, (1,), 3).tolist() == [[0, 1, 0], [1, 1, 1]]
    assert torch.equal(ending(stop, (), 200), stop.table[:, :200])


def test_a_string_that_the_tokenizer_cannot_write_is_refused():
    tokenizer, _ = make_merged_tokenizer()
    with pytest.raises(ValueError, match=r"inference_model\.stop=\['ü'\] must"):
        StopStrings(["ü"], tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("generic", [False, True])
def test_the_engine_ends_responses_at_stop_strings(generic):
    engine = TransformersEngine(make_tiny_model(initializer_range=0.05))
    if generic:
        engine.decoder = GenericDecoder(engine.model)
    assert_stop_strings_end_responses(
        engine, [torch.arange(20, 30), torch.arange(40, 47), torch.arange(5, 25)]
    )


def test_until_its_end_a_response_is_drawn_as_without_stop_strings():
    engine, (tokenizer, pieces) = (
        TransformersEngine(make_tiny_model(initializer_range=0.05)),
        make_merged_tokenizer(),
    )
    prompts = [torch.arange(20, 30), torch.arange(40, 47)]
    params = SamplingParams(32, temperature=0.9)
    engine.seed(1)
    free = engine.generate(prompts, 16, params)
    engine.seed(1)
    stop = StopStrings([*LETTERS[:4], "<|y|>"], tokenizer)
    cut = engine.generate(prompts, 16, replace(params, stop=stop, stop_token_ids=(1, 3)))
    reasons = []
    for whole, part in (
        (w, p) for ws, ps in zip(free, cut, strict=True) for w, p in zip(ws, ps, strict=True)
    ):
        tokens = whole.tokens.tolist()
        ends = [
            first_end(tokens, pieces, stop.strings),
            *(tokens.index(i) + 1 for i in (1, 3) if i in tokens),
        ]
        length = min([end for end in ends if end is not None], default=32)
        assert part.tokens.tolist() == tokens[:length]
        assert torch.equal(part.log_probs, whole.log_probs[:length])
        reasons.append(part.finish_reason)
    assert reasons.count("stop") > 20
