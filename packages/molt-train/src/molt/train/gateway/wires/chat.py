"""OpenAI Chat Completions: requests in."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from molt.train.gateway.call import Count, Message, ModelCall
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import decode, present
from molt.train.gateway.wires.chat_messages import converted
from molt.train.gateway.wires.chat_reply import ChatCall, ChatEncoder
from molt.train.gateway.wires.chat_tools import chosen, schemas, special, tools_sent
from molt.train.gateway.wires.nesting import Items
from molt.train.gateway.wires.openai_error import openai_error
from molt.train.gateway.wires.openai_fields import ABSENT, OpenAIFields
from molt.train.gateway.wires.openai_reply import KEEPALIVE


class _Request(OpenAIFields, kw_only=True):
    messages: Items
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    functions: list[Raw] | None = None
    function_call: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: str | None = None


_decode_request = msgspec.json.Decoder(_Request)


class ChatDialect:
    """The wire of `POST /v1/chat/completions`."""

    wire: Literal["chat"] = "chat"
    response_prefix = "chatcmpl-"
    call_prefix = "call_"
    keepalive = KEEPALIVE

    def parse(self, body: bytes) -> ChatCall:
        """See `Dialect.parse`."""
        request = decode(_decode_request, body)
        if not request.messages:
            raise CallError("invalid_request", "messages is empty: send at least one", param="messages")
        if request.top_logprobs and not request.logprobs:
            message = f"top_logprobs is {request.top_logprobs} without logprobs: send logprobs true"
            raise CallError("invalid_request", message, param="top_logprobs")
        legacy = bool(request.functions) and present(request.tools) is None
        tools = tools_sent(request.tools, request.functions)
        parallel = request.parallel_tool_calls is not False and not legacy
        choice = chosen(request.tool_choice, request.function_call, tools, parallel=parallel)
        return ChatCall(
            model=request.model,
            messages=[bytes(raw) for raw in request.messages],
            tools=tools,
            tool_choice=choice.choice,
            response_format=request.bound(),
            wishes=request.wishes(request.max_completion_tokens),
            num_choices=request.n or 1,
            num_top_logprobs=request.top_logprobs or 0,
            stream=bool(request.stream),
            template_kwargs=_template_kwargs(request),
            notes=request.unused,
            include_usage=request.includes_usage,
            logprobs=bool(request.logprobs),
            names_tool=choice.names_one,
            custom_tools=special(tools).custom,
            legacy=legacy,
            service_tier="default" if request.service_tier == "auto" else request.service_tier,
        )

    def messages(self, raw: bytes, where: str, count: Count) -> list[Message]:  # noqa: ARG002 - nothing is dropped here
        """See `Dialect.messages`."""
        return [converted(raw, where)]

    def tools(self, raw: bytes, count: Count) -> list[dict[str, Any]]:
        """See `Dialect.tools`."""
        return schemas(raw, count)

    def encoder(self, call: ModelCall, token_text: Callable[[int], str]) -> ChatEncoder:
        """See `Dialect.encoder`."""
        assert isinstance(call, ChatCall)
        return ChatEncoder(call, token_text)

    def error(self, error: CallError, request_id: str) -> tuple[int, bytes]:
        """See `Dialect.error`."""
        return openai_error(error, request_id)


def _template_kwargs(request: _Request) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
    return kwargs
