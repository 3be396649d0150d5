"""Calls are read as vLLM's parsers read them, which serve the trained model."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.support.call_templates import TEMPLATES, rendered
from tests.support.chats import make_chat_tokenizer
from torchrl_grpo.chat.template import TurnTemplate
from torchrl_grpo.integrations.call_formats import parse_turn, recognize

PARSERS = {
    "hermes": "hermes",
    "mistral_list": "mistral",
    "mistral_args": "mistral",
    "llama": "llama3_json",
    "granite": "granite",
    "jamba": "jamba",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek_dsml": "deepseek_v32",
    "kimi": "kimi_k2",
    "lfm2": "lfm2",
    "olmo": "olmo3",
    "llama4": "llama4_pythonic",
    "qwen_xml": "qwen3_coder",
    "glm": "glm47",
    "gemma": "gemma4",
    "minimax": "minimax_m2",
}
"""vLLM's parser for each format; it has none for the others, or none that runs without a download."""

TYPES = {
    "text": "string",
    "padded": "string",
    "digits": "string",
    "count": "integer",
    "ratio": "number",
    "flag": "boolean",
    "items": "array",
    "options": "object",
}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"text": "a \"b\" 'c'\n\\ <x> é你", "padded": " a\n\nb ", "digits": "007"},
    {"count": -3, "ratio": 0.5, "flag": True, "items": ["a", {"b": []}], "options": {"k": {}}},
]
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call|>",
    "<tool_calls>",
    "</tool_calls>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<function_calls>",
    "</function_calls>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    *(
        f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"
        for name in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
    ),
    "<\uff5cDSML\uff5cfunction_calls>",
    "</\uff5cDSML\uff5cfunction_calls>",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", PARSERS)
def test_calls_are_those_of_vllms_parser(name: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionToolsParam,
    )
    from vllm.tool_parsers import ToolParserManager

    tokenizer = copy.deepcopy(make_chat_tokenizer("qwen-3"))
    tokenizer.chat_template = TEMPLATES[name]
    properties = {key: {"type": kind} for key, kind in TYPES.items()}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    form = recognize(TurnTemplate(tokenizer, {}).chat_text, None)
    calls = [{"name": "f", "arguments": arguments} for arguments in ARGUMENTS]
    text = rendered(tokenizer, *calls).removesuffix("<|im_end|>\n")
    marks = [*MARKS, *(["[ARGS]"] if name == "mistral_args" else [])]
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    parser = ToolParserManager.get_tool_parser(PARSERS[name])(
        tokenizer, [ChatCompletionToolsParam(**tool) for tool in tools]
    )
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "?"}], model="m", tools=tools
    )
    theirs = parser.extract_tool_calls(text, request).tool_calls
    ours = parse_turn(text, "", form, tools).calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in theirs] == [
        (call.name, call.arguments) for call in ours
    ]
    assert [call.arguments for call in ours] == ARGUMENTS
