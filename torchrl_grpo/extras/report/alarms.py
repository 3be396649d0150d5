"""Alarms: signs in ``metrics.jsonl`` that a run does not learn, each as one line with a remedy.

They read only what a run writes, so that a report made later shows the same alarms. Imports nothing
heavy. docs/troubleshooting.md has a row for each name.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

from torchrl_grpo.reporting.signal import Signal, no_signal

Row = Mapping[str, Any]
NamedTexts = Iterator[tuple[str, str]]
"""Names and texts of alarms; a name is a row's name in the docs and, after a slash, its subject.
"""

_FEW, _SOME, _MANY = 5, 10, 20
"""Numbers of steps for which a condition must hold."""
_QUIET = 20
"""Number of steps without the condition after which an alarm is raised again."""

_ZERO_VARIANCE, _SOLVED, _HALF_SOLVED = 0.9, 0.9, 0.5
_INVALID, _TRUNCATED, _REPEATED, _CLIPPED = 0.1, 0.5, 0.8, 0.4
_ESS, _RATIO, _KL_TO_INFERENCE = 0.5, 0.1, 0.05
_MORE_TRUNCATED = 0.3  # increase over the first steps
_KL_TO_REF = 1.0
_ENTROPY, _LENGTH = 0.1, 2.0  # relative to the first steps
_RESTARTS = 3
_CLEAR = 4.0  # change in standard errors
_LENGTH_PAYS, _LONGER = 0.7, 1.25  # correlation, and length relative to the first steps
_PENALTIES = tuple(f"train/loss_{name}" for name in ("kl_to_ref", "kl_to_inference", "entropy"))
"""Terms of the loss that need no reward."""
MOSTLY_INVALID = 0.5
"""Share of invalid rewards above which the accuracy of valid rewards is ignored."""

_TEST = "eval/pass@1"
_NONE = "rewards/invalid_none"
_INVALID_CAUSES = {
    "exception": "raised an exception",
    "not_finite": "not finite",
    "none": "no reward applies",
    "timeout": "timed out",
    "crash": "crashed the worker",
    "lost": "lost with its worker",
    "import": "imported a missing package",
}


@dataclass
class Alarm:
    """One alarm, with the first and the last step of its condition."""

    name: str
    text: str
    first: int
    last: int


class Alarms:
    """Watches the steps of a run.

    Lifecycle: ``take`` for each row in the order of the steps, ``end`` after the last one.

    Attributes:
        raised: all alarms, in order.

    Examples:
        >>> alarms = Alarms()
        >>> for step in range(1, 6):
        ...     found = alarms.take({"step": step, "rollout/sequences": 8, "rollout/truncated": 0.75})
        >>> [(alarm.name, alarm.first) for alarm in found]
        [('truncated', 5)]
    """

    def __init__(self) -> None:
        self.raised: list[Alarm] = []
        self._signal = Signal()
        self._last: deque[Row] = deque(maxlen=_MANY)
        self._first: list[Row] = []
        self._tests: list[tuple[Row, Sequence[Row]]] = []  # with the steps before each
        self._latest: dict[str, Alarm] = {}

    def take(self, row: Row) -> list[Alarm]:
        """Return the alarms that a step raises, without those that were already raised."""
        is_trained = "rollout/sequences" in row
        if is_trained:
            self._last.append(row)
        if finite(row, _TEST) is not None:
            self._tests.append((row, list(self._last)[-_SOME:] or self._first))
        if not is_trained:  # an evaluation before training
            return []
        if len(self._first) < _FEW:
            self._first.append(row)
        self._signal.take(row)
        last = list(self._last)
        rules = _OF_DEMONSTRATIONS if _is_demonstrations(row) else _RULES
        alarms = [alarm for rule in rules for alarm in rule(last, self._first)]
        return self._raise([*alarms, *_test_falls(self._tests)])

    def end(self) -> list[Alarm]:
        """Return the alarms at the end of a run that had no signal at all, if it had fewer steps
        than the rules require.
        """
        steps = self._signal.steps
        if not steps or self._signal.steps_without_signal < steps or steps >= _FEW:
            return []
        return self._raise(_without_signal(list(self._last), steps))

    def _raise(self, alarms: Iterable[tuple[str, str]]) -> list[Alarm]:
        step = int(self._last[-1]["step"])
        new = []
        for name, text in alarms:
            latest = self._latest.get(name)
            if latest is not None and step - latest.last <= _QUIET:
                latest.last = step
                continue
            self._latest[name] = Alarm(name, text, step, step)
            new.append(self._latest[name])
        self.raised += new
        return new


def alarms_of(rows: Iterable[Row], *, ended: bool = True) -> list[Alarm]:
    """Return the alarms of a run with these rows, one per step."""
    alarms = Alarms()
    for row in rows:
        alarms.take(row)
    if ended:
        alarms.end()
    return alarms.raised


def _is_demonstrations(row: Row) -> bool:
    """Return whether a step trained only on demonstrations, which have no reward."""
    return "train/loss" in row and "rollout/reward_mean" not in row


def finite(row: Row, name: str) -> float | None:
    """Return a number of a row; None if it is not finite, as in the file."""
    value = row.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def _mean(rows: Sequence[Row], name: str, steps: int) -> float | None:
    """Return the mean of a metric over the latest steps; None if a step lacks it."""
    values = [value for row in rows[-steps:] if (value := finite(row, name)) is not None]
    return fmean(values) if len(values) == steps else None


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"


def _invalid_shares(rows: Sequence[Row], steps: int) -> list[float]:
    """Return the share of invalid rewards in each of the latest steps."""
    return [
        (finite(row, "rollout/invalid") or 0.0) / (finite(row, "rollout/sequences") or 1.0)
        for row in rows[-steps:]
    ]


def _signal(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    if len(rows) >= _FEW and all(no_signal(row) for row in rows[-_FEW:]):
        yield from _without_signal(rows, _FEW)
        return
    equal, accuracy = (
        _mean(rows, f"rollout/{name}", _SOME) for name in ("zero_variance_groups", "accuracy")
    )
    if fmean(_invalid_shares(rows, _SOME)) > MOSTLY_INVALID:
        return  # the rule for invalid rewards reports it
    if equal is not None and equal >= _ZERO_VARIANCE and (accuracy or 0.0) < _SOLVED:
        yield (
            "zero_variance",
            f"all rewards were equal in {_share(equal)} of the groups over {_SOME} steps, which "
            "gives no signal: use policy.dynamic_sampling=true, "
            "env.difficulty_filter=[0.05,0.95], a larger env.repeats, or easier problems",
        )


def _without_signal(rows: Sequence[Row], steps: int) -> NamedTexts:
    """Yield the alarm for rewards that were equal or invalid in every group for ``steps`` steps."""
    rows = rows[-steps:]
    last = rows[-1]
    when = f"{steps} steps" if steps > 1 else "the only step"
    if fmean(_invalid_shares(rows, steps)) > MOSTLY_INVALID:
        yield from _invalid_rewards(rows, steps)
        return
    penalties = [name for name in _PENALTIES if name in last]
    learned = f"all that trains is {' and '.join(penalties)}" if penalties else "nothing is learned"
    if all(
        finite(row, "rollout/reward_mean") == 0 == finite(row, "rollout/reward_std") for row in rows
    ):
        truncated = finite(last, "rollout/truncated") or 0.0
        hint = (
            ""
            if truncated < _TRUNCATED
            else (f"; {_share(truncated)} were truncated: raise {_limits(last)}")
        )
        yield (
            "zero_rewards",
            f"all rewards were 0 over {when}, so {learned}: read the responses (python -m "
            "torchrl_grpo samples DIR), and check that the prompt has the model's training format "
            f"and asks for the format that the reward expects{hint}",
        )
    elif (finite(last, "rollout/accuracy") or 0.0) >= _SOLVED and not any(
        _invalid_shares(rows, steps)
    ):
        yield (
            "no_signal",
            f"all rewards of each group were equal over {when}, because the problems are solved: "
            "stop, or use harder ones",
        )
    else:
        yield (
            "no_signal",
            f"all rewards of each group were equal over {when}, so {learned}: use a reward that "
            "ranks better responses higher, easier or harder problems, or a larger env.repeats or "
            "inference_model.temperature",
        )


def _invalid(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    shares = _invalid_shares(rows, _FEW)
    if shares[-1] == 1:
        yield from _invalid_rewards(rows, 1)
    elif len(shares) == _FEW and fmean(shares) >= _INVALID:
        yield from _invalid_rewards(rows, _FEW)
    elif shares[-1] >= _INVALID and finite(rows[-1], _NONE):
        yield from _invalid_rewards(rows, 1)


def _invalid_rewards(rows: Sequence[Row], steps: int) -> NamedTexts:
    causes = [
        name.partition("invalid_")[2] for name in rows[-1] if name.startswith("rewards/invalid_")
    ]
    why = f" ({', '.join(map(invalid_cause, causes))})" if causes else ""
    share = _share(fmean(_invalid_shares(rows, steps)))
    fix = (
        "the log has the first error of each kind; call the reward function yourself on a row of "
        "samples.jsonl"
    )
    if finite(rows[-1], _NONE):
        fix = "if the reward function returned None for a wrong response, return 0.0 there"
    yield (
        "invalid_rewards",
        f"{share} of the rewards are invalid{why}, and their responses are left out of training: "
        f"{fix}",
    )


def invalid_cause(cause: str) -> str:
    """Describe why a reward is invalid, from the end of its metric's name.

    >>> invalid_cause("not_finite"), invalid_cause("exception")
    ('not finite', 'raised an exception')
    """
    return _INVALID_CAUSES.get(cause, cause.replace("_", " "))


def _parts(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    if len(rows) < _MANY:
        return
    for metric in rows[-1]:
        if not (metric.startswith("reward/") and metric.endswith("/none")):
            continue
        name = metric.removeprefix("reward/").removesuffix("/none")
        never = all(finite(row, metric) == 1 for row in rows)
        values = [row.get(f"reward/{name}/{kind}", 0.0) for row in rows for kind in ("mean", "std")]
        if never or all(value == 0 for value in values):
            what = "applied to no response" if never else "was 0 for every response"
            yield (
                f"reward_part/{name}",
                f"the reward component {name!r} {what} over {_MANY} steps, so it gives no signal: "
                "check in samples.jsonl what it looks for, or remove it (a penalty that never "
                "applies is fine)",
            )


def _mismatch(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    kl, ratio = (
        _mean(rows, f"train/{name}", _FEW) for name in ("kl_k3_to_inference", "ratio_mean")
    )
    is_far = kl is not None and kl > _KL_TO_INFERENCE
    if is_far or (ratio is not None and abs(ratio - 1) > _RATIO):
        yield (
            "mismatch",
            f"the trained policy is far from the one that sampled (KL {kl or 0:.2g} nats per "
            f"token, mean ratio {1 if ratio is None else ratio:.3g}) over {_FEW} steps: "
            "if so from the first step on, inference_model.dtype=float32 or a correction "
            "(docs/corrections.md); otherwise fewer optimizer steps per batch, or a lower "
            "optimizer.lr or train.max_staleness",
        )


def _ess(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    ess = _mean(rows, "train/ESS", _FEW)
    if ess is not None and ess < _ESS:
        yield (
            "ess",
            f"the effective sample size is {_share(ess)} over {_FEW} steps, so a few tokens "
            "dominate the gradient: lower optimizer.lr, train.epochs or train.max_staleness, or "
            "use policy.behaviour_weight=truncate",
        )


def _clip(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    shares = [_mean(rows, f"train/clip_fraction_{side}", _FEW) for side in ("low", "high")]
    clipped = sum(share or 0.0 for share in shares)
    if clipped > _CLIPPED:
        yield (
            "clip_fraction",
            f"{_share(clipped)} of the tokens are clipped over {_FEW} steps, so much of each batch "
            "is wasted: lower optimizer.lr or train.epochs, use larger optimizer batches, or "
            "widen policy.clip_epsilon",
        )


def _entropy(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    before, now, accuracy = (
        _mean(first, "train/entropy", _FEW),
        _mean(rows, "train/entropy", _SOME),
        _mean(rows, "rollout/accuracy", _SOME),
    )
    if before and now is not None and now < _ENTROPY * before and (accuracy or 0.0) < _SOLVED:
        yield (
            "entropy",
            f"the entropy fell to {now:.2g} nats per token, {_share(now / before)} of what it was, "
            "before the problems are solved: use policy.clip_epsilon=[0.2,0.28], "
            "policy.entropy_coef=0.001 or lower optimizer.lr",
        )


def _truncation(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    truncated, when = _cut_share(rows)
    if truncated > _TRUNCATED:
        yield (
            "truncated",
            f"{_share(truncated)} of the responses were truncated {when}: raise "
            f"{_limits(rows[-1])}, or check that the model ends its turn (chat template, stop "
            "tokens); policy.overlong_buffer=0.2 teaches it",
        )


def _cut_demonstrations(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    cut, when = _cut_share(rows)
    if cut > _TRUNCATED:
        yield (
            "truncated",
            f"{_share(cut)} of the demonstrations were cut {when}, so their ends are not learned: "
            "raise inference_model.max_new_tokens and inference_model.max_model_len",
        )


def _cut_share(rows: Sequence[Row]) -> tuple[float, str]:
    """Return the share of truncated responses, over several steps or, if all were, in the latest,
    and when that was.
    """
    if finite(rows[-1], "rollout/truncated") == 1:
        return 1.0, f"at step {rows[-1]['step']}"
    return _mean(rows, "rollout/truncated", _FEW) or 0.0, f"over {_FEW} steps"


def _truncation_pays(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    before, now = _mean(first, "rollout/truncated", _FEW), _mean(rows, "rollout/truncated", _FEW)
    reward, better = (
        _mean(first, "rollout/reward_mean", _FEW),
        _mean(rows, "rollout/reward_mean", _FEW),
    )
    if before is None or now is None or reward is None or better is None:
        return
    if now > before + _MORE_TRUNCATED and better > reward:
        yield (
            "truncation_pays",
            f"truncated responses rose from {_share(before)} to {_share(now)} and the reward from "
            f"{reward:.2g} to {better:.2g}: the policy may learn to be cut off; give such a "
            "response the least reward (a text game by step(response, truncated), a function by "
            "finish_reason), or use policy.mask_truncated=true",
        )


def _shift(before: Sequence[Row], now: Sequence[Row], name: str) -> float:
    """Return the change of a metric's mean in standard errors; 0 if there are too few steps."""
    old, new = (
        [value for row in rows if (value := finite(row, name)) is not None]
        for rows in (before, now)
    )
    if min(len(old), len(new)) < _FEW:
        return 0.0
    error = math.sqrt(variance(old) / len(old) + variance(new) / len(new))
    return (fmean(new) - fmean(old)) / max(error, 1e-6)


