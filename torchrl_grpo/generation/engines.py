"""The table of engines under its old name, for one more release."""

from torchrl_grpo.engines import ENGINES, EngineKind, engines_with

__all__ = ["ENGINES", "EngineKind", "engines_with"]
