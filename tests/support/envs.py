"""Tasks, an engine and helpers for environments whose every response is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Completion, Engine, OnFinished, SamplingParams

END = 1
"""Id of the tokenizer's ``<|end|>``."""


class ScriptedEngine(Engine):
    """An engine that returns the tokens of a rule with log-probs -1, -2, ... and records its
    requests.
    """

    def __init__(self, rule: Callable[[Tensor, int], tuple[list[int], str]]) -> None:
        self.rule = rule
        self.calls: list[tuple[list[list[int]], int]] = []
        self.draws = 0
        self.num_closed = 0

    def generate(
        self,
        prompts: Sequence[Tensor],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        self.calls.append(([prompt.tolist() for prompt in prompts], n))
        out: list[list[Completion]] = []
        for i, prompt in enumerate(prompts):
            out.append([])
            for copy in range(n):
                out[i].append(self._complete(prompt, copy))
                if on_finished is not None:
                    on_finished(i, copy, out[i][copy])
        return out

    def _complete(self, prompt: Tensor, copy: int) -> Completion:
        tokens, reason = self.rule(prompt, copy)
        self.draws += 1
        log_probs = -torch.arange(1, len(tokens) + 1, dtype=torch.float32)
        return Completion(torch.tensor(tokens), log_probs, reason)  # type: ignore[arg-type]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.policy_version = version

    def close(self) -> None:
        self.num_closed += 1


def respond(
    env: LLMEnv, data: TensorDict, responses: list[list[int]], cut: list[bool] | None = None
) -> TensorDict:
    """Step ``env`` with these response tokens."""
    rows = [
        TensorDict(
            {"prompt": row.get("prompt"), "response": torch.tensor(response, dtype=torch.int64)}
        )
        for row, response in zip(data.get("tokens").unbind(0), responses, strict=True)
    ]
    data.set("tokens", lazy_stack(rows))
    data.set("length_stopped", torch.tensor(cut or [False] * len(responses)).unsqueeze(-1))
    return env.step(data)


def column(data: TensorDict, key: str) -> list:
    return data["next", key].squeeze(-1).tolist()
