"""Extras and integrations that a run calls: the core loads them by name, without an import."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

EXTRAS = {
    "adapt_former_methods": "torchrl_grpo.integrations.former_losses:adapt_former_methods",
    "agent": "torchrl_grpo.integrations.agents:with_agent",  # env.agent
    "alarms": "torchrl_grpo.extras.report.alarms:Alarms",  # of each step
    "check_bitsandbytes": "torchrl_grpo.integrations.bitsandbytes:check_bitsandbytes",
    "check_comparison": "torchrl_grpo.extras.hints.comparison:check_comparison",
    "check_hub": "torchrl_grpo.extras.hints.hub:check_hub",  # before a download
    "check_launcher": "torchrl_grpo.extras.hints.words:check_launcher",
    "check_model_name": "torchrl_grpo.extras.hints.models:check_model_name",
    "check_models": "torchrl_grpo.extras.hints.models:check_models",  # before torch is imported
    "check_reward_model": "torchrl_grpo.integrations.graders.reward_scorer:check_reward_model",
    "check_served_teacher": "torchrl_grpo.integrations.served_teacher:ServedTeacher.check",
    "check_service": "torchrl_grpo.extras.trackers.services:check_service",  # logging.wandb.mode=online, for example
    "console": "torchrl_grpo.extras.call.notebook:make_console",  # of the terminal, or of a notebook
    "dashboard": "torchrl_grpo.extras.view.start:page_beside",  # logging.page=true
    "dry_run": "torchrl_grpo.extras.doctor.doctor:examine",  # dry_run=true
    "explain_arguments": "torchrl_grpo.extras.hints.arguments:explain_arguments",  # of a reward
    "explain_model_error": "torchrl_grpo.extras.hints.models:explain_model_error",
    "explain_sampling_memory": "torchrl_grpo.extras.hints.memory:explain_sampling_memory",
    "explain_scoring_memory": "torchrl_grpo.extras.hints.memory:explain_scoring_memory",
    "explain_step_memory": "torchrl_grpo.extras.hints.memory:explain_step_memory",
    "explain_words": "torchrl_grpo.extras.hints.words:explain_words",  # in the error for a command line
    "history_transforms": "torchrl_grpo.integrations.history:HistoryTransforms",  # env.transforms
    "ifeval_task": "torchrl_grpo.integrations.graders.ifeval_task:IFEvalTask",
    "math_task": "torchrl_grpo.integrations.graders.math_task:MathTask",
    "mcp_tools": "torchrl_grpo.integrations.mcp:mcp_tools",  # env.tools=[mcp:...]
    "model_card": "torchrl_grpo.extras.export.card:model_card",  # of an exported model
    "objective": "torchrl_grpo.extras.report.summary:objective",  # of a sweep
    "openenv": "torchrl_grpo.integrations.openenv:OpenEnvKind",  # env.environment=openenv:...
    "parse_turn": "torchrl_grpo.integrations.call_formats:parse_turn",  # a turn with tool calls
    "prefill_of": "torchrl_grpo.integrations.call_formats:prefill_of",
    "python_tool": "torchrl_grpo.integrations.sandbox.python_tool:Python",  # env.tools=[python]
    "quantized_linear": "torchrl_grpo.integrations.bitsandbytes:QuantizedLinear",
    "reasoning_gym": "torchrl_grpo.integrations.reasoning_gym:ReasoningGymTask",
    "recognize_calls": "torchrl_grpo.integrations.call_formats:recognize",  # in a chat template
    "refuse_arguments": "torchrl_grpo.integrations.torchrl_arguments:refuse_arguments",
    "report": "torchrl_grpo.extras.report.report:write_report",  # at the end of a run
    "require_isolation": "torchrl_grpo.integrations.sandbox:require_isolation",  # env.sandbox
    "reward_form": "torchrl_grpo.integrations.reward_forms:reward_form",  # of TRL and verl
    "same_as": "torchrl_grpo.extras.peers:same_as",  # in the error for an unknown key
    "served_teacher": "torchrl_grpo.integrations.served_teacher:ServedTeacher",  # teacher.address
    "set_weight_sync": "torchrl_grpo.integrations.weight_sync:set_weight_sync",
    "resume_command": "torchrl_grpo.extras.hints.resume:resume_command",  # after Ctrl-C
    "start_service": "torchrl_grpo.extras.trackers.services:start_service",
    "summary": "torchrl_grpo.extras.report.ending:print_end",  # at the end of a run
    "sweep_report": "torchrl_grpo.extras.report.sweep_report:write_sweep",  # at the end of a multirun
    "tracer": "torchrl_grpo.extras.trace:Tracer",  # logging.profile_steps
    "verifiers": "torchrl_grpo.integrations.verifiers:make_task",  # env.task=verifiers:...
    "where_not_finite": "torchrl_grpo.extras.doctor.diagnosis:where_not_finite",
    "why_no_token": "torchrl_grpo.extras.doctor.diagnosis:why_no_token",
}
"""Functions and classes that a run calls, by the name that the core knows."""


def load_extra(name: str) -> Callable[..., Any]:
    """Import a function or class of ``EXTRAS``."""
    return pkgutil.resolve_name(EXTRAS[name])
