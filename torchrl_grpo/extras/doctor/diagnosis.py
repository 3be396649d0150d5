"""Find the origin of non-finite numbers, with extra passes after a bad step only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_grpo import keys
from torchrl_grpo.host.text import clip, printable
from torchrl_grpo.models.entries import demonstrations_in, has, pad
from torchrl_grpo.models.rows import Rows

_MOST, _LONGEST = 3, 60
"""Maximum number of samples to name, and characters of each."""


def where_not_finite(
    model: nn.Module,
    rows: Rows,
    parts: Sequence[Tensor],
    passes: Callable[[Tensor], Any],
    batch: TensorDictBase,
    *,
    one_by_one: bool = True,
) -> str:
    """Describe the first module with non-finite numbers, and the samples that cause them.

    Its own gradients are cleared.

    Args:
        model: the trained model, with the weights of the step.
        rows: the sequences, with the entries that the loss reads.
        parts: the passes, as indices of sequences.
        passes: forward and backward pass of some rows, as in the step.
        batch: that the sequences are of; its queries name them in the message, or their numbers.
        one_by_one: whether to try samples one at a time; must be False if several ranks have to
            make the same passes.
    """
    queries, counts = queries_of(batch), rows.values[keys.LOSS_WEIGHTS] != 0
    for key, value in rows.values.items():
        finite = value.isfinite().reshape(len(value), -1).all(-1)
        wrong = rows.of_scored.row[~finite & counts].unique().tolist()
        if wrong and key != keys.KEPT_LOG_PROBS:  # which has -inf
            name = key if isinstance(key, str) else ".".join(key)
            return (
                f"the batch's entry {name} is not finite in {_named(wrong, queries)}, before any "
                "pass"
            )
    wrong_weights = [
        name for name, weight in model.named_parameters() if not weight.detach().isfinite().all()
    ]
    if wrong_weights:
        return (
            f"{len(wrong_weights)} weights are not finite, the first of which is {wrong_weights[0]}"
        )
    source: str | None = None
    bad: list[int] = []
    for part in parts:
        first = _first_module(model, part, passes)
        if first is None:
            continue
        source = source or first
        several = part.tolist()
        if one_by_one and len(bad) < _MOST:
            several = [
                row for row in several if _first_module(model, torch.tensor([row]), passes)
            ] or several
        bad += several
    if source is None:
        return "each of its micro-batches is finite, so the numbers overflow only in their sum"
    return (
        f"the first numbers that are not finite are those of {source}, for {_named(bad, queries)}"
    )


def _first_module(model: nn.Module, rows: Tensor, passes: Callable[[Tensor], Any]) -> str | None:
    """Find the first numbers that are not finite in the pass of some rows."""
    modules: list[str] = []
    with _watched(model, modules):
        outputs = passes(rows)
    grads = [
        n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
    ]
    model.zero_grad(set_to_none=True)
    if modules:
        return f"the module {modules[0]}"
    for name, value in (outputs or {}).items():
        if not value.isfinite().all():
            return f"the loss ({name}), although the outputs of all modules are finite"
    return f"the gradient of {grads[-1]}" if grads else None  # the last layer's comes first


@contextmanager
def _watched(model: nn.Module, modules: list[str]) -> Iterator[None]:
    """Record the modules with non-finite output, in the order in which they finish."""

    def look(name: str, module: nn.Module, output: Any) -> None:
        first = (
            output[0]
            if isinstance(output, tuple) and output
            else getattr(output, "last_hidden_state", output)
        )
        if (
            isinstance(first, Tensor)
            and first.is_floating_point()
            and not first.detach().isfinite().all()
        ):
            modules.append(f"{name} ({type(module).__name__})")

    hooks = [
        module.register_forward_hook(
            lambda module, _, output, name=name: look(name, module, output)
        )
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _named(rows: Sequence[int], queries: Sequence[str] | None) -> str:
    names = [
        repr(clip(printable(queries[row]), _LONGEST)) if queries else f"row {row}" for row in rows
    ]
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{len(rows)} samples ({', '.join(names[:_MOST])}{more})"


def queries_of(batch: TensorDictBase) -> list[str] | None:
    """Return the queries of a batch's sequences and then of its demonstrations; None if it has no
    queries.
    """
    rows = batch.unbind(0)
    if not all(keys.QUERY in row.keys() for row in rows):  # noqa: SIM118
        return None
    demonstrations = demonstrations_in(batch) if has(batch, keys.DEMONSTRATION) else []
    return [row[keys.QUERY] for row in [*rows, *(rows[number] for number in demonstrations)]]


def why_no_token(batch: TensorDictBase) -> str:
    """Return why no token of a batch counts and, if the scorer failed, its first error."""
    sampled = pad(batch, keys.ASSISTANT_MASK, False).any(-1, keepdim=True)
    valid = torch.ones_like(sampled)
    if has(batch, keys.REWARD_VALID):
        valid = pad(batch, keys.REWARD_VALID, False)
    if valid.any() and not (valid & sampled).any():
        return "the policy sampled no tokens in the sequences whose rewards are valid"
    if valid.any():
        return (
            "all responses with a valid reward were truncated, and policy.mask_truncated=true "
            "leaves these out: raise inference_model.max_new_tokens"
        )
    why = "all rewards are invalid (is the scorer failing? see rollout/invalid)"
    rows = batch.unbind(0)
    errors = [row[keys.REWARD_ERROR] for row in rows if keys.REWARD_ERROR in row.keys()]  # noqa: SIM118
    if errors:
        first = errors[0].rstrip(".")
        why += f". The scorer failed on {len(errors)} of {len(rows)} responses, first with {first}"
    return why
