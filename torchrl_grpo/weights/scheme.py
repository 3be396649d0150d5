"""``EngineWeightSyncScheme`` under its old name, for one more release."""

from pkgutil import resolve_name

EngineWeightSyncScheme = resolve_name(
    "torchrl_grpo.integrations.weight_sync:EngineWeightSyncScheme"
)
