"""``RolloutCollector``: plays whole groups of dialogs to their end and yields one element per trajectory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NestedKey, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_grpo.checks import check_sampling_rounds
from torchrl_grpo.collectors.dynamic import GroupCounts, collect_dynamically
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    DONE,
    FULL,
    LENGTH_STOPPED,
    LOG_PROBS,
    POLICY_VERSION,
    POLICY_VERSIONS,
    PROMPT,
    REF_LOG_PROBS,
    RESPONSE,
    RESPONSE_TEXT,
    REWARD,
    REWARD_VALID,
    TURN_REWARDS,
)


@dataclass
class RolloutCounts:
    """What a rollout did: ``turns`` and ``tokens`` of the policy, seconds in the policy and in the environment.

    They count everything that was played; ``groups`` says what dynamic sampling dropped of it.
    """

    turns: int = 0
    tokens: int = 0
    generate_seconds: float = 0.0
    env_seconds: float = 0.0
    groups: GroupCounts = field(default_factory=GroupCounts)


class RolloutCollector(BaseCollector):
    """Plays an ``LLMEnv`` with a ``GenerationPolicy``.

    Each batch is a flat lazy stack of finished trajectories, whole groups only and the members of a group adjacent. The
    turns of a dialog are one sequence: ``("tokens", "prompt")`` is the first prompt, ``("tokens", "response")`` all
    that came after it, ``("masks", "all_assistant_mask")`` is True on the tokens that the policy sampled, the
    log-probs are 0 elsewhere, ``"policy_version"`` is the oldest of the turns, and ``("next", ...)`` is that of the
    last turn, but for the reward: it is the sum over the turns, valid if all of them are, and
    ``("next", "turn_rewards")`` has the parts where a dialog of the rollout had several turns. Rows that are done cost
    nothing in later turns.

    Attributes:
        last: counts of the latest rollout.

    Args:
        env: an ``LLMEnv``, possibly in a ``TransformedEnv``.
        policy: samples the responses; its engine takes the weights.

    Keyword Args:
        dialog_turns_per_batch: a batch is made of whole rollouts until it has at least so many elements, which are
            trajectories: a dialog counts once, however many turns it has, as in TorchRL's ``LLMCollector`` with
            ``yield_only_last_steps=True``. None is one rollout, ``num_envs`` trajectories. The config's
            ``train.dialog_turns_per_batch`` is this.
        total_dialog_turns: iteration ends after the batch in which the turns played so far reach this number; -1 never
            ends. As in ``LLMCollector`` every turn counts that the policy played, those in the middle of a dialog too,
            and those of the groups that dynamic sampling dropped; so ``len(collector)`` is the most batches there can
            be. The config's ``train.total_dialog_turns`` is another number: the trajectories to train on.
        dynamic_sampling: drop the groups whose valid rewards are all equal and play on until the batch has exactly
            ``dialog_turns_per_batch`` trajectories of groups that have signal (arXiv 2503.14476, section 3.2).
        max_sampling_rounds: after so many rollouts for one batch it is filled with the groups without signal that were
            played last.

    Raises:
        ValueError: a number is out of its range, or dynamic sampling cannot give a batch of that size.

    Examples:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from torchrl_grpo.envs import LLMEnv
        >>> from torchrl_grpo.generation.base import SamplingParams
        >>> from torchrl_grpo.generation.transformers import TransformersEngine
        >>> from torchrl_grpo.starter import starter_path
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> model = AutoModelForCausalLM.from_pretrained(starter_path())
        >>> policy = GenerationPolicy(TransformersEngine(model), SamplingParams(max_new_tokens=4))
        >>> env = LLMEnv(ArithmeticTask(), AutoTokenizer.from_pretrained(starter_path()), num_envs=8, repeats=4)
        >>> collector = RolloutCollector(env, policy, total_dialog_turns=16)
        >>> for version, batch in enumerate(collector, start=1):
        ...     # ... train on the batch ...
        ...     collector.update_policy_weights_(model.named_parameters(), version)
        ...     print(batch.shape, batch["policy_version"].unique().item())
        torch.Size([8]) 0
        torch.Size([8]) 1
        >>> collector.shutdown()
    """

    def __init__(
        self,
        env: EnvBase,
        policy: GenerationPolicy,
        *,
        dialog_turns_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        dynamic_sampling: bool = False,
        max_sampling_rounds: int = 10,
    ) -> None:
        super().__init__()
        if dialog_turns_per_batch is not None and dialog_turns_per_batch < 1:
            raise ValueError(
                f"dialog_turns_per_batch={dialog_turns_per_batch} must be at least 1: use None for one rollout."
            )
        if total_dialog_turns < 1 and total_dialog_turns != -1:
            raise ValueError(f"total_dialog_turns={total_dialog_turns} must be at least 1, or -1 to go on for ever.")
        self.env = env
        self.policy = policy
        # These three names are TorchRL's: __len__ and stats() of the base class read them.
        self.requested_frames_per_batch = dialog_turns_per_batch or env.batch_size[0]
        self.total_frames = total_dialog_turns
        self.dynamic_sampling = dynamic_sampling
        self._group_size = _base_env(env).repeats if dynamic_sampling else 0
        self.max_sampling_rounds = max_sampling_rounds
        if dynamic_sampling:
            self._check_dynamic_sampling()
        self._warned = False
        self._frames = 0
        self.last = RolloutCounts()
        self._closed = False

    def _check_dynamic_sampling(self) -> None:
        wanted, rows, size = self.requested_frames_per_batch, self.env.batch_size[0], self._group_size
        if wanted % size:
            raise ValueError(
                f"dialog_turns_per_batch={wanted} must be a multiple of the group size {size} with dynamic sampling, "
                f"which makes batches of exactly that many: use {wanted - wanted % size or size}."
            )
        check_sampling_rounds(self.max_sampling_rounds, rows, wanted)

    @property
    def dialog_turns(self) -> int:
        """Turns that the policy has played so far."""
        return self._frames

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine has now."""
        return self.policy.engine.policy_version

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yields batches until ``total_dialog_turns`` are played."""
        while self.total_frames < 0 or self._frames < self.total_frames:
            yield self.rollout()

    def rollout(self) -> TensorDictBase:
        """Plays one batch.

        Returns:
            flat lazy stack of trajectories with the keys of ``torchrl_grpo.keys``; ``"advantage"`` and
            ``("next", "ref_log_probs", "full")`` are there only if a transform of the environment writes them.

        Raises:
            RuntimeError: the collector is shut down, or a later turn did not keep the tokens of an earlier one.
            ValueError: a prompt leaves no room for one token in the model's context.
        """
        if self._closed:
            raise RuntimeError("the collector was shut down and cannot play: build a new one.")
        self.last = RolloutCounts()
        sequences = self._play_dynamic() if self.dynamic_sampling else []
        while len(sequences) < self.requested_frames_per_batch:
            sequences.extend(self._play())
        self._frames += self.last.turns
        return lazy_stack(sequences)

    def _play_dynamic(self) -> list[TensorDictBase]:
        """A batch of groups with signal, as far as ``max_sampling_rounds`` rollouts give them."""
        groups = self.requested_frames_per_batch // self._group_size
        sequences, self.last.groups = collect_dynamically(self._play, groups, self.max_sampling_rounds)
        if self.last.groups.filled and not self._warned:
            self._warned = True
            torchrl_logger.warning(
                f"dynamic sampling: {self.max_sampling_rounds} rollouts had {groups - self.last.groups.filled} groups "
                f"with signal of {groups} wanted; {self.last.groups.filled} without signal fill the batch. Further "
                "batches like it are only counted."
            )
        return sequences

    def _play(self) -> Iterable[TensorDictBase]:
        """Resets the environment and plays until all rows are done; one TensorDict per row."""
        start = time.perf_counter()
        data = self.env.reset()
        self.last.env_seconds += time.perf_counter() - start
        turns: list[list[TensorDictBase]] = [[] for _ in range(data.batch_size[0])]
        active = list(range(len(turns)))
        while True:
            start = time.perf_counter()
            data = self.policy(data)
            generated = time.perf_counter()
            data = self.env.step(data)
            self.last.env_seconds += time.perf_counter() - generated
            self.last.generate_seconds += generated - start

            rows = data.unbind(0)
            for row in active:
                turns[row].append(rows[row])
                self.last.tokens += rows[row].get(RESPONSE).numel()
            self.last.turns += len(active)
            stepping = ~data.get(DONE).reshape(-1)
            active = stepping.nonzero().reshape(-1).tolist()
            if not active:
                return _trajectories(data, turns)
            data = self.env.step_mdp(data)
            data.set("_step", stepping)

    def update_policy_weights_(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Gives the engine new weights; no rollout is under way, so the next one has them in every token.

        Args:
            weights: pairs (name in the Hugging Face checkpoint, tensor), every parameter once.
            version: the engine's new ``policy_version``.

        Raises:
            RuntimeError: a name is unknown or missing, or a shape differs; the engine then keeps its version.
        """
        self.policy.engine.update_weights(weights, version)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Closes the environment and the engine. May be called again."""
        if not self._closed:
            self._closed = True
            self.env.close()
            self.policy.engine.close()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Restarts the order of the problems from ``seed`` and seeds the engine; returns a seed for what comes next."""
        self.policy.engine.seed(seed)
        return self.env.set_seed(seed, static_seed=static_seed)

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout depends on, apart from the weights."""
        return {
            "env": _base_env(self.env).state_dict(),
            "engine": self.policy.engine.state_dict(),
            "dialog_turns": self._frames,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave.

        Raises:
            ValueError: the state is from an environment with another number of problems.
        """
        _base_env(self.env).load_state_dict(state_dict["env"])
        self.policy.engine.load_state_dict(state_dict["engine"])
        self._frames = state_dict["dialog_turns"]


