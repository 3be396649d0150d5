"""Sequences that share beginnings of any depth, compared with one forward pass per sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.families import make_family
from tests.support.models import make_tiny_model
from tests.support.trees import (
    Tree,
    gradients,
    one_by_one,
    random_tree,
    rows_of,
    share_everything,
)
from torchrl_grpo.images import EncodedImage, ImageFile, ImageSpan
from torchrl_grpo.models import attention as attending
from torchrl_grpo.models import layout as layouts
from torchrl_grpo.models import passes
from torchrl_grpo.models.layout import packed, shared_prefixes
from torchrl_grpo.models.passes import make_passes
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer


def distinct_tokens(tree: Tree) -> int:
    """Return how many tokens are needed: each that has a scored one after it, once."""
    return len(
        {
            tuple(tokens[:end])
            for tokens, mask in tree
            for end in range(1, max((at for at, flag in enumerate(mask) if flag), default=0) + 1)
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 7}),
        ("deepseek_v3", {}),  # heads of keys and values differ
        ("lfm2", {}),
        pytest.param("qwen3_next", {}, marks=pytest.mark.nightly),
        pytest.param("jamba", {}, marks=pytest.mark.nightly),  # it starts from no states
    ],
)
def test_a_tree_has_the_log_probs_and_gradients_of_single_sequences(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_everything(monkeypatch)
    model = make_family(name, **settings)
    scorer = TokenScorer(model)
    for seed in range(2):
        tree = random_tree(seed)
        assert scorer.packs(max(len(tokens) for tokens, _ in tree))
        layout = scorer.layout(rows_of(tree))
        assert max(map(len, layout.paths)) == 3 - seed
        got = scorer.score_rows(layout)["log_prob"]
        weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(seed))
        (got * weight).sum().backward()
        of_tree = gradients(model)
        expected = one_by_one(model, tree)
        (expected * weight).sum().backward()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        for key, gradient in gradients(model).items():
            assert (of_tree[key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-5


@given(st.integers(0, 10**6))
def test_tokens_are_computed_once_if_their_prefix_is_worth_sharing(seed: int) -> None:
    tree = random_tree(seed, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "MIN_SHARED", 1)
        patch.setattr(layouts, "MAX_READERS", 10**9)
        rows = rows_of(tree)
        order, shared = shared_prefixes(rows)
        layout = packed(rows)
    assert sorted(order) == list(range(len(tree)))
    assert layout.tokens.numel() == max(1, distinct_tokens(tree))
    for (one, other), same in zip(pairwise(order), shared[1:], strict=True):
        assert tree[one][0][:same] == tree[other][0][:same]
    # Each sequence attends to its own tokens, at their positions.
    places = layout.keys.places.split(layout.lengths[1])
    seen = {tuple(layout.tokens[0, part].tolist()) for part in places}
    assert all(layout.positions[0, part].tolist() == list(range(len(part))) for part in places)
    for place, (row, at) in zip(
        layout.predictors.places.tolist(),
        zip(rows.of_scored.row.tolist(), rows.position.tolist(), strict=True),
        strict=True,
    ):
        assert layout.tokens[0, place] == tree[row][0][at - 1]
        assert any(path[:at] == tuple(tree[row][0][:at]) for path in seen)
    assert layout.tokens.numel() <= packed(rows_of(tree)).tokens.numel()


def test_only_long_prefixes_are_shared_beyond_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(common: int, own: int) -> Rows:
        """Return responses to a prompt of 4 tokens, of which two begin with the same tokens."""
        head = list(range(10, 14 + common))
        tails = [[3] * own, [4] * own, [5] * own]
        tokens = [head + tails[0], head[:4] + tails[1], head + tails[2]]
        return rows_of([(ids, [at >= 4 for at in range(len(ids))]) for ids in tokens])

    assert shared_prefixes(rows(16, 5)) == ([0, 2, 1], [0, 20, 4])
    assert shared_prefixes(rows(15, 5)) == ([0, 1, 2], [0, 4, 4])  # as they came
    assert shared_prefixes(rows(16, 257)) == ([0, 2, 1], [0, 20, 4])
    assert shared_prefixes(rows(16, 258)) == ([0, 1, 2], [0, 4, 4])


def test_attention_reads_a_prefix_in_one_call_for_all_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a plain group: one call for each sequence's own tokens, one for each prefix."""
    prompt, turn = list(range(10, 30)), list(range(30, 60))
    tokens = [
        [*prompt, *turn, 3, 3],
        [*prompt, 4, 4, 4],
        [*prompt, *turn, 5, 5, 5],
        [*prompt, 6, 6, 6],
    ]
    layout = packed(rows_of([(ids, [at >= 20 for at in range(len(ids))]) for ids in tokens]))
    assert layout.prefixes == {(0, 50): (51, 53), (0, 20): (53, 57)}
    calls, flash = [], attending._flash

    def noted(q: Tensor, k: Tensor, *args: Any, **named: Any) -> Any:
        calls.append((q.shape[2], k.shape[2]))
        return flash(q, k, *args, **named)

    monkeypatch.setattr(attending, "_flash", noted)
    query, key, value = torch.randn(3, 1, 4, 57, 8, dtype=torch.float64)
    got, _ = attending.attention(nn.Identity(), query, key, value, None, layout=layout)
    assert calls == [(51, 51), (2, 2), (2, 2), (2, 2), (2, 50), (4, 20)]
    key, value = (part.index_select(2, layout.keys.places) for part in (key, value))
    expected = attending._each_sequence(query, key, value, layout, 60, 8**-0.5, 0.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_budget_keeps_branches_together_and_changes_no_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share_everything(monkeypatch)
    scorer = TokenScorer(make_tiny_model())
    trees = [random_tree(seed, 24, sizes=(20, 40)) for seed in range(2)]
    tree = [row for rows in zip(*trees, strict=True) for row in rows]  # mixed up
    rows = rows_of(tree)
    expected = scorer.score_rows(scorer.layout(rows))["log_prob"]
    for world_size in (1, 2):
        got, computed = torch.zeros_like(expected), 0
        for rank in range(world_size):
            for each in make_passes(scorer, rows, 350, rank, world_size):
                assert each.tokens <= 350
                if len(each.index):
                    scores = scorer.score_rows(each.layout)["log_prob"]
                    got[rows.of_scored.places(each.index)] = scores
                    computed += each.layout.tokens.numel()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert distinct_tokens(tree) <= computed < 0.8 * len(rows.tokens)


def test_equal_tokens_of_another_image_are_not_shared() -> None:
    images = [
        EncodedImage(ImageFile(b""), name, torch.tensor([9] * 20), torch.ones(20).bool(), {})
        for name in ("a", "b")
    ]
    tokens = [*range(10, 30), *[9] * 20, *range(30, 50)]
    tree = [(tokens, [at > 45 for at in range(60)])] * 3
    rows = rows_of(tree)
    rows = Rows(
        rows.tokens, rows.of_tokens, rows.scored, rows.of_scored,
        [(ImageSpan(20, images[number]),) for number in (0, 1, 0)],
    )  # fmt: skip
    assert shared_prefixes(rows) == ([0, 2, 1], [0, 59, 20])
    layout = packed(rows)
    assert layout.images.images == tuple(images)
    assert layout.images.places.tolist() == [*range(20, 40), *range(59, 79)]


def test_sequences_on_both_sides_of_a_gap_share_what_all_between_share() -> None:
    assert passes._shared_of([0, 9, 4, 9], torch.tensor([0, 3])) == [0, 4]
