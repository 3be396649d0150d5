"""GRPO post-training for language models, as TorchRL components that can be used one by one.

``objectives.GRPOLoss``, ``collectors.RolloutCollector``, ``envs.LLMEnv``, ``generation`` (the
engines), ``transforms.GroupAdvantage``, ``transforms.KLScoring``, ``models.TokenScorer``,
``learner.GRPOTrainer``, ``loop.fit``, ``functional`` (the maths) and ``keys`` (the TensorDict
keys). ``sota/grpo/grpo.py`` joins them.
"""

import logging

# TorchRL imports vLLM where it is installed, which speaks before its own logging is set up: in a
# Hydra run to the user's terminal, and once for each actor on Ray.
logging.getLogger("vllm").setLevel(logging.ERROR)
# transformers and PEFT import torchao where it is installed. It warns of each library that it has
# for other machines, and PyTorch of how torchao registers its enums.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