def _base_env(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _trajectories(last: TensorDictBase, turns: list[list[TensorDictBase]]) -> Sequence[TensorDictBase]:
    """The rows of the last transition with the token entries of all turns.

    Args:
        last: [B] the last transition; rows that were done before it repeat their outcome.
        turns: for each row, its turns.
    """
    nxt = last.get("next")
    several = any(len(row) > 1 for row in turns)
    out = last.exclude("next", "done", "terminated", "truncated", "correct", LENGTH_STOPPED)
    out.set("text", nxt.get("text"))
    if several:
        _set_merged(out, turns)
        for name in (REWARD[-1], REWARD_VALID):
            if nxt.get(name, None) is not None:
                nxt.set(name, torch.stack([_over_turns(row, ("next", name)) for row in turns]))
    # An environment writes all it has to say under "next"; these two belong to the sequence.
    for key in (REWARD_VALID, ADVANTAGE):
        value = nxt.get(key, None)
        if value is not None:
            out.set(key, value)
    nxt = nxt.exclude("tokens", "text", REWARD_VALID, ADVANTAGE)
    if nxt.get("ref_log_probs", None) is not None and several:
        nxt.set("ref_log_probs", lazy_stack([TensorDict({"full": _sum_turns(row, REF_LOG_PROBS)}) for row in turns]))
    out.set("next", nxt)
    rows = out.unbind(0)
    if several:
        for trajectory, row in zip(rows, turns, strict=True):
            trajectory.set(TURN_REWARDS, _turn_rewards(row))
    return rows


def _over_turns(turns: list[TensorDictBase], key: NestedKey) -> Tensor:
    """[1] what a dialog has of an entry: a number summed over its turns, a flag that is True where it always was."""
    values = torch.stack([turn.get(key) for turn in turns])
    return values.all(0) if values.dtype == torch.bool else values.sum(0)


def _turn_rewards(turns: list[TensorDictBase]) -> Tensor:
    """[T] float32, the reward of each turn on the last token that the turn sampled."""
    out = torch.zeros(turns[-1].get(FULL).shape, dtype=torch.float32)
    for turn in turns:
        out[turn.get(ASSISTANT_MASK).nonzero().reshape(-1)[-1:]] = turn.get(REWARD).float()
    return out


def _set_merged(out: TensorDictBase, turns: list[list[TensorDictBase]]) -> None:
    """Replaces what the policy wrote in the last turn by what it wrote in all turns of each row."""
    merged = [_merge(row) for row in turns]
    for name in ("tokens", "masks", "log_probs", POLICY_VERSIONS[0]):
        out.set(name, lazy_stack([row.get(name) for row in merged]))
    out.set(POLICY_VERSION, torch.stack([row.get(POLICY_VERSION) for row in merged]))
    texts = ["\n".join(turn[("next", *RESPONSE_TEXT)] for turn in row) for row in turns]
    out.set("text", TensorDict({RESPONSE_TEXT[-1]: NonTensorStack(*texts)}, out.batch_size))


def _sum_turns(turns: list[TensorDictBase], key: NestedKey) -> Tensor:
    """[T] an entry that is 0 on the tokens that its turn did not sample, for all turns of a dialog together."""
    total = torch.zeros(turns[-1].get(key).shape, dtype=torch.float32)
    for turn in turns:
        value = turn.get(key)
        total[: value.numel()] += value
    return total


def _merge(turns: list[TensorDictBase]) -> TensorDictBase:
    """One sequence from the turns of a dialog; each turn's tokens begin with all tokens of the turn before."""
    if len(turns) == 1:
        return turns[0]
    prompt, full = turns[0].get(PROMPT), turns[-1].get(FULL)
    sampled = torch.zeros_like(full, dtype=torch.bool)
    versions = torch.full_like(full, -1)
    for turn in turns:
        length = turn.get(FULL).numel()
        if not torch.equal(turn.get(FULL), full[:length]):
            raise RuntimeError(
                f"the {length} tokens of an earlier turn are not the first of the {full.numel()} tokens of the dialog: "
                "a transform of the environment changed tokens that the policy was given or sampled."
            )
        sampled[:length] |= turn.get(ASSISTANT_MASK)
        versions[:length] = versions[:length].maximum(turn.get(POLICY_VERSIONS))
    oldest = torch.stack([turn.get(POLICY_VERSION) for turn in turns]).amin(0)
    return TensorDict(
        {
            PROMPT: prompt,
            RESPONSE: full[prompt.numel() :].clone(),
            FULL: full,
            ATTENTION_MASK: torch.ones_like(sampled),
            ASSISTANT_MASK: sampled,
            LOG_PROBS: _sum_turns(turns, LOG_PROBS),
            POLICY_VERSION: oldest,
            POLICY_VERSIONS: versions,
        }
    )
