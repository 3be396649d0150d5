"""Tools: functions that the policy may call, and the calls in its text."""

from torchrl_grpo.tools.toolbox import Toolbox, ToolCall, parse_tool_calls, tool_message

__all__ = ["ToolCall", "Toolbox", "parse_tool_calls", "tool_message"]
