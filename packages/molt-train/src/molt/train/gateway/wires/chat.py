"""OpenAI Chat Completions: requests in."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from molt.train.gateway.call import Count, Message, ModelCall, SamplingWishes, ToolChoice
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import arguments_of, decode, present
from molt.train.gateway.wires.chat_reply import ChatCall, ChatEncoder
from molt.train.gateway.wires.openai_error import openai_error

_NULL = Raw(b"null")
_ROLES = {"developer": "system", "function": "tool"}


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _ResponseFormat(Struct):
    type: str


class _Request(Struct):
    messages: list[Raw]
    model: str = ""
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: _ResponseFormat | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Named(Struct):
    name: str


class _ToolChoice(Struct):
    type: str
    function: _Named | None = None


class _Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Struct):
    type: str = "function"
    function: _Function | None = None


class _CalledFunction(Struct):
    name: str = ""
    arguments: str | dict[str, Any] | None = None


class _Call(Struct):
    id: str = ""
    function: _CalledFunction | None = None


class _Part(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


_decode_request = msgspec.json.Decoder(_Request)
_decode_message = msgspec.json.Decoder(_Message)
_decode_tools = msgspec.json.Decoder(list[_Tool] | None)
_decode_choice = msgspec.json.Decoder(str | _ToolChoice)


class ChatDialect:
    """The wire of `POST /v1/chat/completions`."""

    wire: Literal["chat"] = "chat"
    response_prefix = "chatcmpl-"
    call_prefix = "call_"
    keepalive = b": keep-alive\n\n"

    def parse(self, body: bytes) -> ChatCall:
        """See `Dialect.parse`."""
        request = decode(_decode_request, body)
        _refuse_unserved(request)
        choice = decode(_decode_choice, present(request.tool_choice) or b'"auto"', "tool_choice")
        tools = bytes(request.tools)
        mode = choice if isinstance(choice, str) else choice.type
        if isinstance(choice, _ToolChoice) and choice.function is not None:
            self._check_named(choice.function.name, tools)
        elif mode not in ("auto", "none", "required", "allowed_tools"):
            raise CallError("invalid_request", f"tool_choice {mode!r} is not served", param="tool_choice")
        return ChatCall(
            model=request.model,
            messages=[bytes(raw) for raw in request.messages],
            tools=tools,
            tool_choice=ToolChoice(
                mode="none" if mode == "none" else "auto", max_calls=1 if request.parallel_tool_calls is False else None
            ),
            wishes=_wishes(request),
            stream=bool(request.stream),
            template_kwargs=_template_kwargs(request),
            notes=() if mode in ("auto", "none") else ("tool_choice_not_enforced",),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            logprobs=bool(request.logprobs),
            names_tool=isinstance(choice, _ToolChoice),
        )

    def messages(self, raw: bytes, where: str, count: Count) -> list[Message]:  # noqa: ARG002 - nothing is dropped here
        """See `Dialect.messages`."""
        sent = decode(_decode_message, raw, where)
        role = _ROLES.get(sent.role, sent.role)
        message: Message = {"role": role, "content": _text(sent.content, where)}
        if role == "tool":
            message["tool_call_id"] = sent.tool_call_id or ""
            if sent.name is not None:
                message["name"] = sent.name
        if role == "assistant":
            if reasoning := sent.reasoning or sent.reasoning_content:
                message["reasoning_content"] = reasoning
            if sent.tool_calls:
                message["tool_calls"] = [_call(call) for call in sent.tool_calls]
        return [message]

    def tools(self, raw: bytes, count: Count) -> list[dict[str, Any]]:  # noqa: ARG002 - nothing is dropped here
        """See `Dialect.tools`."""
        schemas = []
        for index, tool in enumerate(decode(_decode_tools, raw, "tools") or ()):
            if tool.type != "function" or tool.function is None:
                raise CallError(
                    "invalid_request", f"tools of type {tool.type!r} are not served", param=f"tools[{index}]"
                )
            schemas.append({"type": "function", "function": _without_none(tool.function)})
        return schemas

    def encoder(self, call: ModelCall, token_text: Callable[[int], str]) -> ChatEncoder:
        """See `Dialect.encoder`."""
        assert isinstance(call, ChatCall)
        return ChatEncoder(call, token_text)

    def error(self, error: CallError, request_id: str) -> tuple[int, bytes]:
        """See `Dialect.error`."""
        return openai_error(error, request_id)

    def failure(self, error: CallError, request_id: str) -> bytes:
        """See `Dialect.failure`."""
        return b"data: " + openai_error(error, request_id)[1] + b"\n\n"

    def _check_named(self, name: str, tools: bytes) -> None:
        if name not in [tool["function"]["name"] for tool in self.tools(tools, lambda _: None)]:
            raise CallError(
                "invalid_request", f"tool_choice names {name!r}, which is not in tools", param="tool_choice"
            )


def _refuse_unserved(request: _Request) -> None:
    if not request.messages:
        raise CallError("invalid_request", "messages is empty: send at least one", param="messages")
    if request.n not in (None, 1):
        raise CallError("invalid_request", f"n is {request.n}: one choice a call is served; call again", param="n")
    if request.top_logprobs:
        raise CallError("invalid_request", "top_logprobs above 0 is not served", param="top_logprobs")
    if request.logit_bias:
        raise CallError("invalid_request", "logit_bias is not served", param="logit_bias")
    if request.response_format is not None and request.response_format.type != "text":
        kind = request.response_format.type
        raise CallError("invalid_request", f"response_format {kind!r} is not served", param="response_format")


def _wishes(request: _Request) -> SamplingWishes:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return SamplingWishes(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        stop=tuple(text for text in stop if text),
    )


def _template_kwargs(request: _Request) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
    return kwargs


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            field = "image_url.url" if part.type == "image_url" else "type"
            param = f"{where}.content[{index}].{field}"
            raise CallError(
                "invalid_request", f"the model reads text only, not parts of type {part.type!r}", param=param
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: _Call) -> dict[str, Any]:
    function = call.function or _CalledFunction()
    arguments = function.arguments if isinstance(function.arguments, dict) else arguments_of(function.arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _without_none(function: _Function) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(function).items() if value is not None}
