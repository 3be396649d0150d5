"""TorchRL specs of the transitions of ``LLMEnv``."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import Binary, Categorical, Composite, NonTensor, StackedComposite, Unbounded

from torchrl_grpo.keys import ATTENTION_MASK, DATASET, IMAGES, REWARD_PARTS


class _RaggedTokens(Categorical):
    """Spec of token ids whose rows differ in length, which TorchRL must not stack again."""

    def expand(self, *shape: Any) -> Categorical:
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(size) > self.ndim:
            raise ValueError(
                f"LLMEnv must not be stacked into {list(size[:-1])} rows by SerialEnv or "
                "ParallelEnv, which cannot step rows of tokens that differ in length: use "
                "num_envs for more rows, and reward_pool for more processes."
            )
        return super().expand(*shape)


class RaggedRows(StackedComposite):
    """Spec of rows that differ in length, whose examples are lazy stacks, as real data are. A copy
    of TorchRL's class would become a dense one, because the specs of all rows are equal.
    """

    def clone(self) -> RaggedRows:
        """Return a copy."""
        return RaggedRows(*[spec.clone() for spec in self._specs], dim=0)

    def to(self, dest: Any) -> RaggedRows:
        """Return a copy on another device."""
        return RaggedRows(*[spec.to(dest) for spec in self._specs], dim=0)

    def zero(self, shape: Any = None) -> TensorDictBase:
        """Return an example, a lazy stack of rows."""
        return lazy_stack([spec.zero() for spec in self._specs])


def transition_specs(
    num_envs: int, vocabulary: int, has_parts: bool, has_datasets: bool, has_images: bool
) -> dict[str, Composite]:
    """Return the specs by their names in ``EnvBase``.

    Args:
        num_envs: number of rows.
        vocabulary: number of token ids.
        has_parts: whether rewards have parts.
        has_datasets: whether problems come from several data sets.
        has_images: whether prompts may have images.
    """
    rows = (num_envs,)
    tokens = _RaggedTokens(vocabulary, shape=(-1,), dtype=torch.int64)
    # Otherwise TorchRL's wrappers would read the mask of the previous turn.
    mask = Composite({ATTENTION_MASK[-1]: Unbounded(shape=(-1,), dtype=torch.bool)})
    parts = {REWARD_PARTS[-1]: NonTensor(shape=rows, example_data={})} if has_parts else {}
    images = {IMAGES: NonTensor(shape=rows, example_data=())} if has_images else {}
    dataset = {DATASET: NonTensor(shape=rows, example_data="")} if has_datasets else {}
    return {
        "full_observation_spec": Composite(
            tokens=RaggedRows(*[Composite(prompt=tokens) for _ in range(num_envs)], dim=0),
            masks=RaggedRows(*[mask.clone() for _ in range(num_envs)], dim=0),
            text=Composite(response=NonTensor(shape=rows, example_data=""), shape=rows),
            correct=Binary(shape=(*rows, 1), dtype=torch.bool),
            reward_valid=Binary(shape=(*rows, 1), dtype=torch.bool),
            **parts,
            **images,
            shape=rows,
        ),
        "full_state_spec": Composite(
            group_id=Unbounded(shape=(*rows, 1), dtype=torch.int64),
            problem=Unbounded(shape=(*rows, 1), dtype=torch.int64),
            query=NonTensor(shape=rows, example_data=""),
            **dataset,
            shape=rows,
        ),
        "full_action_spec": Composite(
            tokens=RaggedRows(*[Composite(response=tokens) for _ in range(num_envs)], dim=0),
            length_stopped=Binary(shape=(*rows, 1), dtype=torch.bool),
            shape=rows,
        ),
        "full_reward_spec": Composite(reward=Unbounded(shape=(*rows, 1)), shape=rows),
        "full_done_spec": Composite(
            **{
                key: Binary(shape=(*rows, 1), dtype=torch.bool)
                for key in ("done", "terminated", "truncated")
            },
            shape=rows,
        ),
    }
