"""Agents that only use an OpenAI client: a server on loopback, and the task that runs them
(``WithAgent``).
"""

from torchrl_grpo.agents.programs import Program, load_program
from torchrl_grpo.agents.task import WithAgent

__all__ = ["Program", "WithAgent", "load_program"]
