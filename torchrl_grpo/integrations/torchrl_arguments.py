"""Arguments of TorchRL's classes that ours replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SAME = (None, False, True)
_WHOLE_DIALOGS = (
    "an element is a whole dialog (TorchRL's LLMCollector plays this environment and policy turn "
    "by turn)"
)

# For each argument: the values that change nothing (None for all), and what to use instead of others.
_ARGUMENTS: dict[str, dict[str, tuple[Sequence[Any] | None, str]]] = {
    "RolloutCollector": {
        "steps_per_batch": ((), "use dialog_turns_per_batch"),
        "frames_per_batch": ((), "use dialog_turns_per_batch"),
        "total_steps": ((), "use total_dialog_turns"),
        "total_frames": ((), "use total_dialog_turns"),
        "yield_completed_trajectories": ((None, True), _WHOLE_DIALOGS),
        "flatten_data": ((None, True), "batches are flat, [N]"),
        "reset_at_each_iter": (_SAME, ""),  # no dialog is left over from one batch to the next
        "track_policy_version": (
            _SAME,
            "each token has its version, and increment_version() raises it",
        ),
        "async_envs": ((None, False), "use sota/grpo/grpo-async.py, which samples while it trains"),
        "weight_updater": ((None,), "use update_policy_weights_(weights, version)"),
        "queue": ((None,), "use replay_buffer"),
        "verbose": ((None, False), "`last` has the counts of each rollout"),
    },
    "GRPOLoss": {
        "entropy_bonus": ((), "use entropy_coeff, 0 for no bonus"),
        "samples_mc_entropy": ((1,), "the entropy is computed exactly"),
        "gamma": ((None,), "use GroupAdvantage(level='token', gamma=...)"),
        "reduction": (
            (None, "mean"),
            "use aggregation='constant' with constant_length=1 for a sum over tokens",
        ),
        "clip_value": ((None, False), "there is no value function to clip"),
        "masking_strategy": (
            ("rlhf", "sft"),
            "use set_keys(mask=...); the mask selects the tokens",
        ),
        "ref_log_prob_padding_side": (
            (),
            "keep reference log-probs aligned with the tokens, [T] each",
        ),
        "ref_log_prob_padding_value": (
            (),
            "keep reference log-probs aligned with the tokens, [T] each",
        ),
    },
    "DemonstrationLoss": {
        "tokenizer": ((), "use torchrl.objectives.llm.SFTLoss to train on histories"),
    },
    "GroupAdvantage": {
        "verbose": ((None, False), "queue.get_stats() has the counts"),
        # they limit what waits in TorchRL's queues
        "keep_return_bounds": (None, ""),
        "candidate_group_size": (None, ""),
        "candidate_selection_min_size": (None, ""),
        "candidate_selector": (None, ""),
    },
}


def refuse_arguments(owner: type, arguments: Mapping[str, Any]) -> None:
    """Refuse the keyword arguments that a class does not have itself.

    Raises:
        TypeError: an argument is unknown, or it is TorchRL's and its value would change something;
            the message names the replacement.
    """
    replacements: dict[str, tuple[Sequence[Any] | None, str]] = {}
    for base in owner.__mro__:
        replacements |= _ARGUMENTS.get(base.__name__, {})
    for name, value in arguments.items():
        if name not in replacements:
            raise TypeError(f"{owner.__name__} got an unexpected keyword argument {name!r}.")
        same, instead = replacements[name]
        if same is not None and not any(
            type(value) is type(other) and value == other for other in same
        ):
            raise TypeError(
                f"{name}={value!r} is an argument of TorchRL's class that {owner.__name__} does "
                f"not have: {instead}."
            )
