"""Check engines that report each response as soon as it is finished."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrl_grpo.generation.base import Completion, Engine, SamplingParams


def assert_each_response_is_told_when_it_ends(
    engine: Engine, prompts: Sequence[Tensor], stop: tuple[int, ...], in_order: bool = True
) -> None:
    """Check that each completion is reported once and equals the returned one; ``in_order`` of
    their ends, not all at the end.
    """
    params = SamplingParams(max_new_tokens=48, stop_token_ids=stop)
    reports: list[tuple[int, int, Completion]] = []
    groups = engine.generate(prompts, 8, params, on_finished=lambda *what: reports.append(what))
    assert {(request, number) for request, number, _ in reports} == {
        (i, n) for i in range(len(prompts)) for n in range(8)
    }
    assert len(reports) == 8 * len(prompts)
    for request, number, done in reports:
        returned = groups[request][number]
        assert done.tokens.equal(returned.tokens) and done.log_probs.equal(returned.log_probs)
        assert done.finish_reason == returned.finish_reason
    lengths = [len(done.tokens) for _, _, done in reports]
    assert not in_order or (len(set(lengths)) > 2 and sum(lengths[:4]) < sum(lengths[-4:]))
    greedy = SamplingParams(max_new_tokens=8, temperature=0, stop_token_ids=stop)
    reports.clear()
    engine.generate(prompts, 2, greedy, on_finished=lambda *what: reports.append(what))
    requests = [(i, number) for i in range(len(prompts)) for number in (0, 1)]
    assert sorted((request, number) for request, number, _ in reports) == requests
