"""GRPO post-training for language models, as TorchRL components that can be used separately.

``objectives.GRPOLoss``, ``collectors.RolloutCollector``, ``envs.LLMEnv``, ``generation`` (the
engines), ``transforms.GroupAdvantage``, ``transforms.KLScoring``, ``models.TokenScorer``,
``learner.PolicyTrainer``, ``loop.fit``, ``functional`` (the math) and ``keys`` (the TensorDict keys).
``sota/grpo/grpo.py`` combines them, and so do ``train`` and ``evaluate``, for Python.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_grpo.api import Result, evaluate, train

__all__ = ["Result", "evaluate", "train"]

# TorchRL imports vLLM if it is installed, which logs before its own logging is set up: to the
# user's terminal in a Hydra run, and once for each actor on Ray.
logging.getLogger("vllm").setLevel(logging.ERROR)
# transformers and PEFT import torchao if it is installed. It warns about each of its libraries for
# other machines, and PyTorch warns about how torchao registers its enums.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    # Not imported before it is used: `import torchrl_grpo` takes no time.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrl_grpo import api

    return getattr(api, name)
