"""Anthropic Messages: requests in."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from molt.train.gateway.call import Count, Message, ModelCall, ResponseFormat, SamplingWishes, ToolChoice
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import decode, present
from molt.train.gateway.wires.messages_blocks import convert_message, role_of
from molt.train.gateway.wires.messages_reply import PING, MessagesEncoder, messages_error
from molt.train.gateway.wires.messages_tools import convert_tools, offered_names, strict_names
from molt.train.gateway.wires.nesting import Items

_NULL = Raw(b"null")


class _ToolChoice(Struct):
    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Thinking(Struct):
    type: str = "adaptive"
    budget_tokens: int | None = None


class _Prompted(Struct, kw_only=True):
    """What makes the prompt of a call, and all that `count_tokens` reads."""

    messages: Items
    model: str = ""
    system: Raw = _NULL
    tools: Raw = _NULL
    thinking: _Thinking | None = None
    output_config: dict[str, Any] | None = None


class _Request(_Prompted, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=0)]
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: int | None = None


class MessagesCall(ModelCall, frozen=True, kw_only=True):
    """A Messages request."""

    shows_thinking: bool = True


_decode_request = msgspec.json.Decoder(_Request)
_decode_count = msgspec.json.Decoder(_Prompted)


class MessagesDialect:
    """The wire of `POST /v1/messages`."""

    wire: Literal["messages"] = "messages"
    response_prefix = "msg_"
    call_prefix = "toolu_"
    keepalive = PING

    def parse(self, body: bytes) -> MessagesCall:
        """See `Dialect.parse`."""
        request, notes = decode(_decode_request, body), list[str]()
        messages, num_leading, prefill = _conversation(request, notes.append)
        return MessagesCall(
            model=request.model,
            messages=messages,
            num_leading=num_leading,
            joins_turns=True,
            tools=bytes(request.tools),
            tool_choice=_tool_choice(request, notes.append),
            response_format=_response_format(request.output_config or {}),
            wishes=SamplingWishes(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                stop=tuple(text for text in request.stop_sequences or () if text),
            ),
            stream=bool(request.stream),
            prefill=prefill,
            template_kwargs=_template_kwargs(request),
            notes=tuple(notes),
            shows_thinking=request.thinking is None or request.thinking.type != "disabled",
        )

    def parse_count(self, body: bytes) -> MessagesCall:
        """Read a `count_tokens` request. Raises CallError."""
        request = decode(_decode_count, body)
        messages, num_leading, prefill = _conversation(request, lambda _: None)
        return MessagesCall(
            model=request.model,
            messages=messages,
            num_leading=num_leading,
            joins_turns=True,
            tools=bytes(request.tools),
            prefill=prefill,
            template_kwargs=_template_kwargs(request),
        )

    def messages(self, raw: bytes, where: str, count: Count) -> list[Message]:
        """See `Dialect.messages`."""
        return convert_message(raw, where, count)

    def tools(self, raw: bytes, count: Count) -> list[dict[str, Any]]:
        """See `Dialect.tools`."""
        return convert_tools(raw, count)

    def encoder(self, call: ModelCall, token_text: Callable[[int], str]) -> MessagesEncoder:  # noqa: ARG002 - no log-probs on this wire
        """See `Dialect.encoder`."""
        assert isinstance(call, MessagesCall)
        return MessagesEncoder(shows_thinking=call.shows_thinking)

    def error(self, error: CallError, request_id: str) -> tuple[int, bytes]:
        """See `Dialect.error`."""
        return messages_error(error, request_id)


def _conversation(request: _Prompted, count: Count) -> tuple[list[bytes], int, str]:
    """The messages, the system text in front; how many stand in front; the reply's beginning."""
    if not request.messages:
        raise CallError("invalid_request", "messages is empty: send at least one", param="messages")
    messages, prefill = [bytes(raw) for raw in request.messages], _prefill(request.messages, count)
    if prefill is not None:
        messages.pop()
    system = present(request.system)
    if system and system[:1] not in b'"[':
        raise CallError("invalid_request", "system is neither text nor a list of blocks", param="system")
    leading = [b'{"role":"system","content":' + system + b"}"] if system else []
    return leading + messages, len(leading), prefill or ""


def _prefill(messages: list[Raw], count: Count) -> str | None:
    """The beginning of the reply, where the last message is an assistant's.

    One that calls tools is a turn like others: nothing can go on behind a call.
    """
    where, last = f"messages[{len(messages) - 1}]", bytes(messages[-1])
    if role_of(last, where) != "assistant":
        return None
    counted: list[str] = []
    (message,) = convert_message(last, where, counted.append)
    if "tool_calls" in message:
        return None
    for name in [*counted, *(["prefill_thinking_dropped"] if "reasoning_content" in message else [])]:
        count(name)
    return message["content"]


def _tool_choice(request: _Request, count: Count) -> ToolChoice:
    choice = request.tool_choice or _ToolChoice()
    if choice.type == "none":
        return ToolChoice(mode="none")
    max_calls, strict = 1 if choice.disable_parallel_tool_use else None, strict_names(bytes(request.tools))
    if choice.type not in ("any", "tool"):
        if choice.type != "auto":
            count("tool_choice_unknown")
        return ToolChoice(max_calls=max_calls, strict=strict)
    offered = offered_names(bytes(request.tools))
    if not offered:
        message = f"{choice.type!r} asks for a tool call, but the request offers no tool: add it to tools"
        raise CallError("invalid_request", message, param="tool_choice")
    if choice.type == "any":
        return ToolChoice(mode="required", max_calls=max_calls, strict=strict)
    if choice.name not in offered:
        message = f"{choice.name!r} is none of the tools that the model is offered: {', '.join(offered)}"
        raise CallError("invalid_request", message, param="tool_choice.name")
    return ToolChoice(mode="required", names=(choice.name,), max_calls=max_calls, strict=strict)


def _response_format(output_config: dict[str, Any]) -> ResponseFormat | None:
    wanted = output_config.get("format")
    if wanted is None:
        return None
    kind, schema = (wanted.get("type"), wanted.get("schema")) if isinstance(wanted, dict) else (None, None)
    if kind != "json_schema":
        message = f"the format {kind!r} is not served: use 'json_schema'"
        raise CallError("invalid_request", message, param="output_config.format.type")
    if not isinstance(schema, dict):
        message = "a format of type 'json_schema' needs a schema, as an object"
        raise CallError("invalid_request", message, param="output_config.format.schema")
    return ResponseFormat(kind="json_schema", spec=schema, param="output_config.format")


def _template_kwargs(request: _Prompted) -> dict[str, Any]:
    """What the request says of thinking, under the names by which chat templates know it."""
    kwargs: dict[str, Any] = {}
    if request.thinking is not None:
        kwargs["enable_thinking"] = request.thinking.type != "disabled"
        if request.thinking.budget_tokens is not None:
            kwargs["thinking_budget"] = request.thinking.budget_tokens
    effort = (request.output_config or {}).get("effort")
    if isinstance(effort, str):
        kwargs["reasoning_effort"] = effort
    return kwargs
