"""Accuracy on a task's test split, and on each data set in it: pass@1 greedy, pass@k and avg@k
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.summary import ends_of, response_lengths, sample_rows
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Engine, SamplingParams, preserve_rng
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.host import stalls
from torchrl_grpo.intervals import mean_interval


class Evaluator:
    """Plays the same test problems at each evaluation and computes their accuracy.

    Responses are sampled from the same seed each time, and the engine's random state is restored
    afterwards, so an evaluation does not affect the run. Neither holds if the engine also serves
    other callers during the evaluation.

    Args:
        engine: samples the responses; closing it is left to its owner.
        greedy_env: an ``LLMEnv`` over the test split with ``repeats=1``, one row per problem.
        sampled_env: an ``LLMEnv`` with ``repeats=k`` over the same problems, or None without
            samples.

    Keyword Args:
        params: sampling parameters for pass@k and avg@k; greedy decoding uses them with
            temperature 0.
        further: names of further test sets, which the metrics of the test split leave out.
        rows: number of problems whose sample rows include tokens; None for all.
    """

    def __init__(
        self,
        engine: Engine,
        greedy_env: LLMEnv,
        sampled_env: LLMEnv | None,
        *,
        params: SamplingParams,
        further: Sequence[str] = (),
        rows: int | None = None,
    ) -> None:
        greedy = replace(params, temperature=0)
        self.engine = engine
        self.greedy_env = greedy_env
        self.sampled_env = sampled_env
        self._further = frozenset(further)
        self._rows = rows
        self._greedy_policy = GenerationPolicy(engine, greedy)
        self._sampling_policy = GenerationPolicy(engine, params)

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluate the engine's current weights.

        Args:
            sampled: whether to measure pass@k and avg@k too.

        Returns:
            ``eval/pass@1`` in [0, 1] and ``eval/reward_mean``, both over the valid rewards,
            ``eval/invalid_fraction`` in [0, 1], ``eval/response_length`` in tokens,
            ``eval/truncated`` in [0, 1] and, with ``sampled``, ``eval/pass@k``, ``eval/avg@k`` and
            ``eval/invalid_fraction@k``; the 95% intervals of ``pass@1`` and ``avg@k`` over the
            problems as ``eval/ci_low_pass@1`` and ``eval/ci_high_pass@1``; the same with ``/name``
            for each named data set; and a sample row (greedy) for each problem, with ``sampled``
            also with ``correct_of``, its numbers of correct and of valid samples. A mean over no
            valid reward is NaN.
        """
        with preserve_rng(self.engine):
            batch = self._play(self.greedy_env, self._greedy_policy)
            metrics = self._greedy_metrics(batch)
            rows = sample_rows(batch, "test", self._rows, tokenizer=self.greedy_env.tokenizer)
            if sampled and self.sampled_env is not None:
                sampled_metrics, counts = self._sampled_metrics(self.sampled_env)
                metrics |= sampled_metrics
                # First, because readers that skip tokens expect them at the end of a row.
                rows = [{"correct_of": counts[row["problem"]]} | row for row in rows]
        return metrics, rows

    def _play(self, env: LLMEnv, policy: GenerationPolicy) -> TensorDictBase:
        env.set_seed(0)
        if not self.engine.concurrent:
            self.engine.seed(0)
        sampled = 0
        dialogs = env.batch_size[0]

        def note(*_: Any) -> None:
            nonlocal sampled
            sampled += 1
            stalls.note(f"evaluating {dialogs} problems, {sampled} responses received")

        policy.on_response = note
        return RolloutCollector(env, policy).rollout()

    def _greedy_metrics(self, batch: TensorDictBase) -> dict[str, float]:
        batch, lengths = ends_of(batch), response_lengths(batch).double()
        valid = batch.get(keys.REWARD_VALID).reshape(-1)
        correct, reward, truncated = (
            batch.get(key).reshape(-1).double()
            for key in (keys.CORRECT, keys.REWARD, keys.TRUNCATED)
        )
        metrics: dict[str, float] = {}
        for suffix, rows in self._sets(batch):
            scored = rows[valid[rows]]
            metrics |= {
                **_with_interval(f"pass@1{suffix}", correct[scored]),
                f"eval/reward_mean{suffix}": reward[scored].mean().item(),
                f"eval/invalid_fraction{suffix}": (~valid[rows]).double().mean().item(),
                f"eval/response_length{suffix}": lengths[rows].mean().item(),
                f"eval/truncated{suffix}": truncated[rows].mean().item(),
            }
        return metrics

    def _sampled_metrics(self, env: LLMEnv) -> tuple[dict[str, float], list[list[int]]]:
        """Return pass@k and avg@k over the problems that have a valid sample, computed from valid
        samples only, and the number of correct and of valid samples of each problem.
        """
        k = env.repeats
        batch = ends_of(self._play(env, self._sampling_policy))
        valid = batch.get(keys.REWARD_VALID).reshape(-1, k)
        num_correct = (batch.get(keys.CORRECT).reshape(-1, k) & valid).sum(-1)
        num_valid = valid.sum(-1)
        metrics: dict[str, float] = {}
        for suffix, rows in self._sets(batch[::k]):
            scored = rows[num_valid[rows] > 0]
            metrics[f"eval/pass@{k}{suffix}"] = (num_correct[scored] > 0).double().mean().item()
            metrics |= _with_interval(f"avg@{k}{suffix}", num_correct[scored] / num_valid[scored])
            metrics[f"eval/invalid_fraction@{k}{suffix}"] = (~valid[rows]).double().mean().item()
        return metrics, torch.stack((num_correct, num_valid), 1).tolist()

    def _sets(self, batch: TensorDictBase) -> list[tuple[str, Tensor]]:
        """Return the rows of the task's own test split and of each data set, with the suffix of
        their metrics. Sets without rows are left out.
        """
        column = batch.get(keys.DATASET, None)
        names = [""] * len(batch) if column is None else column.reshape(-1).tolist()
        own_rows = [i for i, name in enumerate(names) if name not in self._further]
        sets = {
            f"/{name}": [i for i, other in enumerate(names) if other == name]
            for name in sorted({*names} - {""})
        }
        return [
            (suffix, torch.tensor(rows)) for suffix, rows in ({"": own_rows} | sets).items() if rows
        ]


def _with_interval(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean over problems and its 95% interval as metrics."""
    low, high = mean_interval(values.tolist())
    mean = values.mean().item()
    return {f"eval/{name}": mean, f"eval/ci_low_{name}": low, f"eval/ci_high_{name}": high}
