"""OpenAI Responses: folded input items to messages as chat templates take them."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from molt.train.gateway.call import Count, Message
from molt.train.gateway.call_error import CallError
from molt.train.gateway.images import refuse_url
from molt.train.gateway.wires.body import arguments_of, decode, present
from molt.train.gateway.wires.responses_items import HOSTED_CALLS, NATIVE_CALLS, decode_kind, issuer, split
from molt.train.gateway.wires.responses_tools import flat_name

_NULL = Raw(b"null")
_OUTPUTS = {
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "computer_call_output": "output",
    "tool_search_output": "tools",
}
"""The field that says what a tool gave."""
_SKIPPED = HOSTED_CALLS | {"compaction", "compaction_trigger", "mcp_approval_response", "additional_tools"}
"""Known items that say nothing this model could read."""
_TEXT_PARTS = frozenset(("input_text", "output_text", "text", "reasoning_text", "summary_text"))
_OTHER_PARTS = frozenset(("refusal", "input_image", "input_file", "input_audio"))


class _Part(Struct):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class _Message(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part] | None = None


class _Reasoning(Struct):
    content: list[_Part] | None = None
    summary: list[_Part] | None = None


class _Call(Struct):
    name: str | None = None
    namespace: str | None = None
    call_id: str | None = None
    arguments: Any = None
    input: str | None = None
    action: Any = None
    operation: Any = None


class _Output(Struct):
    call_id: str | None = None
    output: Raw = _NULL
    tools: Raw = _NULL


class _Screenshot(Struct):
    image_url: str = ""


_decode_message = msgspec.json.Decoder(_Message)
_decode_reasoning = msgspec.json.Decoder(_Reasoning)
_decode_call = msgspec.json.Decoder(_Call)
_decode_output = msgspec.json.Decoder(_Output)
_decode_parts = msgspec.json.Decoder(list[_Part])
_decode_screenshot = msgspec.json.Decoder(_Screenshot)


def messages_of(raw: bytes, where: str, count: Count) -> list[Message]:
    """The messages of one of `Folded.messages`; `where` is the path of its first item.

    Items that say nothing to the model are skipped and counted.

    Raises:
        CallError: An item is malformed, or shows an image, a file or sound.
    """
    if raw.startswith(b"["):
        return _assistant(split(raw), where, count)
    kind = decode(decode_kind, raw, where)
    if kind.is_message:
        sent = decode(_decode_message, raw, where)
        role = "system" if sent.role == "developer" else sent.role
        return [{"role": role, "content": _text(sent.content, where, count)}]
    if kind.type in _OUTPUTS:
        return [_tool_result(raw, _OUTPUTS[kind.type], where, count)]
    if kind.type is None:
        raise CallError("invalid_request", "the item has neither a type nor a role: give one", param=where)
    _skip(kind.type, count)
    return []


def _assistant(items: Sequence[bytes], where: str, count: Count) -> list[Message]:
    """The one message of an assistant turn; none where all of it is skipped."""
    texts, thoughts, calls, num_skipped, turn_id = [], [], [], 0, None
    for raw, path in zip(items, _paths(where, len(items)), strict=True):
        kind = decode(decode_kind, raw, path)
        turn_id = turn_id or issuer(kind.id)
        if kind.is_message:
            texts.append(_text(decode(_decode_message, raw, path).content, path, count))
        elif kind.type == "reasoning":
            sent = decode(_decode_reasoning, raw, path)
            thoughts += [part.text for part in sent.content or sent.summary or () if part.text]
        elif kind.type in HOSTED_CALLS:
            _skip(kind.type, count)
            num_skipped += 1
        else:
            calls.append(_call(decode(_decode_call, raw, path), kind.type or ""))
    if num_skipped == len(items):
        return []
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, texts))}
    if turn_id:
        message["turn_id"] = turn_id
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _paths(where: str, num_items: int) -> list[str]:
    """The paths of items that follow each other, the first at `where`."""
    before, _, first = where.removesuffix("]").rpartition("[")
    return [f"{before}[{int(first) + offset}]" if first.isdecimal() else where for offset in range(num_items)]


def _call(sent: _Call, kind: str) -> dict[str, Any]:
    name, arguments = flat_name(sent.namespace, sent.name or ""), sent.arguments
    if kind == "custom_tool_call":
        arguments = {"input": sent.input or ""}
    elif kind in NATIVE_CALLS:
        name, field = NATIVE_CALLS[kind]
        arguments = getattr(sent, field)
    if isinstance(arguments, str | None):
        arguments = arguments_of(arguments or "{}")
    elif not isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    return {"id": sent.call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(raw: bytes, field: str, where: str, count: Count) -> Message:
    sent = decode(_decode_output, raw, where)
    return {
        "role": "tool",
        "tool_call_id": sent.call_id or "",
        "content": _output(present(getattr(sent, field)) or b'""', f"{where}.{field}", count),
    }


def _output(sent: bytes, where: str, count: Count) -> str:
    """What a tool gave: the text of a string or of parts; other JSON as it is."""
    if sent.startswith(b'"'):
        return msgspec.json.decode(sent, type=str)
    if sent.startswith(b"{") and decode(decode_kind, sent, where).type == "computer_screenshot":
        refuse_url(decode(_decode_screenshot, sent, where).image_url, f"{where}.image_url")
    if sent.startswith(b"["):
        kinds = msgspec.json.decode(sent)
        if all(isinstance(part, dict) and part.get("type") in _TEXT_PARTS | _OTHER_PARTS for part in kinds):
            return _joined(decode(_decode_parts, sent, where), where, count)
    return sent.decode()


def _text(content: str | list[_Part] | None, where: str, count: Count) -> str:
    return content or "" if isinstance(content, str | None) else _joined(content, f"{where}.content", count)


def _joined(parts: Sequence[_Part], where: str, count: Count) -> str:
    texts = []
    for index, part in enumerate(parts):
        if part.type in _TEXT_PARTS:
            texts.append(part.text or "")
        elif part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type == "input_image":
            refuse_url(part.image_url or "", f"{where}[{index}].image_url")
        elif part.type in _OTHER_PARTS:
            message = f"the model reads text only, not parts of type {part.type!r}"
            raise CallError("invalid_request", message, param=f"{where}[{index}].type")
        else:
            count("part_skipped")
    return "\n".join(texts)


def _skip(kind: str, count: Count) -> None:
    count(f"item_skipped.{kind if kind in _SKIPPED else 'unknown'}")
