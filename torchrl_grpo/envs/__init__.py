"""Environments: dialogs of a task as TorchRL transitions, played by an engine."""

from torchrl_grpo.envs.llm_env import LLMEnv

__all__ = ["LLMEnv"]
