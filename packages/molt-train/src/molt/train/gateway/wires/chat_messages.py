"""OpenAI Chat Completions: the messages of a request, as chat templates take them."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from molt.train.gateway.call import Message
from molt.train.gateway.call_error import CallError
from molt.train.gateway.images import refuse_url
from molt.train.gateway.wires.body import arguments_of, decode
from molt.train.gateway.wires.custom_tool import INPUT

_ROLES = {"developer": "system", "function": "tool"}


class _Function(Struct):
    name: str = ""
    arguments: str | dict[str, Any] | None = None


class _Custom(Struct):
    name: str = ""
    input: str = ""


class _Call(Struct):
    id: str = ""
    function: _Function | None = None
    custom: _Custom | None = None


class _ImageUrl(Struct):
    url: str


class _Part(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | None = None


class _ReasoningDetail(Struct):
    text: str | None = None
    summary: str | None = None


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_details: list[_ReasoningDetail] | None = None


_decode_message = msgspec.json.Decoder(_Message)


def converted(raw: bytes, where: str) -> Message:
    """The message at the path `where` of the request. Raises CallError."""
    sent = decode(_decode_message, raw, where)
    message: Message = {"role": _ROLES.get(sent.role, sent.role), "content": _text(sent.content, where)}
    if message["role"] == "tool":
        message["tool_call_id"] = sent.tool_call_id or ""
        if sent.name is not None:
            message["name"] = sent.name
    elif sent.role == "assistant":
        message["content"] = message["content"] or sent.refusal or ""
        if reasoning := sent.reasoning or sent.reasoning_content or _reasoning(sent.reasoning_details or []):
            message["reasoning_content"] = reasoning
        if calls := [_call(call) for call in sent.tool_calls or _legacy(sent.function_call)]:
            message["tool_calls"] = calls
    return message


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        path = f"{where}.content[{index}]"
        if part.image_url is not None:
            refuse_url(part.image_url.url, f"{path}.image_url.url")
        text = part.refusal if part.text is None else part.text
        if text is None:
            message = f"the model reads text only, not parts of type {part.type!r}: leave the part out"
            raise CallError("invalid_request", message, param=f"{path}.type")
        texts.append(text)
    return "\n".join(texts)


def _reasoning(details: list[_ReasoningDetail]) -> str:
    return "".join([detail.text or detail.summary or "" for detail in details])


def _legacy(call: _Function | None) -> list[_Call]:
    return [] if call is None else [_Call(function=call)]


def _call(call: _Call) -> dict[str, Any]:
    if call.custom is not None:
        name, arguments = call.custom.name, {INPUT: call.custom.input}
    else:
        function = call.function or _Function()
        name, sent = function.name, function.arguments
        # The text may be no JSON: a turn that was cut inside a call comes back as it is, and poisons no history.
        arguments = sent if isinstance(sent, dict) else arguments_of(sent or "{}")
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}
