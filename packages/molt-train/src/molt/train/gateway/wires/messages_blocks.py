"""Anthropic Messages: the content blocks of a message as chat templates take them.

What the model can read is rendered in the order sent; what it cannot is left out and counted, never refused, but for
images: an agent that sends one counts on its being seen.
"""

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import msgspec
from msgspec import Raw, Struct

from molt.train.gateway.call import Count, Message
from molt.train.gateway.images import refuse_base64, refuse_image, refuse_url
from molt.train.gateway.wires.body import decode

Role = Literal["user", "assistant", "system"]

_BILLING = "x-anthropic-billing-header"
_UNREADABLE = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)


class _Message(Struct):
    role: Role
    content: str | list[Raw]


class _Block(Struct):
    type: str


class _Text(Struct):
    text: str


class _Thinking(Struct):
    thinking: str


class _ToolUse(Struct):
    id: str
    name: str
    input: Any = None


class _ToolResult(Struct):
    tool_use_id: str
    content: str | list[Raw] | None = None
    is_error: bool | None = None


class _Source(Struct):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[Raw] = ""


class _Image(Struct):
    source: _Source


class _Document(Struct):
    source: _Source
    title: str | None = None
    context: str | None = None


class _SearchResult(Struct):
    content: list[_Text]
    title: str = ""
    source: str = ""


class _ToolReference(Struct):
    tool_name: str


class _Compaction(Struct):
    content: str | None = None


class _ChangedTool(Struct):
    name: str | None = None
    server_name: str | None = None
    definition: Any = None


class _ToolChange(Struct):
    tool: _ChangedTool


_decode_message = msgspec.json.Decoder(_Message)
_decode_block = msgspec.json.Decoder(_Block)
_decode_text = msgspec.json.Decoder(_Text)
_decode_thinking = msgspec.json.Decoder(_Thinking)
_decode_tool_use = msgspec.json.Decoder(_ToolUse)
_decode_tool_result = msgspec.json.Decoder(_ToolResult)
_decode_image = msgspec.json.Decoder(_Image)
_decode_document = msgspec.json.Decoder(_Document)
_decode_search_result = msgspec.json.Decoder(_SearchResult)
_decode_tool_reference = msgspec.json.Decoder(_ToolReference)
_decode_compaction = msgspec.json.Decoder(_Compaction)
_decode_tool_change = msgspec.json.Decoder(_ToolChange)


def role_of(raw: bytes, where: str) -> Role:
    """Who speaks in a message. Raises CallError where it is malformed."""
    return decode(_decode_message, raw, where).role


def convert_message(raw: bytes, where: str, count: Count) -> list[Message]:
    """The messages that one of a request's is for a template: a tool result is one of its own.

    `where` is its path in the request: `messages[i]`, or `system`, whose blocks are the content itself. A user's
    message of which nothing can be read is empty, since a reply is to come; one of system text is none.

    Raises:
        CallError: It is malformed, or has an image.
    """
    sent = decode(_decode_message, raw, where)
    if isinstance(sent.content, str):
        text = _without_billing_line(sent.content) if sent.role == "system" else sent.content
        return [{"role": sent.role, "content": text}] if text or sent.role != "system" else []
    path = where if where == "system" else f"{where}.content"
    blocks = [(f"{path}[{index}]", block) for index, block in enumerate(sent.content)]
    if sent.role == "assistant":
        return [_assistant(blocks, count)]
    messages = _user_or_system(sent.role, blocks, count)
    return messages or ([{"role": "user", "content": ""}] if sent.role == "user" else [])


def _user_or_system(role: Role, blocks: list[tuple[str, Raw]], count: Count) -> list[Message]:
    """Each tool result, and the texts between them, in the order sent."""
    messages: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for path, raw in blocks:
        kind = decode(_decode_block, raw, path).type
        if kind == "tool_result":
            flush()
            result = decode(_decode_tool_result, raw, path)
            text = _result_text(result, path, count)
            messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})
            continue
        text = _text_of(kind, raw, path, count)
        # Claude Code's billing block changes from request to request, and says nothing to the model.
        if text is not None and not (role == "system" and text.startswith(_BILLING)):
            texts.append(text)
    flush()
    return messages


