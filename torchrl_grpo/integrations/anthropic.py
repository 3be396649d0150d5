"""Anthropic's wire format (``/v1/messages``), translated to and from OpenAI's.

A request becomes the equivalent one in OpenAI's format, so both are checked and handled alike.
Source: Anthropic's API reference, messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {"stop": "stop_sequences"}
"""This API's names for fields of chat completions."""
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_THOUGHTS = ("thinking", "redacted_thinking")


def as_openai(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a request in OpenAI's format, and the names of its messages in Anthropic's. Parts
    without an equivalent are unchanged, and the parser of requests refuses them.
    """
    chat: list[tuple[str, Any]] = []
    if fields.get("system"):
        chat.append(("system", {"role": "system", "content": fields["system"]}))
    messages = fields.get("messages")
    if isinstance(messages, list):
        chat += [
            (f"messages[{index}]", part)
            for index, message in enumerate(messages)
            for part in _messages(message)
        ]
    tools = fields.get("tools")
    choice = fields.get("tool_choice")
    converted = messages
    if messages and isinstance(messages, list):
        converted = [message for _, message in chat]
    request = {
        "model": fields.get("model"),
        "messages": converted,
        "tools": [_tool(tool) for tool in tools] if isinstance(tools, list) else tools,
        "tool_choice": choice.get("type") if isinstance(choice, dict) else choice,
        "max_tokens": fields.get("max_tokens"),
        "stop": fields.get("stop_sequences"),
        "stream": fields.get("stream"),
    }
    return request, [name for name, _ in chat]


def _messages(message: Any) -> Iterator[Any]:
    """Yield a message as one or several messages, because each tool result is a separate one."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        yield message
        return
    calls = [
        {
            "id": block.get("id"),
            "function": {"name": block.get("name"), "arguments": block.get("input")},
        }
        for block in content
        if block.get("type") == "tool_use"
    ]
    other_blocks = [
        _part(block)
        for block in content
        if block.get("type") not in ("tool_use", "tool_result", *_THOUGHTS)
    ]
    for block in content:
        if block.get("type") == "tool_result":
            result = block.get("content")
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": list(map(_part, result)) if isinstance(result, list) else result,
            }
    if other_blocks or calls or not content:
        yield {"role": message.get("role"), "content": other_blocks, "tool_calls": calls}


def _part(block: Any) -> Any:
    """Return an image in OpenAI's form; other blocks are unchanged."""
    source = block.get("source") if isinstance(block, dict) else None
    if not isinstance(source, dict) or block.get("type") != "image":
        return block
    url = source.get("url")
    if isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type')};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Any) -> Any:
    """Return a tool of the agent; a tool of Anthropic's, which has no schema, is unchanged."""
    if not isinstance(tool, dict) or "input_schema" not in tool:
        return tool
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    description = {"description": tool["description"]} if "description" in tool else {}
    return {"type": "function", "function": function | description}


def body(answer: Any) -> dict[str, Any]:
    """Return an answer as one object.

    Args:
        answer: an ``agents.protocol.Answer``.
    """
    uses = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in answer.calls
    ]
    text, stop, reason = answer.text, answer.stop, answer.finish_reason
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": answer.request.model,
        "content": [
            *([{"type": "text", "text": text}] if text or not uses else []),
            *uses,
        ],
        "stop_reason": _REASONS.get(reason, "end_turn" if stop is None else "stop_sequence"),
        "stop_sequence": stop,
        "usage": {
            "input_tokens": answer.dialog.prompt_tokens,
            "output_tokens": len(answer.dialog.tokens),
        },
    }


def events(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer as the events of a stream.

    Args:
        message: the answer as one object.
    """
    start = message | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": start}
    empty: dict[str, Any]
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": stop, "usage": message["usage"]}
    yield {"type": "message_stop"}
