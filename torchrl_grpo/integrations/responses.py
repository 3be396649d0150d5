"""OpenAI's Responses wire format (``/v1/responses``), translated to and from that of chat
completions.

A request becomes the equivalent chat request, so both are checked and handled the same way. One
assistant message in a chat is several items here: reasoning, a message and function calls, in this
order. Source: OpenAI's API reference, responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "prompt_template": "prompt",
}
"""This API's names for fields of chat completions."""
_ANSWER = ("reasoning", "message", "function_call")
"""Types of the items of an answer, in order."""
_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id")
"""Fields of a request that its answer repeats."""


def as_openai(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a request in the format of chat completions, and the name of each message's field in the
    original. Parts without an equivalent are unchanged, so the request parser refuses them.
    """
    chat: list[tuple[str, Any]] = []
    if fields.get("instructions"):
        chat.append(("instructions", {"role": "system", "content": fields["instructions"]}))
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if items and isinstance(items, list):
        chat += messages_of(items)
        items = [message for _, message in chat]
    text = fields.get("text")
    tools = fields.get("tools")
    choice = fields.get("tool_choice")
    request = {
        **fields,
        "messages": items,
        "tools": [_tool(tool) for tool in tools] if isinstance(tools, list) else tools,
        "tool_choice": choice.get("type") if isinstance(choice, dict) else choice,
        "max_tokens": fields.get("max_output_tokens", fields.get("max_tokens")),
        "response_format": text.get("format")
        if isinstance(text, dict)
        else text or fields.get("response_format"),
        "prompt_template": fields.get("prompt"),
        "logprobs": "message.output_text.logprobs" in str(fields.get("include")),
    }
    return request, [name for name, _ in chat]


def messages_of(items: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return items as messages, each with the name of its first item. Consecutive items that can
    belong to one answer become one message.
    """
    chat: list[tuple[str, Any]] = []
    rank_before = len(_ANSWER)
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        is_other = kind == "message" and item.get("role") != "assistant"
        if is_other or kind not in _ANSWER:
            chat.append((field, _other(item, kind)))
            rank_before = len(_ANSWER)
            continue
        rank = _ANSWER.index(kind)
        if rank < rank_before or (rank == rank_before and kind != "function_call"):
            chat.append((field, {"role": "assistant"}))
        rank_before = rank
        message = chat[-1][1]
        if kind == "reasoning":
            parts = item.get("content") or item.get("encrypted_content") or item.get("summary")
            message["reasoning_content"] = _content(parts)
        elif kind == "message":
            message["content"] = _content(item.get("content"))
        else:
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "function": function}
            message.setdefault("tool_calls", []).append(call)
    return chat


def _other(item: Any, kind: Any) -> Any:
    """Return an item that is not part of an answer as a message; unknown items are unchanged."""
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    if kind == "function_call_output":
        output = _content(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    return item


def _content(content: Any) -> Any:
    return list(map(_part, content)) if isinstance(content, list) else content


def _part(part: Any) -> Any:
    """Return a text or an image in the chat format; other parts are unchanged."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "reasoning_text", "summary_text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": part.get("image_url")}
    return part


def _tool(tool: Any) -> Any:
    """Return a function in the chat format; other tools are unchanged."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def response_id(number: int) -> str:
    """Return the id of an answer."""
    return f"resp_{number}"


def body(answer: Any) -> dict[str, Any]:
    """Return an answer as one object.

    Args:
        answer: an ``agents.protocol.Answer``.
    """
    number, fields, thought = answer.number, answer.request.fields, answer.thought
    is_cut = answer.finish_reason == "length"
    status = {"status": "incomplete" if is_cut else "completed"}
    output: list[dict[str, Any]] = []
    if thought:
        content = [{"type": "reasoning_text", "text": thought}]
        item = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content}
        if "reasoning.encrypted_content" in str(fields.get("include")):
            item["encrypted_content"] = thought
        output.append(item | status)
    if answer.text or not (output or answer.calls):
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        part["logprobs"] = answer.log_probs["content"] if answer.log_probs else []
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
        output.append(item | status)
    for index, call in enumerate(answer.calls):
        ids = {"id": f"fc_{number}_{index}", "call_id": call["id"]}
        output.append({"type": "function_call", **ids, **call["function"], **status})
    prompt, sampled = answer.dialog.prompt_tokens, len(answer.dialog.tokens)
    return {
        **{name: fields.get(name) for name in _ECHOED},
        "id": response_id(number),
        "object": "response",
        "created_at": 0,
        "model": answer.request.model,
        **status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer as the events of a stream.

    Args:
        response: the answer as one object.
    """
    for number, (kind, fields) in enumerate(_events(response)):
        yield {"type": f"response.{kind}", "sequence_number": number, **fields}


def _events(response: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the type of each event, without its prefix, and its other fields."""
    start = {**response, "status": "in_progress", "incomplete_details": None, "output": []}
    yield "created", {"response": start}
    yield "in_progress", {"response": start}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty = {"arguments": ""} if is_call else {"content": list[Any]()}
        in_progress = {**item, **empty, "status": "in_progress"}
        yield "output_item.added", {"output_index": index, "item": in_progress}
        if is_call:
            arguments = item["arguments"]
            yield "function_call_arguments.delta", {**place, "delta": arguments}
            yield "function_call_arguments.done", {**place, "arguments": arguments}
        else:
            [part] = item["content"]
            kind, text = part["type"], part["text"]
            place |= {"content_index": 0}
            of_text = {**place, "logprobs": part.get("logprobs", [])}
            empty_part = {**part, "text": "", "logprobs": []}
            yield "content_part.added", {**place, "part": empty_part}
            yield f"{kind}.delta", {**of_text, "delta": text}
            yield f"{kind}.done", {**of_text, "text": text}
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": index, "item": item}
    yield response["status"], {"response": response}
