"""``EngineWeightSyncScheme`` under its documented name."""

from torchrl_grpo.integrations.weight_sync import EngineWeightSyncScheme

__all__ = ["EngineWeightSyncScheme"]
