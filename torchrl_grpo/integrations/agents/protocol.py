"""OpenAI's wire format: parses the requests of agents and writes the policy's turns as answers.
Requests and answers of other APIs are translated to and from it.

Requests that cannot be honored are refused. ``temperature``, ``top_p`` and other options that would
change the sampled distribution are accepted and ignored, because the run trains its own
distribution. Source: OpenAI's API reference, chat completions and completions.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

from torchrl_grpo.host.text import replace_lone_surrogates
from torchrl_grpo.images import ImageFile, text_of
from torchrl_grpo.integrations import anthropic, responses
from torchrl_grpo.integrations.call_formats import parse_turn
from torchrl_grpo.tasks.base import Dialog, Message, TurnLimits
from torchrl_grpo.tools.toolbox import Parser, ToolCall

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
ANTHROPIC, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = (CHAT, TEXT, RESPONSES, ANTHROPIC, COUNT)
APIS = {RESPONSES: responses, ANTHROPIC: anthropic, COUNT: anthropic}
"""For each path of another API, the module that translates its requests and answers."""
MODEL = "policy"
T = TypeVar("T")

IMAGE_ROLES = ("user", "tool")
"""Roles whose messages may have images."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_STOPS = 4
_MAX_STOP_BYTES = 256
_MAX_DEPTH = 100
"""Maximum nesting of JSON, because chat templates, and the code that reads a chat before them,
recurse.
"""
_MAX_CHARACTERS = 500_000
"""Maximum size of a chat and its tools as JSON, without images, because a worker's answers are
limited.
"""
_FIXED = {
    "n": (1, "send one request per answer"),
    "best_of": (1, "leave it out"),
    "echo": (False, "leave it out"),
    "suffix": (None, "leave it out"),
    "logit_bias": (None, "leave it out, because the policy's own distribution is trained"),
    "response_format": ("text", "describe the form of the answer in the prompt"),
    "functions": (None, "use tools"),
    "function_call": (None, "use tools"),
    "background": (False, "wait for the answer"),
    "context_management": (None, "send a shorter input"),
    "conversation": (None, "use previous_response_id"),
    "prompt_template": (None, "use instructions and input"),
    "truncation": ("disabled", "send a shorter input"),
}
"""Fields with a single supported value, and the fix for other values."""


class BadRequest(Exception):
    """A refused request, as answered by OpenAI's servers.

    Args:
        message: field, rule, value and fix.
        param: the field.
        status: HTTP status.
        code: OpenAI's error code.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code

    def body(self, path: str = CHAT) -> dict[str, Any]:
        """Return the error in the form of the path's own API."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        message, param = str(self), self.param
        api = APIS.get(path)
        if api and param and param in api.NAMES:
            message = message.replace(param, api.NAMES[param], 1)
            param = api.NAMES[param]
        if api is anthropic:
            return {"type": "error", "error": {"type": kind, "message": message}}
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


