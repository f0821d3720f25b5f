"""OpenAI Responses: tools in, and which of them a sampled call names.

The model is offered functions only: members of a namespace as `namespace__member`, a custom tool as a function with
one string argument `input`. Tools that the vendor's servers run are left out, and counted.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec import Struct

from molt.train.gateway.call import ToolChoice
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import decode
from molt.train.gateway.wires.custom_tool import as_function

_NUM_REMEMBERED, _LONGEST_REMEMBERED = 64, 256 * 1024
"""Tool lists, in bytes: an agent sends the same one with every request."""


class Target(Struct, frozen=True):
    """The client's tool behind a name that the model was offered."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class OfferedTools(Struct, frozen=True):
    """A request's tools as the model is offered them."""

    schemas: list[dict[str, Any]]
    targets: dict[str, Target]
    """By offered name."""
    strict: list[str]
    """Offered names of functions whose arguments must follow their schema."""
    notes: list[str]
    """Under which to count what of the tools the model is not told."""

    def target(self, name: str) -> Target:
        """The client's tool of a sampled call; a name that was not offered goes out as it is."""
        return self.targets.get(name) or Target(name)


class _Format(Struct):
    type: str = "text"
    syntax: str = ""
    definition: str = ""


class _Tool(Struct):
    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: _Format | None = None
    tools: list["_Tool"] | None = None


class _Choice(Struct):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str = "auto"
    tools: list["_Choice"] | None = None


class _Kind(Struct):
    type: str = "function"


_decode_tools = msgspec.json.Decoder(list[msgspec.Raw] | None)
_decode_kind = msgspec.json.Decoder(_Kind)
_decode_tool = msgspec.json.Decoder(_Tool)
_decode_choice = msgspec.json.Decoder(str | _Choice)

_ON_OFFER = frozenset(("function", "custom", "namespace"))


def flat_name(namespace: str | None, name: str) -> str:
    """The name under which a tool is offered."""
    return f"{namespace}__{name}" if namespace else name


def offered_tools(raw: bytes) -> OfferedTools:
    """The tools of a request's `tools`, a JSON array or null.

    Raises:
        CallError: A function, custom or namespace tool is malformed.
    """
    return _remembered(raw) if len(raw) <= _LONGEST_REMEMBERED else _offered(raw)


def _offered(raw: bytes) -> OfferedTools:
    offered = OfferedTools([], {}, [], [])
    for index, sent in enumerate(decode(_decode_tools, raw, "tools") or ()):
        where, text = f"tools[{index}]", bytes(sent)
        kind = decode(_decode_kind, text, where).type
        if kind not in _ON_OFFER:
            offered.notes.append("tool_omitted.hosted")
            continue
        tool = decode(_decode_tool, text, where)
        if tool.type != "namespace":
            _offer(tool, None, where, offered)
            continue
        if tool.description:
            offered.notes.append("namespace_description_omitted")
        for position, member in enumerate(tool.tools or ()):
            if member.type in ("function", "custom"):
                _offer(member, _name(tool, where), f"{where}.tools[{position}]", offered)
            else:
                offered.notes.append("tool_omitted.hosted")
    return offered


_remembered = lru_cache(_NUM_REMEMBERED)(_offered)


def tool_choice(raw: bytes, offered: OfferedTools, *, parallel: bool) -> ToolChoice:
    """The meaning of a request's `tool_choice`, a JSON string or object.

    Raises:
        CallError: It names a tool that is not offered, or demands a call where none is.
    """
    sent = decode(_decode_choice, raw, "tool_choice")
    max_calls, strict = None if parallel else 1, tuple(offered.strict)
    if isinstance(sent, str):
        mode = _mode(sent, ("auto", "none", "required"))
        _check_any(mode, offered.targets)
        return ToolChoice(mode=mode, max_calls=max_calls, strict=strict)
    if sent.type == "allowed_tools":
        mode = _mode(sent.mode, ("auto", "required"))
        named = [name for tool in sent.tools or () if tool.type in _ON_OFFER for name in _named(tool, offered)]
        _check_any(mode, named)
        names = tuple(dict.fromkeys(named))
        return ToolChoice(mode=mode if names else "none", names=names, max_calls=max_calls, strict=strict)
    if sent.type not in ("function", "custom"):
        raise _refused(f"tools of type {sent.type!r} are not served, and cannot be chosen")
    return ToolChoice(mode="required", names=tuple(_named(sent, offered)), max_calls=1, strict=strict)


def _offer(tool: _Tool, namespace: str | None, where: str, offered: OfferedTools) -> None:
    name = _name(tool, where)
    flat, is_custom = flat_name(namespace, name), tool.type == "custom"
    if flat in offered.targets:
        offered.notes.append("tool_omitted.same_name")
        return
    if is_custom:
        offered.schemas.append(as_function(flat, _custom_description(tool, offered)))
    else:
        shown = {"name": flat, "description": tool.description, "parameters": tool.parameters}
        function = {key: value for key, value in shown.items() if value is not None}
        offered.schemas.append({"type": "function", "function": function})
    offered.targets[flat] = Target(name, namespace, is_custom)
    if tool.strict:
        offered.strict.append(flat)


def _custom_description(tool: _Tool, offered: OfferedTools) -> str | None:
    """The description of a custom tool: it tells the model of the format, which does not bind the sampling."""
    if tool.format is None or not tool.format.definition:
        return tool.description
    offered.notes.append("custom_grammar_not_enforced")
    rule = f"`input` follows this {tool.format.syntax} {tool.format.type}:\n{tool.format.definition}"
    return f"{tool.description}\n\n{rule}" if tool.description else rule


def _name(tool: _Tool, where: str) -> str:
    if not tool.name:
        raise CallError("invalid_request", "the tool has no name: give it one", param=f"{where}.name")
    return tool.name


def _named(choice: _Choice, offered: OfferedTools) -> list[str]:
    """The offered names that a choice means: one, or the members of a namespace."""
    if choice.type == "namespace":
        found = [flat for flat, target in offered.targets.items() if target.namespace == choice.name]
    else:
        flat = flat_name(choice.namespace, choice.name or "")
        found = [flat] if flat in offered.targets else []
    if not found:
        raise _refused(f"tool_choice names {choice.name!r}, which is not in tools")
    return found


def _check_any(mode: str, names: Sequence[str] | dict[str, Target]) -> None:
    if mode == "required" and not names:
        raise _refused("tool_choice demands a call, but there is no tool to call: send one in tools")


def _mode(mode: str, allowed: Sequence[str]) -> Literal["auto", "none", "required"]:
    if mode not in allowed:
        raise _refused(f"tool_choice is {mode!r}: use one of {', '.join(allowed)}")
    return msgspec.convert(mode, Literal["auto", "none", "required"])


def _refused(message: str) -> CallError:
    return CallError("invalid_request", message, param="tool_choice")
