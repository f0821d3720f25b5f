"""OpenAI Chat Completions: the tools of a request, and what its `tool_choice` asks for."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from molt.train.gateway.call import Count, ToolChoice
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import decode, present
from molt.train.gateway.wires.custom_tool import as_function
from molt.train.gateway.wires.openai_fields import ABSENT

_MODES = ("auto", "none", "required")
_encode = msgspec.json.Encoder().encode


class _Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def schema(self) -> dict[str, Any]:
        """As chat templates take it."""
        shown = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in shown.items() if value is not None}}


class _Custom(Struct):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class _Tool(Struct):
    type: str = "function"
    function: _Function | None = None
    custom: _Custom | None = None


class _Named(Struct):
    name: str


class _AllowedTool(Struct):
    function: _Named | None = None
    custom: _Named | None = None


class _AllowedTools(Struct):
    tools: list[_AllowedTool]
    mode: str = "auto"


class _Choice(Struct):
    type: str
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _AllowedTools | None = None


_decode_tools = msgspec.json.Decoder(list[_Tool] | None)
_decode_choice = msgspec.json.Decoder(str | _Choice)
_decode_legacy_choice = msgspec.json.Decoder(str | _Named)


class Offered(Struct, frozen=True):
    """Names of a request's tools."""

    names: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()
    strict: tuple[str, ...] = ()
    """Functions whose arguments must follow their schema."""


_NONE_SPECIAL = Offered()


class ChosenTools(Struct, frozen=True, kw_only=True):
    """What `tool_choice` asks for."""

    choice: ToolChoice
    names_one: bool = False
    """It names a tool: a reply that calls it ends with `stop`."""


NO_TOOLS = bytes(ABSENT)
_FREE = ChosenTools(choice=ToolChoice())
_ONE_CALL = ChosenTools(choice=ToolChoice(max_calls=1))


def tools_sent(tools: Raw, functions: Sequence[Raw] | None) -> bytes:
    """The tools as JSON. Agents from before `tools` send `functions`."""
    if not functions or present(tools) is not None:
        return bytes(tools)
    return _encode([{"type": "function", "function": function} for function in functions])


def schemas(raw: bytes, count: Count) -> list[dict[str, Any]]:
    """The tools as function schemas. Raises CallError."""
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(decode(_decode_tools, raw, "tools") or ()):
        if tool.type == "function" and tool.function is not None:
            found.append(tool.function.schema())
        elif tool.type == "custom" and tool.custom is not None:
            if (tool.custom.format or {}).get("type") == "grammar":
                count("custom_grammar_not_enforced")
            found.append(as_function(tool.custom.name, tool.custom.description))
        else:
            message = f"a tool of type {tool.type!r} is not served: send a function or custom tool, and its description"
            raise CallError("invalid_request", message, param=f"tools[{index}]")
    return found


def special(raw: bytes) -> Offered:
    """The names where a tool is custom or strict, else none: most lists of tools need not be read again for it."""
    return _offered(raw) if b'"custom"' in raw or b'"strict"' in raw else _NONE_SPECIAL


def chosen(raw: Raw, legacy: Raw, tools: bytes, *, parallel: bool) -> ChosenTools:
    """What `tool_choice`, or `function_call` before it, asks for.

    Raises:
        CallError: It is of no known form, names a tool that is not offered, or requires a call where none is offered.
    """
    if raw is ABSENT and legacy is ABSENT and tools == NO_TOOLS:
        return _FREE if parallel else _ONE_CALL
    field, sent = _sent(raw, legacy)
    max_calls, strict = None if parallel else 1, special(tools).strict
    if isinstance(sent, str):
        if sent not in _MODES:
            raise _refused(f"{field} {sent!r} is not served: use {', '.join(_MODES)}, or name a tool", field)
        if sent == "required" and not _offered(tools).names:
            raise _refused(f"{field} is required, and no tools are offered: send tools", field)
        return ChosenTools(choice=ToolChoice(mode=sent, max_calls=max_calls, strict=strict))
    if named := sent.function or sent.custom:
        _check_offered((named.name,), tools, field)
        choice = ToolChoice(mode="required", names=(named.name,), max_calls=1, strict=strict)
        return ChosenTools(choice=choice, names_one=True)
    allowed = sent.allowed_tools
    if allowed is None or allowed.mode not in ("auto", "required"):
        message = f"{field} of type {sent.type!r} is not served: use a function, custom, or allowed_tools with a mode"
        raise _refused(message, field)
    names = tuple(tool.name for entry in allowed.tools if (tool := entry.function or entry.custom))
    _check_offered(names, tools, field)
    return ChosenTools(choice=ToolChoice(mode=allowed.mode, names=names, max_calls=max_calls, strict=strict))


def _sent(raw: Raw, legacy: Raw) -> tuple[str, str | _Choice]:
    """The field that has the choice, and the choice."""
    if text := present(raw):
        return "tool_choice", decode(_decode_choice, text, "tool_choice")
    if text := present(legacy):
        named = decode(_decode_legacy_choice, text, "function_call")
        return "function_call", named if isinstance(named, str) else _Choice(type="function", function=named)
    return "tool_choice", "auto"


@lru_cache(maxsize=64)
def _offered(raw: bytes) -> Offered:
    tools = decode(_decode_tools, raw, "tools") or ()
    functions = [tool.function for tool in tools if tool.function is not None]
    custom = frozenset(tool.custom.name for tool in tools if tool.custom is not None)
    strict = tuple(function.name for function in functions if function.strict)
    return Offered(custom.union(function.name for function in functions), custom, strict)


def _check_offered(names: Sequence[str], tools: bytes, field: str) -> None:
    if not names:
        raise _refused(f"{field} allows no tool: name one, or use none", field)
    for name in names:
        if name not in _offered(tools).names:
            raise _refused(f"{field} names {name!r}, which is not in tools", field)


def _refused(message: str, field: str) -> CallError:
    return CallError("invalid_request", message, param=field)