@dataclass(frozen=True)
class Request:
    """Request of an agent to the policy.

    Attributes:
        messages: the chat in the form of chat templates; for a completion, one message without a
            role that has its text.
        tools: JSON schemas.
        limits: limits of the policy's turn.
        stream: whether the answer is an event stream.
        usage: whether the stream ends with the token usage.
        path: one of ``PATHS``.
        model: the agent's name for the policy.
        fields: all fields as sent.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    limits: TurnLimits = field(default_factory=TurnLimits)
    stream: bool = False
    usage: bool = False
    path: str = CHAT
    model: str = MODEL
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_instructions(self) -> int:
        """Number of messages before the input, which later requests do not inherit."""
        return int(bool(self.fields.get("instructions")))

    def after(self, history: Sequence[Message]) -> Request:
        """Return the request with an earlier chat before its input.

        Raises:
            BadRequest: the whole chat is too large.
        """
        count = self.num_instructions
        messages = [*self.messages[:count], *history, *self.messages[count:]]
        _check_size(messages, self.tools)
        return replace(self, messages=messages)


def parse_request(path: str, body: bytes) -> Request:
    """Parse and check a request completely, before it is used.

    Raises:
        BadRequest: it cannot be honored.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body must be UTF-8, but it is not ({error}): encode it.") from error
    fields = parse_json(text, "the body")
    if not isinstance(fields, dict):
        raise BadRequest(f"the body must be an object, but it is {text[:60]!r}: send an object.")
    message_names: Sequence[str] = ()
    own_fields = fields
    if api := APIS.get(path):
        fields, message_names = api.as_openai(fields)
    for name, (supported, fix) in _FIXED.items():
        value = fields.get(name)
        if name == "response_format" and isinstance(value, dict):
            value = value.get("type")
        if value not in (None, supported, {}, []):
            message = f"{name}={value!s:.60} must be {json.dumps(supported)}: {fix}."
            raise BadRequest(message, name)
    chat = path != TEXT
    stream = _flag(fields, "stream")
    options = _optional(fields, "stream_options", dict, "must be an object: leave it out") or {}
    messages = (
        _messages(fields, message_names) if chat else [{"role": "", "content": _prompt(fields)}]
    )
    tools = _tools(fields) if chat else []
    _check_size(messages, tools)
    return Request(
        messages=messages,
        tools=tools,
        limits=TurnLimits(_max_tokens(fields, chat), _stops(fields), _log_probs(fields, chat)),
        stream=stream,
        usage=stream and _flag(options, "include_usage"),
        path=path,
        model=_text(fields, "model", "model") or MODEL,
        fields=own_fields,
    )


def _check_size(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
    if (size := len(json.dumps([messages, tools], default=lambda image: ""))) > _MAX_CHARACTERS:
        raise BadRequest(
            f"messages and tools must have at most {_MAX_CHARACTERS:,} characters as JSON, but "
            f"they have {size:,}: send a shorter chat.",
            "messages",
            status=413,
            code="context_length_exceeded",
        )


def parse_json(text: str, field: str) -> Any:
    """Parse JSON, without deep nesting, NaN, or lone surrogates (which are replaced).

    Raises:
        BadRequest: the text is something else.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            value = json.loads(replace_lone_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            f"{field} must be JSON, but it is not ({error}): send an object.", field
        ) from error
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        level = [
            entry
            for part in level
            if isinstance(part, dict | list)
            for entry in (part.values() if isinstance(part, dict) else part)
        ]
    if level:
        raise BadRequest(
            f"{field} must be nested at most {_MAX_DEPTH} levels deep: send less.",
            field,
        )
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.20} is too large")
    return value


def _messages(fields: Mapping[str, Any], names: Sequence[str]) -> list[Message]:
    """Return the chat; ``names`` name its messages in errors; by default their positions do."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(
            f"messages={messages!s:.60} must be a list with at least one message: send a message.",
            "messages",
        )
    names = names or [f"messages[{number}]" for number in range(len(messages))]
    return [_message(message, place) for message, place in zip(messages, names, strict=True)]


