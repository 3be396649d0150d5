"""The engine of ``counting`` as the config sees it: no torch is imported here."""

from torchrl_grpo.engines import EngineKind

COUNTING = EngineKind("grpo_sample.counting:Counting", step_overhead_s=0.02)
NO_ENGINE = EngineKind("grpo_sample.tasks:Nines", step_overhead_s=0.02)
