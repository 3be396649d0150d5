"""GRPO post-training for language models, as TorchRL components that can be taken one by one.

``objectives.GRPOLoss``, ``collectors.RolloutCollector``, ``envs.LLMEnv``, ``generation`` (the engines),
``transforms.GroupAdvantage``, ``transforms.KLScoring``, ``models.TokenScorer``, ``trainer.GRPOTrainer``,
``trainer.fit``, ``functional`` (the maths) and ``keys`` (the TensorDict keys). ``sota/grpo/grpo.py`` joins them.
"""