def _part_pays(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    if len(rows) < _FEW + _SOME:
        return
    names = [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]
    shifts = {
        name.removeprefix("reward/").removesuffix("/mean"): _shift(first, rows[-_SOME:], name)
        for name in names
    }
    rising = [name for name, shift in shifts.items() if shift > _CLEAR]
    falling = [name for name, shift in shifts.items() if shift < -_CLEAR]
    solves_more = _shift(first, rows[-_SOME:], "rollout/accuracy") > _CLEAR
    if len(rising) == 1 and falling and not solves_more:
        yield (
            f"part_pays/{rising[0]}",
            f"the reward component {rising[0]!r} rose since the first steps while "
            f"{' and '.join(map(repr, falling))} fell, and no more problems are solved: read the "
            "responses with its highest values; reduce its weight, cap it, or give it only for "
            "correct responses",
        )


def _length_pays(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    correlation = _mean(rows, "rollout/length_correlation", _SOME)
    before, now = (
        _mean(first, "rollout/response_length", _FEW),
        _mean(rows, "rollout/response_length", _SOME),
    )
    if correlation is None or not before or now is None:
        return
    pays = correlation > _LENGTH_PAYS and now > _LONGER * before
    if pays and _shift(first, rows[-_SOME:], "rollout/reward_mean") > _CLEAR:
        yield (
            "length_pays",
            f"length explains {_share(correlation**2)} of the variance of the rewards over {_SOME} "
            f"steps, and responses grew from {before:.0f} to {now:.0f} tokens: check that the "
            "reward does not count words or steps; policy.overlong_buffer=0.2 makes length cost",
        )


def _test_falls(tests: Sequence[tuple[Row, Sequence[Row]]]) -> NamedTexts:
    """Yield the alarm for a test accuracy whose interval is below that of the best evaluation, at
    two evaluations in a row or, if there are only two, at the last one.
    """
    if len(tests) < 2:
        return
    late = tests[1:][-2:]
    best, before = max(tests[: -len(late)], key=lambda test: test[0][_TEST])
    latest, now = tests[-1]
    low = finite(best, "eval/ci_low_pass@1") or 0.0
    if any((finite(row, "eval/ci_high_pass@1") or 1.0) >= low for row, _ in late):
        return
    if _shift(before, now, "rollout/reward_mean") > _CLEAR:
        yield (
            "test_falls",
            f"the reward in training rose since step {best['step']} while the test accuracy fell "
            f"from {_share(best[_TEST])} to {_share(latest[_TEST])}: the reward is satisfied "
            "without solving the problems, or the training problems are memorized; compare the "
            "responses (python -m torchrl_grpo samples DIR --compare), and keep the best "
            "checkpoint (train.keep_checkpoints)",
        )


def _limits(row: Row) -> str:
    """Return the limits that cut a response; with tools a dialog that ends with a call counts as
    cut too.
    """
    tools = ", env.max_turns if dialogs end with a call" if "tools/calls" in row else ""
    return f"inference_model.max_new_tokens{tools}"


def _length(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    before, now = (
        _mean(first, "rollout/response_length", _FEW),
        _mean(rows, "rollout/response_length", _SOME),
    )
    reward, better = (
        _mean(first, "rollout/reward_mean", _FEW),
        _mean(rows, "rollout/reward_mean", _SOME),
    )
    if before and now is not None and now > _LENGTH * before and (better or 0.0) <= (reward or 0.0):
        yield (
            "length",
            f"responses grew from {before:.0f} to {now:.0f} tokens and the reward did not: use "
            "policy.overlong_buffer=0.2, policy.aggregation=constant, or a lower "
            "inference_model.max_new_tokens",
        )


def _kl(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    kl = _mean(rows, "train/kl_k3_to_ref", _FEW)
    if kl is not None and kl > _KL_TO_REF:
        yield (
            "kl",
            f"the KL to the reference model is {kl:.2g} nats per token over {_FEW} steps, so the "
            "policy has drifted far from it: lower optimizer.lr, raise policy.kl_coef, or set "
            "ref_model.refresh_every",
        )


def _repeated(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    repeated, accuracy = (_mean(rows, f"rollout/{name}", _FEW) for name in ("repeated", "accuracy"))
    if repeated is not None and repeated > _REPEATED and (accuracy or 0.0) < _HALF_SOLVED:
        yield (
            "repeated",
            f"{_share(repeated)} of the responses duplicate another one in their group over {_FEW} "
            "steps: raise inference_model.temperature, or lower optimizer.lr; if it began at step "
            "1, check the engine's seeds",
        )


def _staleness(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    ages = [[finite(row, f"staleness/{name}") or 0.0 for name in ("mean", "max")] for row in rows]
    oldest = max(maximum for _, maximum in ages)
    if len(ages) == _MANY and oldest >= 2 and all(mean >= 0.95 * oldest for mean, _ in ages):
        yield (
            "staleness",
            f"every group is {oldest:.0f} steps old when it is trained on, as old as "
            f"train.max_staleness allows, over {_MANY} steps: the samplers wait for the learner; "
            "give it more devices, or lower train.max_staleness",
        )


def _restarts(rows: Sequence[Row], first: Sequence[Row]) -> NamedTexts:
    kinds = {"rollout": "sampler", "reference": "reference model", "reward": "reward worker"}
    for kind, name in kinds.items():
        counts = [finite(row, f"workers/restarts_{kind}") or 0.0 for row in rows]
        counts = counts if len(counts) == _MANY else [0.0, *counts]
        if sum(later > earlier for earlier, later in pairwise(counts)) >= _RESTARTS:
            yield (
                f"restarts/{kind}",
                f"a {name} was restarted {counts[-1] - counts[0]:.0f} times within {len(rows)} "
                "steps: the log says why it ended; often it is out of memory (env.num_envs, "
                "inference_model.gpu_memory_utilization), or a response crashes its scorer",
            )


_RULES: tuple[Callable[[Sequence[Row], Sequence[Row]], NamedTexts], ...] = (
    _signal,
    _invalid,
    _parts,
    _mismatch,
    _ess,
    _clip,
    _entropy,
    _truncation,
    _truncation_pays,
    _part_pays,
    _length_pays,
    _length,
    _kl,
    _repeated,
    _staleness,
    _restarts,
)
_OF_DEMONSTRATIONS = (_cut_demonstrations, _kl, _restarts)