def _assistant(blocks: list[tuple[str, Raw]], count: Count) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, raw in blocks:
        kind = decode(_decode_block, raw, path).type
        if kind == "thinking":
            thoughts.append(decode(_decode_thinking, raw, path).thinking)
        elif kind == "tool_use":
            used = decode(_decode_tool_use, raw, path)
            function = {"name": used.name, "arguments": _arguments(used.input)}
            calls.append({"id": used.id, "type": "function", "function": function})
        elif (text := _text_of(kind, raw, path, count)) is not None:
            texts.append(text)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(value: Any) -> dict[str, Any] | str:
    if value is None:
        return {}
    return value if isinstance(value, dict) else msgspec.json.encode(value).decode()


def _result_text(result: _ToolResult, path: str, count: Count) -> str:
    """Text of a tool result. A failure says so: the flag itself is nothing that a template shows."""
    text = _content_text(result.content or "", f"{path}.content", count)
    return f"Error: {text}" if result.is_error and not text.startswith("Error") else text


def _content_text(content: str | list[Raw], path: str, count: Count) -> str:
    if isinstance(content, str):
        return content
    places = [f"{path}[{index}]" for index in range(len(content))]
    found = [
        _text_of(decode(_decode_block, raw, place).type, raw, place, count)
        for place, raw in zip(places, content, strict=True)
    ]
    return "\n".join(text for text in found if text is not None)


def _text_of(kind: str, raw: Raw, path: str, count: Count) -> str | None:
    """What of a block the model can read; None, and counted, where there is nothing. Raises CallError on an image."""
    reader = _READERS.get(kind)
    text = reader(raw, path, count) if reader else None
    if text is None:
        # Names that clients make up are no names of counters.
        known = kind in _READERS or kind in _UNREADABLE
        count(f"block_dropped_{kind}" if known else "block_dropped_unknown")
    return text


def _text(raw: Raw, path: str, count: Count) -> str:  # noqa: ARG001 - all readers take the same
    return decode(_decode_text, raw, path).text


def _image(raw: Raw, path: str, count: Count) -> NoReturn:  # noqa: ARG001 - all readers take the same
    source = decode(_decode_image, raw, path).source
    path = f"{path}.source"
    if source.type == "base64":
        refuse_base64(source.data, source.media_type, f"{path}.data")
    if source.type == "url":
        refuse_url(source.url, f"{path}.url")
    refuse_image(path)


def _document(raw: Raw, path: str, count: Count) -> str | None:
    document = decode(_decode_document, raw, path)
    source = document.source
    if source.type == "text":
        text = source.data
    elif source.type == "content":
        text = _content_text(source.content, f"{path}.source.content", count)
    else:
        return None
    return "\n".join(part for part in (document.title, document.context, text) if part)


def _search_result(raw: Raw, path: str, count: Count) -> str:  # noqa: ARG001 - all readers take the same
    result = decode(_decode_search_result, raw, path)
    texts = [part.text for part in result.content]
    return "\n".join(part for part in (result.title, result.source, *texts) if part)


def _tool_reference(raw: Raw, path: str, count: Count) -> str:  # noqa: ARG001 - all readers take the same
    return decode(_decode_tool_reference, raw, path).tool_name


def _compaction(raw: Raw, path: str, count: Count) -> str | None:  # noqa: ARG001 - all readers take the same
    return decode(_decode_compaction, raw, path).content


def _tool_change(raw: Raw, path: str, *, now: str) -> str | None:
    tool = decode(_decode_tool_change, raw, path).tool
    if isinstance(tool.definition, dict):
        return f"This tool is {now}: {msgspec.json.encode(tool.definition).decode()}"
    name = ".".join(part for part in (tool.server_name, tool.name) if part)
    return f"The tool {name} is {now}." if name else None


_READERS: dict[str, Callable[[Raw, str, Count], str | None]] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
    "tool_addition": lambda raw, path, _: _tool_change(raw, path, now="available from here on"),
    "tool_removal": lambda raw, path, _: _tool_change(raw, path, now="no longer available"),
    "compaction": _compaction,
}


def _without_billing_line(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text
