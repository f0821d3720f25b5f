"""Anthropic Messages: requests in."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from molt.train.gateway.call import Count, Message, ModelCall, SamplingWishes, ToolChoice
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import decode, present
from molt.train.gateway.wires.messages_reply import PING, MessagesEncoder, messages_error

_NULL = Raw(b"null")
_BILLING = "x-anthropic-billing-header"


class _ToolChoice(Struct):
    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(Struct):
    type: str = "adaptive"


class _Request(Struct):
    messages: list[Raw]
    max_tokens: Annotated[int, Meta(ge=0)]
    model: str = ""
    system: Raw = _NULL
    tools: Raw = _NULL
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    thinking: _Thinking | None = None
    output_config: dict[str, Any] | None = None


class _CountRequest(Struct):
    messages: list[Raw]
    model: str = ""
    system: Raw = _NULL
    tools: Raw = _NULL
    thinking: _Thinking | None = None


class _Block(Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: Any = None
    is_error: bool | None = None
    source: Any = None


class _Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesCall(ModelCall, frozen=True, kw_only=True):
    """A Messages request."""

    shows_thinking: bool = True


_decode_request = msgspec.json.Decoder(_Request)
_decode_count = msgspec.json.Decoder(_CountRequest)
_decode_message = msgspec.json.Decoder(_Message)
_decode_blocks = msgspec.json.Decoder(list[_Block])
_decode_tools = msgspec.json.Decoder(list[_Tool] | None)


class MessagesDialect:
    """The wire of `POST /v1/messages`."""

    wire: Literal["messages"] = "messages"
    response_prefix = "msg_"
    call_prefix = "toolu_"
    keepalive = PING

    def parse(self, body: bytes) -> MessagesCall:
        """See `Dialect.parse`."""
        request = decode(_decode_request, body)
        if (request.output_config or {}).get("format") is not None:
            raise CallError("invalid_request", "structured output is not served", param="output_config.format")
        choice, tools = request.tool_choice or _ToolChoice(), bytes(request.tools)
        if choice.type == "tool" and choice.name not in [tool.name for tool in decode(_decode_tools, tools) or ()]:
            message = f"tool_choice names {choice.name!r}, which is not in tools"
            raise CallError("invalid_request", message, param="tool_choice")
        messages, num_leading, prefill = self._conversation(request)
        return MessagesCall(
            model=request.model,
            messages=messages,
            num_leading=num_leading,
            tools=tools,
            tool_choice=ToolChoice(
                mode="none" if choice.type == "none" else "auto",
                max_calls=1 if choice.disable_parallel_tool_use else None,
            ),
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
            notes=("tool_choice_not_enforced",) if choice.type in ("any", "tool") else (),
            shows_thinking=request.thinking is None or request.thinking.type != "disabled",
        )

    def parse_count(self, body: bytes) -> MessagesCall:
        """Read a `count_tokens` request. Raises CallError."""
        request = decode(_decode_count, body)
        messages, num_leading, prefill = self._conversation(request)
        return MessagesCall(
            model=request.model,
            messages=messages,
            num_leading=num_leading,
            tools=bytes(request.tools),
            prefill=prefill,
            template_kwargs=_template_kwargs(request),
        )

    def messages(self, raw: bytes, where: str, count: Count) -> list[Message]:
        """See `Dialect.messages`."""
        sent = decode(_decode_message, raw, where)
        blocks = [_Block("text", text=sent.content)] if isinstance(sent.content, str) else sent.content
        if sent.role == "system":
            # Claude Code's billing block changes from request to request, and says nothing to the model.
            blocks = [block for block in blocks if not (block.text or "").startswith(_BILLING)]
        if sent.role == "assistant":
            return [_assistant(blocks, where, count)]
        return _user(sent.role, blocks, where, count)

    def tools(self, raw: bytes, count: Count) -> list[dict[str, Any]]:
        """See `Dialect.tools`."""
        schemas = []
        for tool in decode(_decode_tools, raw, "tools") or ():
            if tool.input_schema is None:
                count("tool_without_schema_omitted")
                continue
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            schema = {name: value for name, value in function.items() if value is not None}
            schemas.append({"type": "function", "function": schema})
        return schemas

    def encoder(self, call: ModelCall, token_text: Callable[[int], str]) -> MessagesEncoder:  # noqa: ARG002 - no log-probs on this wire
        """See `Dialect.encoder`."""
        assert isinstance(call, MessagesCall)
        return MessagesEncoder(shows_thinking=call.shows_thinking)

    def error(self, error: CallError, request_id: str) -> tuple[int, bytes]:
        """See `Dialect.error`."""
        return messages_error(error, request_id)

    def failure(self, error: CallError, request_id: str) -> bytes:
        """See `Dialect.failure`."""
        return b"event: error\ndata: " + messages_error(error, request_id)[1] + b"\n\n"

    def _conversation(self, request: _Request | _CountRequest) -> tuple[list[bytes], int, str]:
        """The messages, the system text in front; how many stand in front; the reply's beginning.

        A last assistant message is where the reply begins.
        """
        if not request.messages:
            raise CallError("invalid_request", "messages is empty: send at least one", param="messages")
        messages, prefill = [bytes(raw) for raw in request.messages], ""
        last = decode(_decode_message, messages[-1], f"messages[{len(messages) - 1}]")
        if last.role == "assistant":
            prefill = self.messages(messages.pop(), "", lambda _: None)[0]["content"]
        system = present(request.system)
        leading = [b'{"role":"system","content":' + system + b"}"] if system else []
        return leading + messages, len(leading), prefill


def _template_kwargs(request: _Request | _CountRequest) -> dict[str, Any]:
    if request.thinking is None:
        return {}
    return {"enable_thinking": request.thinking.type != "disabled"}


def _user(role: str, blocks: list[_Block], where: str, count: Count) -> list[Message]:
    """Messages of a user or system turn in the order sent: each tool result one, and the texts between them."""
    messages: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        path = f"{where}.content[{index}]"
        if block.type == "tool_result":
            flush()
            text = _result_text(block, path, count)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif (text := _block_text(block, path, count)) is not None:
            texts.append(text)
    flush()
    return messages


def _assistant(blocks: list[_Block], where: str, count: Count) -> Message:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            arguments = block.input if isinstance(block.input, dict) else str(block.input)
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif (text := _block_text(block, f"{where}.content[{index}]", count)) is not None:
            texts.append(text)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _result_text(block: _Block, where: str, count: Count) -> str:
    """Text of a tool result. A failure says so: the flag itself is nothing that a template shows."""
    if isinstance(block.content, list):
        inner = decode(_decode_blocks, msgspec.json.encode(block.content), f"{where}.content")
        found = [_block_text(part, f"{where}.content[{index}]", count) for index, part in enumerate(inner)]
        text = "\n".join(part for part in found if part is not None)
    else:
        text = block.content if isinstance(block.content, str) else ""
    return f"Error: {text}" if block.is_error and not text.startswith("Error") else text


def _block_text(block: _Block, where: str, count: Count) -> str | None:
    """What of a block the model can read; None, and counted, where there is nothing."""
    if block.type == "text":
        return block.text or ""
    if block.type == "image":
        message = f"{where}.source: the model reads text only, not images"
        raise CallError("invalid_request", message, param=f"{where}.source")
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "document" and source.get("type") == "text":
        return str(source.get("data", ""))
    if block.type == "search_result" and isinstance(block.content, list):
        return "\n".join(str(part.get("text", "")) for part in block.content if isinstance(part, dict))
    count(f"block_dropped_{block.type}")
    return None
