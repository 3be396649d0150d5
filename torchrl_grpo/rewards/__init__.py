"""Built-in rewards, and the interface of a reward.

A reward is a plain function whose arguments are matched by name: ``response`` (the policy's last
turn as text), ``prompt``, ``messages``, ``answer``, ``finish_reason``, ``tokens`` and the columns
of the data set; the other arguments are options. It returns a number, a bool, None (does not apply)
or a dict of named parts.

``BUILTINS`` maps names to the functions' import paths, so that using one reward does not import the
packages of others. No built-in reward raises because of a response's text or size, except those that
query a model (``judge``, ``judge_ranking``, ``rubric`` and ``reward_model``). They raise
``ValueError`` for an invalid option or column, and ``ImportError`` if their package is missing.

>>> sorted(BUILTINS)[:4]
['code', 'countdown', 'format', 'gsm8k']
"""

from __future__ import annotations

from torchrl_grpo.rewards.gsm8k import ANSWER_MARKER, canonical_number, marked_number

__all__ = ["ANSWER_MARKER", "BUILTINS", "canonical_number", "marked_number"]

BUILTINS = {
    **{name: f"torchrl_grpo.rewards.{name}:{name}" for name in ("countdown", "gsm8k")},
    **{
        name: f"torchrl_grpo.integrations.graders.{name}:{name}"
        for name in ("code", "ifeval", "judge", "judge_ranking", "math", "reward_model", "rubric")
    },
    **{
        name: f"torchrl_grpo.rewards.heuristics:{name}"
        for name in ("format", "length", "number", "operations", "structure")
    },
}
