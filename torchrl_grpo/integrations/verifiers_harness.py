"""A harness of verifiers without a program: the chat loop of its harness ``null``, in the same
process.

``null`` itself is a script that uv runs with packages that it downloads.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

NAME = "torchrl_grpo_chat"


def register() -> None:
    """Register the harness with verifiers, which finds harnesses by top-level module names."""
    if NAME in sys.modules:
        return
    from verifiers.v1 import Harness, HarnessConfig, ProgramResult

    class ChatHarness(Harness[HarnessConfig]):
        """Queries the policy until it answers without a tool call. The environment has the tools."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> ProgramResult:
            system, prompt = self.resolve_prompt(data)
            spec = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            failure = await _chat(ctx.model, endpoint, secret, {"mcpServers": spec}, system, prompt)
            return ProgramResult(0 if failure is None else 1, "", failure or "")

    module = ModuleType(NAME)
    vars(module).update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[NAME] = module


async def _chat(
    model: str, url: str, key: str, spec: dict[str, Any], system: str | None, prompt: Any
) -> str | None:
    """Play a chat to its end, including one that became too long; return what failed, or None."""
    from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
    from verifiers.v1.harnesses.utils.mcp import connect_mcp

    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages += [message_to_wire(message) for message in prompt or ()]
    # Loopback needs neither certificates nor a proxy, and only the episode's own limit ends a
    # request.
    plain = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    async with AsyncExitStack() as stack:
        client: Any = await stack.enter_async_context(
            AsyncOpenAI(base_url=url, api_key=key, http_client=plain, timeout=None, max_retries=0)
        )
        tools, names, servers = await connect_mcp(spec, stack)
        options = {"tools": tools} if tools else {}
        try:
            while True:
                answer = await client.chat.completions.create(
                    model=model, messages=messages, **options
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return None
                for call in message.tool_calls:
                    reply = {"role": "tool", "tool_call_id": call.id, "name": call.function.name}
                    content = await _call(call.function, names, servers)
                    messages.append(bound_tool_message(reply | {"content": content}))
        except APIStatusError as error:
            return None if is_context_overflow(error) else str(error)


async def _call(function: Any, names: dict[str, tuple[str, str]], servers: dict[str, Any]) -> Any:
    """Return a tool's result, or the problem with the call."""
    from verifiers.v1.harnesses.utils.mcp import call_mcp

    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return "error: tool arguments must be a JSON object; resend as an object"
    if function.name not in names:
        return f"error: unknown tool {function.name!r}"
    return await call_mcp(servers, names, function.name, arguments)
