"""Agents that only use an OpenAI client: a server on loopback, and the task that runs them
(``WithAgent``).
"""

from torchrl_grpo.integrations.agents.programs import Program, load_program
from torchrl_grpo.integrations.agents.task import WithAgent, with_agent

__all__ = ["Program", "WithAgent", "load_program", "with_agent"]
