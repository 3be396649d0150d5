"""Chat templates that write tool calls, one for each documented format: written here, in the form
that the format's documentation describes.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_grpo.chat.template import TurnTemplate

_EACH = "{% for call in m.tool_calls %}{% set f = call.function %}"
_JSON = '{"name": "{{ f.name }}", "KEY": {{ f.arguments | tojson }}}'
_LIST = "[" + _EACH + _JSON + "{{ ', ' if not loop.last }}{% endfor %}]"  # as text, KEY is replaced
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
    "{% endfor %})"
)
_TEXT = "{{ v if v is string else (v | tojson if v is mapping or v is iterable else v | string) }}"
_JSON_TEXT = "{{ v if v is string else v | tojson }}"
_PAIRS = "{% for k, v in f.arguments.items() %}"
_DSML = "\uff5cDSML\uff5c"


def _deep(name: str) -> str:
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


CALLS = {
    "hermes": _EACH
    + "\n<tool_call>\n"
    + _JSON.replace("KEY", "arguments")
    + "\n</tool_call>{% endfor %}",
    "mistral_list": "[TOOL_CALLS]" + _LIST.replace("KEY", "arguments"),
    "mistral_args": _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "mistral_call_id": _EACH
    + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "llama": _EACH + _JSON.replace("KEY", "parameters") + "{{ '; ' if not loop.last }}{% endfor %}",
    "nemotron": "<TOOLCALL>" + _LIST.replace("KEY", "arguments") + "</TOOLCALL>",
    "granite": "<|tool_call|>" + _LIST.replace("KEY", "arguments"),
    "jamba": "<tool_calls>" + _LIST.replace("KEY", "arguments") + "</tool_calls>",
    "command": "<|START_ACTION|>"
    + _LIST.replace("KEY", "parameters").replace('"name"', '"tool_name"')
    + "<|END_ACTION|>",
    "deepseek_v3": _deep("tool calls begin")
    + _EACH
    + f"{_deep('tool call begin')}function{_deep('tool sep')}{{{{ f.name }}}}\n```json\n"
    + "{{ f.arguments | tojson }}\n```"
    + f"{_deep('tool call end')}{{% endfor %}}{_deep('tool calls end')}",
    "deepseek_v31": _deep("tool calls begin")
    + _EACH
    + f"{_deep('tool call begin')}{{{{ f.name }}}}{_deep('tool sep')}{{{{ f.arguments | tojson }}}}"
    + f"{_deep('tool call end')}{{% endfor %}}{_deep('tool calls end')}",
    "deepseek_dsml": f'<{_DSML}function_calls>\n{_EACH}<{_DSML}invoke name="{{{{ f.name }}}}">\n{_PAIRS}'
    f"<{_DSML}parameter name=\"{{{{ k }}}}\" string=\"{{{{ 'true' if v is string else 'false' }}}}\">{_JSON_TEXT}"
    f"</{_DSML}parameter>\n{{% endfor %}}</{_DSML}invoke>\n{{% endfor %}}</{_DSML}function_calls>",
    "kimi": "<|tool_calls_section_begin|>"
    + _EACH
    + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "lfm2": "<|tool_call_start|>["
    + _EACH
    + _PYTHON
    + "{{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
    "olmo": "<function_calls>" + _EACH + _PYTHON + "\n{% endfor %}</function_calls>",
    "llama4": "[" + _EACH + _PYTHON + "{{ ', ' if not loop.last }}{% endfor %}]",
    "qwen_xml": _EACH
    + "\n<tool_call>\n<function={{ f.name }}>\n"
    + _PAIRS
    + f"<parameter={{{{ k }}}}>\n{_TEXT}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}",
    "glm": _EACH
    + "\n<tool_call>{{ f.name }}\n"
    + _PAIRS
    + f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_JSON_TEXT}</arg_value>\n{{% endfor %}}"
    "</tool_call>{% endfor %}",
    "glm4": _EACH
    + "{{ '<|assistant|>' if not loop.first }}{{ f.name }}\n{{ f.arguments | tojson }}{% endfor %}",
    "gemma": _EACH
    + "<|tool_call>call:{{ f.name }}{{ written(f.arguments) }}<tool_call|>{% endfor %}",
    "functiongemma": _EACH
    + "<start_function_call>call:{{ f.name }}{{ written(f.arguments) }}<end_function_call>{% endfor %}",
    "minimax": "<minimax:tool_call>\n"
    + _EACH
    + '<invoke name="{{ f.name }}">\n'
    + _PAIRS
    + f'<parameter name="{{{{ k }}}}">{_JSON_TEXT}</parameter>\n{{% endfor %}}</invoke>\n{{% endfor %}}'
    "</minimax:tool_call>",
}
"""How each format writes the calls of a message."""

_CHATML = (
    "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n"
    "{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(name=none) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('a result needs a call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_WRITTEN = (
    "{% macro written(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ k }}:{{ written(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for w in v %}{{ written(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
_QUOTES = {"gemma": '<|"|>', "functiongemma": "<escape>"}


def chatml(calls: str, quote: str = "") -> str:
    """Return a chat template of ChatML that writes calls in this way."""
    return _WRITTEN.replace("QUOTE", quote) + _CHATML.format(calls=calls)


TEMPLATES = {name: chatml(calls, _QUOTES.get(name, "")) for name, calls in CALLS.items()}
TEMPLATES["harmony"] = HARMONY


def rendered(tokenizer: PreTrainedTokenizerBase, *calls: dict[str, Any]) -> str:
    """Return the assistant's turn that calls tools, as the template writes it."""
    tool_calls = [
        {"type": "function", "id": f"call{index:05d}", "function": call}
        for index, call in enumerate(calls)
    ]
    user = {"role": "user", "content": "?"}
    chat: list[dict[str, Any]] = [
        user,
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
    ]
    text = TurnTemplate(tokenizer, {}).chat_text(chat)
    before = TurnTemplate(tokenizer, {}).chat_text([user])
    return text.removeprefix(before).removeprefix("<|im_start|>assistant\n")