def _message(value: Any, field: str) -> Message:
    """Return a message in canonical form, so that equivalent messages are equal."""
    if not isinstance(value, dict):
        raise BadRequest(f"{field}={value!s:.60} must be an object: send a message.", field)
    role = value.get("role")
    if role is None and "type" in value:
        raise BadRequest(
            f"{field}.type={value['type']!s:.60} must be message, reasoning, function_call or "
            "function_call_output: leave other items out.",
            field,
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(
            f"{field}.role={role!s:.60} must be one of {', '.join(_ROLES)}: use one of them.", field
        )
    role = "system" if role == "developer" else role
    content = value.get("content")
    if isinstance(content, list):
        content = _content(content, role, f"{field}.content")
    is_absent = content is None and role in ("assistant", "tool")
    if not (isinstance(content, str | list) or is_absent):
        raise BadRequest(f"{field}.content={content!s:.60} must be text: send a string.", field)
    if value.get("function_call") is not None:
        raise BadRequest(f"{field}.function_call must be left out: use tool_calls.", field)
    message: Message = {"role": role, "content": content or ""}
    if calls := value.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRequest(
                f"{field}.tool_calls={calls!s:.60} must be a list: send back the calls of the "
                "answer.",
                field,
            )
        if role != "assistant":
            raise BadRequest(
                f"{field}.tool_calls must be the assistant's, not the {role}'s: leave it out.",
                field,
            )
        message["tool_calls"] = [_call(call, f"{field}.tool_calls") for call in calls]
    if isinstance(thought := value.get("reasoning_content"), list):
        value = value | {"reasoning_content": _content(thought, "", f"{field}.reasoning_content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if text := _text(value, name, f"{field}.{name}"):
            message[name] = text
    return message


def _content(parts: Sequence[Any], role: str, field: str) -> str | list[dict[str, Any]]:
    """Return the parts of a content as text or, with images, as texts and images."""
    content: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            content.append({"type": "text", "text": part["text"]})
        elif kind == "image_url" and role in IMAGE_ROLES:
            content.append({"type": "image", "image": _image(part.get("image_url"), field)})
        else:
            raise BadRequest(
                f"{field} must be texts and, in messages of the roles {' and '.join(IMAGE_ROLES)}, "
                f"images, but it has {part!s:.60}: leave other parts out.",
                field,
            )
    has_images = any(part["type"] == "image" for part in content)
    return content if has_images else text_of(content)


def _image(value: Any, field: str) -> ImageFile:
    """Return the image of a data URL; its episode checks that it can be read, once."""
    url = value.get("url") if isinstance(value, dict) else value
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise BadRequest(
            f"{field} must have images as data URLs, but it has {url!s:.60}: send the image itself "
            "as data:image/png;base64,..., because no URL is fetched.",
            field,
        )
    try:
        return ImageFile(b64decode(data, validate=True))
    except ValueError as error:
        raise BadRequest(f"{field} must have images in base64: {error}", field) from error


def with_data_urls(value: Any) -> Any:
    """Return a nested value with its images as a request has them: parts of messages as
    ``image_url``, and others as data URLs.
    """
    if isinstance(value, ImageFile):
        return f"data:{value.media_type};base64,{b64encode(value.data).decode()}"
    if isinstance(value, list):
        return [with_data_urls(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("image"), ImageFile) and value.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": with_data_urls(value["image"])}}
    return {name: with_data_urls(entry) for name, entry in value.items()}


def _call(value: Any, field: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which chat templates expect."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(
            f"{field} must be calls of named functions: send back the calls of the answer.",
            field,
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{field}.arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"{field}.arguments={arguments!s:.60} must be an object or its JSON: send back the "
            "calls of the answer.",
            field,
        )
    call = {"name": function["name"], "arguments": arguments}
    return {"id": _text(value, "id", f"{field}.id"), "type": "function", "function": call}


def _prompt(fields: Mapping[str, Any]) -> str:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise BadRequest(
            f"prompt={prompt!s:.60} must be one non-empty text: send one request per prompt.",
            "prompt",
        )
    return prompt


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = fields.get("tools") or []
    choice = fields.get("tool_choice")
    others = [tools] if not isinstance(tools, list) else [t for t in tools if not _is_function(t)]
    if others:
        raise BadRequest(
            f"tools must be a list of functions with names, but has {others[0]!s:.60}: send their "
            "JSON schemas.",
            "tools",
        )
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice={choice!s:.60} must be auto or none: leave it out, because the policy "
            "chooses.",
            "tool_choice",
        )
    return [] if choice == "none" else tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return (
        isinstance(function, dict)
        and tool.get("type", "function") == "function"
        and isinstance(function.get("name"), str)
        and isinstance(function.get("description"), str | None)
        and isinstance(function.get("parameters"), dict | None)
    )


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    are_texts = isinstance(stops, list) and all(isinstance(text, str) and text for text in stops)
    num_bytes = sum(len(text.encode()) for text in stops) if are_texts else 0
    if not are_texts or len(stops) > _MAX_STOPS or num_bytes > _MAX_STOP_BYTES:
        raise BadRequest(
            f"stop={stop!s:.60} must be at most {_MAX_STOPS} non-empty texts of at most "
            f"{_MAX_STOP_BYTES} bytes in total: use fewer.",
            "stop",
        )
    return tuple(stops)


def _max_tokens(fields: Mapping[str, Any], chat: bool) -> int | None:
    name = "max_completion_tokens"
    if not chat or fields.get(name) is None:
        name = "max_tokens"
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise BadRequest(
            f"{name}={value!s:.60} must be an integer of at least 1: for example, 256.", name
        )
    return value


def _log_probs(fields: Mapping[str, Any], chat: bool) -> bool:
    """Return whether the answer has the log-probs of sampled tokens; others are unknown."""
    if not chat:
        value = fields.get("logprobs")
        if value not in (None, 0, 1) or value is True:
            raise BadRequest(
                f"logprobs={value!s:.60} must be 0, 1 or null: use 1, because log-probs of other "
                "tokens are unknown.",
                "logprobs",
            )
        return value is not None
    if fields.get("top_logprobs"):
        raise BadRequest(
            f"top_logprobs={fields['top_logprobs']!s:.60} must be 0: leave it out, because "
            "log-probs of other tokens are unknown.",
            "top_logprobs",
        )
    return _flag(fields, "logprobs")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return bool(_optional(fields, name, bool, "must be true or false: use one of them"))


def _text(fields: Mapping[str, Any], name: str, field: str) -> str:
    return _optional(fields, name, str, "must be text: send a string", field) or ""


def _optional(
    fields: Mapping[str, Any], name: str, kind: type[T], rule: str, field: str = ""
) -> T | None:
    """Return an optional field, after checking its type."""
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        field = field or name
        raise BadRequest(f"{field}={value!s:.60} {rule}.", field)
    return value


@dataclass(frozen=True)
class Answer:
    """The policy's turn as the answer to an agent.

    Attributes:
        request: the request that it answers.
        text: text without the stop string or token that ended it and, for APIs that return thoughts
            separately, without the thought.
        calls: tool calls, with arguments as the policy wrote them.
        finish_reason: finish reason in OpenAI's terms.
        dialog: the dialog with the turn's tokens and, if requested, their log-probs.
        number: index of the answer in its episode.
        stop: the request's stop string that ended the turn, if any.
        thought: the thought at the beginning of the turn, for APIs that return it separately.
    """

    request: Request
    text: str
    calls: Sequence[dict[str, Any]]
    finish_reason: str
    dialog: Dialog
    number: int
    stop: str | None = None
    thought: str = ""

    @classmethod
    def of(cls, request: Request, dialog: Dialog, number: int, parser: Parser | None) -> Answer:
        """Return the latest turn of a dialog as the answer to a request."""
        text, raw = dialog.responses[-1], dialog.raw
        reason = str(dialog.finish_reason)
        thought = ""
        stop: str | None = None
        calls: Sequence[dict[str, Any]] = []
        if reason == "stop":
            stops = [(text.find(stop), stop) for stop in request.limits.stop if stop in text]
            if stops:
                position, stop = min(stops)
                raw = raw.removesuffix(text[position:])
                text = text[:position]
            if request.tools:
                calls = _sampled_calls(dialog.calls(request.tools, parser), number)
        turn = parse_turn(raw, dialog.prefill, dialog.call_format)
        if calls:
            reason = "tool_calls"
            text = turn.content if turn.calls else ""
        if request.path == RESPONSES and turn.thought:
            thought = turn.thought
            text = turn.spoken if turn.calls or not calls else ""
        return cls(request, text, calls, reason, dialog, number, stop, thought)

    @property
    def message(self) -> Message:
        """Return the answer as a message of a later request."""
        if self.request.path == TEXT:
            return {"role": "", "content": self.text}
        message = {"role": "assistant", "content": self.text, "tool_calls": list(self.calls)}
        return _message(message | {"reasoning_content": self.thought}, "the answer")

    def body(self) -> dict[str, Any]:
        """Return the answer as one object."""
        if api := APIS.get(self.request.path):
            return api.body(self)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self.finish_reason,
            "logprobs": self.log_probs,
        }
        if self.request.path == CHAT:
            choice["message"] = {
                "role": "assistant",
                "content": self.text or (None if self.calls else ""),
            }
            choice["message"] |= {"tool_calls": list(self.calls)} if self.calls else {}
        else:
            choice["text"] = self.text
        return self._head("") | {"choices": [choice], "usage": self._usage()}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the answer as a few stream events; all of it is known at once."""
        if api := APIS.get(self.request.path):
            yield from api.events(self.body())
            return
        choice = self.body()["choices"][0]
        head = self._head(".chunk")
        first: dict[str, Any] = {"text": choice.get("text")}
        last: dict[str, Any] = {"text": ""}
        if self.request.path == CHAT:
            delta = choice["message"]
            if self.calls:
                delta["tool_calls"] = [
                    call | {"index": index} for index, call in enumerate(self.calls)
                ]
            first = {"delta": delta}
            last = {"delta": {}}
        first |= {"index": 0, "logprobs": choice["logprobs"], "finish_reason": None}
        last |= {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        yield head | {"choices": [first]}
        yield head | {"choices": [last]}
        if self.request.usage:
            yield head | {"choices": [], "usage": self._usage()}

    def _head(self, chunk: str) -> dict[str, Any]:
        kind = "text_completion"
        name = "cmpl"
        if self.request.path == CHAT:
            kind = f"chat.completion{chunk}"
            name = "chatcmpl"
        return {
            "id": f"{name}-{self.number}",
            "object": kind,
            "created": 0,
            "model": self.request.model,
        }

    def _usage(self) -> dict[str, int]:
        prompt, sampled = self.dialog.prompt_tokens, len(self.dialog.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    @property
    def log_probs(self) -> dict[str, Any] | None:
        """Log-probs of the turn's tokens; None if the request did not ask for them."""
        if not self.request.limits.log_probs:
            return None
        pieces = self.dialog.log_probs
        if self.request.path == TEXT:
            texts = [text for text, _ in pieces]
            offsets = list(accumulate(map(len, texts[:-1]), initial=0)) if texts else []
            return {
                "tokens": texts,
                "token_logprobs": [value for _, value in pieces],
                "top_logprobs": None,
                "text_offset": offsets,
            }
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in pieces
            ],
            "refusal": None,
        }


def _sampled_calls(calls: Sequence[ToolCall], number: int) -> list[dict[str, Any]]:
    """Return the policy's calls in OpenAI's form, or no calls if a later request could not contain
    one of them.
    """
    texts = []
    for call in calls:
        try:
            text = replace_lone_surrogates(json.dumps(call.arguments, ensure_ascii=False))
            if call.error or not isinstance(parse_json(text, "arguments"), dict):
                return []
        except (BadRequest, RecursionError):
            return []
        texts.append(text)
    return [
        {
            # 9 characters, as Mistral's templates require.
            "id": f"call{number % 1000:03d}{index % 100:02d}",
            "type": "function",
            "function": {"name": replace_lone_surrogates(call.name), "arguments": text},
        }
        for index, (call, text) in enumerate(zip(calls, texts, strict=True))
    ]


def models() -> dict[str, Any]:
    """Return the list of models, which has one."""
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "torchrl_grpo"}],
    }
