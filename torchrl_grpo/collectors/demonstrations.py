"""``Demonstrations``: trajectories that are read from data, in place of sampled ones or beside them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.chat.template import TurnTemplate
from torchrl_grpo.collectors.rollout import RolloutCounts
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Engine
from torchrl_grpo.tasks.base import Message
from torchrl_grpo.tasks.drawing import Drawn


class TurnWriter:
    """Writes the assistant's turns of a chat as the policy would have sampled them.

    A turn is its text and the token that ends it; what comes between two turns is what the chat template puts there,
    as in a dialog of several turns. An assistant's control tokens are tokens, others' are text.

    Args:
        tokenizer: with a chat template.
        stop_token_ids: the tokens that end a turn.
        template_arguments: of the chat template.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_grpo.starter import starter_path
        >>> tokenizer = AutoTokenizer.from_pretrained(starter_path())
        >>> tokens, said = TurnWriter(tokenizer, [1])([{"role": "assistant", "content": "#### 4"}])
        >>> tokenizer.decode(tokens), said.all().item()
        ('#### 4<|end|>', True)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Collection[int],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = TurnTemplate(tokenizer, template_arguments or {})
        after = self._template.tokens([{"role": "user", "content": "@"}], [])[:1].tolist()
        self._end = after if set(after) & set(stop_token_ids) else [tokenizer.eos_token_id]

    def __call__(self, chat: Sequence[Message]) -> tuple[Tensor, Tensor]:
        """Return the tokens after the prompt, [T] int64, and which of them are the assistant's, [T] bool.

        Args:
            chat: what comes after the prompt; the assistant's turn is first and last.
        """
        tokens, said, between = list[int](), list[bool](), list[Message]()
        for message in chat:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if between:
                rest = self._template.tokens(between, tokens).tolist()
                tokens, said, between = tokens + rest, said + [False] * len(rest), []
            turn = self.tokenizer(message["content"], add_special_tokens=False)["input_ids"] + self._end
            tokens, said = tokens + turn, said + [True] * len(turn)
        return torch.tensor(tokens, dtype=torch.int64), torch.tensor(said)


class Demonstrations:
    """Gives the demonstrations of problems as a ``RolloutCollector`` gives what was sampled for them.

    A demonstration has a reward of 1 and is correct. Nobody sampled it, so that its behavior log-probs are 0. Beside
    what was sampled (``give``) it has neither: it is no member of the group, and only the loss reads it.

    Attributes:
        last: counts of the latest batch.

    Args:
        env: has the problems, the prompts and the tokenizer; it plays nothing.
        engine: has the version of the weights.
        stop_token_ids: the tokens that end a turn.
        most: tokens of a demonstration; it is cut there, as a response would be.
    """

    def __init__(self, env: LLMEnv, engine: Engine, stop_token_ids: Collection[int], most: int) -> None:
        self.env = env
        self.engine = engine
        self.most = most
        self.last = RolloutCounts()
        self._write = TurnWriter(env.tokenizer, stop_token_ids, env.template_arguments)

    def rollout(self, drawn: Sequence[Drawn]) -> TensorDictBase:
        """Return the demonstrations of problems, a flat lazy stack with a row for each.

        Raises:
            ValueError: the task has no demonstration of a problem.
        """
        start = time.perf_counter()
        batch = lazy_stack([self._row(one) for one in drawn])
        self.last = RolloutCounts(env_seconds=time.perf_counter() - start)
        return batch

    def give(self, drawn: Drawn, rows: Sequence[TensorDictBase]) -> None:
        """Write the demonstration of a problem into the first of the rows that were sampled for it, in place.

        The others get an empty one: ``keys.DEMONSTRATION`` and ``keys.DEMONSTRATION_MASK``.

        Raises:
            ValueError: the task has no demonstration of the problem.
        """
        prompt, response, mask, _ = self._tokens(drawn, self.env.task.demonstration(drawn.problem))
        full, nothing = torch.cat([prompt, response]), slice(0, 0)
        for number, row in enumerate(rows):
            row.set(keys.DEMONSTRATION, full[nothing] if number else full)
            row.set(keys.DEMONSTRATION_MASK, mask[nothing] if number else mask)

    def _tokens(self, drawn: Drawn, chat: Sequence[Message]) -> tuple[Tensor, Tensor, Tensor, bool]:
        """The prompt [Tp] and a demonstration [Tr], which of all these tokens are the assistant's [Tp + Tr], and
        whether it was cut."""
        prompt = self.env.prompts.tokens(drawn.index, drawn.problem)
        whole, said = self._write(chat)
        mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), said[: self.most]])
        return prompt, whole[: self.most], mask, len(whole) > self.most

    def _row(self, drawn: Drawn) -> TensorDictBase:
        chat = self.env.task.demonstration(drawn.problem)
        prompt, response, mask, cut = self._tokens(drawn, chat)
        version = int(self.engine.policy_version)
        true = torch.tensor([True])
        row = TensorDict(
            {
                keys.PROMPT: prompt,
                keys.RESPONSE: response,
                keys.FULL: torch.cat([prompt, response]),
                keys.ATTENTION_MASK: torch.ones_like(mask),
                keys.ASSISTANT_MASK: mask,
                keys.LOG_PROBS: torch.zeros(mask.shape),
                keys.POLICY_VERSION: torch.tensor([version]),
                keys.POLICY_VERSIONS: torch.where(mask, version, -1),
                keys.GROUP_ID: torch.tensor([drawn.group]),
                keys.REWARD: torch.ones(1),
                keys.REWARD_VALID: true,
                keys.CORRECT: true,
                keys.DONE: true,
                keys.TERMINATED: true & (not cut),
                keys.TRUNCATED: true & cut,
                keys.QUERY: NonTensorData(drawn.problem.query),
                keys.RESPONSE_TEXT: NonTensorData("\n".join(str(message["content"]) for message in chat)),
            }
        )
        return row.set(keys.DATASET, NonTensorData(drawn.problem.dataset)) if drawn.problem.dataset else row

    def take_counts(self) -> dict[str, float]:
        """Return nothing: no reward function was called."""
        return {}

    def shutdown(self) -> None:
        """End nothing; who made the engine ends it."""
