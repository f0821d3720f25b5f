"""OpenAI Responses: requests in."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from molt.train.gateway.call import Count, Message, ModelCall, ResponseFormat, SamplingWishes
from molt.train.gateway.call_error import CallError
from molt.train.gateway.past import Past
from molt.train.gateway.wires.body import decode, present
from molt.train.gateway.wires.openai_error import openai_error
from molt.train.gateway.wires.openai_fields import ABSENT
from molt.train.gateway.wires.openai_reply import KEEPALIVE
from molt.train.gateway.wires.responses_items import RESPONSE_PREFIX, fold
from molt.train.gateway.wires.responses_messages import messages_of
from molt.train.gateway.wires.responses_output import ResponsesCall
from molt.train.gateway.wires.responses_reply import ResponsesEncoder
from molt.train.gateway.wires.responses_tools import offered_tools, tool_choice

_LOGPROBS = "message.output_text.logprobs"
_UNUSED = ("context_management", "max_tool_calls", "moderation")
"""What changes a reply elsewhere and has no effect here."""
_encode = msgspec.json.Encoder().encode


class _Conversation(Struct):
    id: str


class _Format(Struct):
    type: str
    schema: dict[str, Any] | None = None


class _Text(Struct):
    format: _Format | None = None
    verbosity: str | None = None


class _Reasoning(Struct):
    effort: str | None = None


class _Request(Struct, kw_only=True):
    model: str = ""
    input: Raw = ABSENT
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | _Conversation | None = None
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    text: Raw = ABSENT
    reasoning: Raw = ABSENT
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    background: bool | None = None
    prompt: Raw = ABSENT
    stream: bool | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Raw = ABSENT
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    context_management: Raw = ABSENT
    max_tool_calls: Raw = ABSENT
    moderation: Raw = ABSENT

    @property
    def conversation_id(self) -> str | None:
        """Under which the session finds the conversation again."""
        return self.conversation.id if isinstance(self.conversation, _Conversation) else self.conversation

    @property
    def shows_logprobs(self) -> bool:
        """Whether the client is to see log-probs."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())


_decode_request = msgspec.json.Decoder(_Request)
_decode_text = msgspec.json.Decoder(_Text)
_decode_reasoning = msgspec.json.Decoder(_Reasoning)


class ResponsesDialect:
    """The wire of `POST /v1/responses`."""

    wire: Literal["responses"] = "responses"
    response_prefix = RESPONSE_PREFIX
    call_prefix = "call_"
    keepalive = KEEPALIVE

    def parse(self, body: bytes, past: Past | None = None) -> ResponsesCall:
        """See `Dialect.parse`. `past` has the session's responses, which a request may name; None: there are none."""
        request = decode(_decode_request, body)
        _refuse_unserved(request)
        past = past or Past()
        before = _before(request, past)
        folded = fold(present(request.input) or b"[]", past)
        own = folded.all_messages()
        if not (before or own):
            raise CallError("invalid_request", "input is empty: send a text or at least one item", param="input")
        leading = [_encode({"role": "system", "content": request.instructions})] if request.instructions else []
        tools = bytes(request.tools)
        offered = offered_tools(tools)
        text = decode(_decode_text, present(request.text) or b"{}", "text")
        parallel = request.parallel_tool_calls is not False
        return ResponsesCall(
            model=request.model,
            messages=[*leading, *before, *own],
            num_leading=len(leading),
            tools=tools,
            tool_choice=tool_choice(present(request.tool_choice) or b'"auto"', offered, parallel=parallel),
            response_format=_response_format(text.format),
            wishes=_wishes(request),
            num_top_logprobs=request.top_logprobs or 0,
            stream=bool(request.stream),
            template_kwargs=_template_kwargs(request),
            notes=_notes(request, text),
            echo=_echo(request),
            offered=offered,
            past=past,
            conversation=request.conversation_id,
            positions=folded.positions,
            shows_logprobs=request.shows_logprobs,
        )

    def messages(self, raw: bytes, where: str, count: Count) -> list[Message]:
        """See `Dialect.messages`."""
        return messages_of(raw, where, count)

    def tools(self, raw: bytes, count: Count) -> list[dict[str, Any]]:
        """See `Dialect.tools`."""
        offered = offered_tools(raw)
        for note in offered.notes:
            count(note)
        return offered.schemas

    def encoder(self, call: ModelCall, token_text: Callable[[int], str]) -> ResponsesEncoder:
        """See `Dialect.encoder`."""
        assert isinstance(call, ResponsesCall)
        return ResponsesEncoder(call, token_text)

    def error(self, error: CallError, request_id: str) -> tuple[int, bytes]:
        """See `Dialect.error`."""
        if error.param == "messages":  # what the template says of them
            error.param = "input"
        return openai_error(error, request_id)


def _refuse_unserved(request: _Request) -> None:
    if request.background:
        message = "background is true: responses are not computed in the background; leave it out, or stream"
        raise CallError("invalid_request", message, param="background")
    if present(request.prompt) is not None:
        message = "prompt templates are not kept here: send instructions and input"
        raise CallError("invalid_request", message, param="prompt")
    if request.previous_response_id and request.conversation_id:
        message = "previous_response_id and conversation both say what goes before: send one"
        raise CallError("invalid_request", message, param="previous_response_id")


def _before(request: _Request, past: Past) -> list[bytes]:
    """The messages that go before the request's own. Instructions are not among them: they are not inherited."""
    if request.conversation_id:
        return past.conversation(request.conversation_id)
    if not request.previous_response_id:
        return []
    messages = past.messages(request.previous_response_id)
    if messages is None:
        message = f"this session has no response {request.previous_response_id!r}: send the whole conversation as input"
        raise CallError("not_found", message, param="previous_response_id", code="previous_response_not_found")
    return messages


def _response_format(sent: _Format | None) -> ResponseFormat | None:
    if sent is None or sent.type == "text":
        return None
    if sent.type == "json_object":
        return ResponseFormat(kind="json_object", param="text.format")
    if sent.type != "json_schema":
        message = f"text.format of type {sent.type!r} is not served: use text, json_object or json_schema"
        raise CallError("invalid_request", message, param="text.format.type")
    if sent.schema is None:
        message = "text.format of type json_schema has no schema: send it"
        raise CallError("invalid_request", message, param="text.format.schema")
    return ResponseFormat(kind="json_schema", spec=sent.schema, param="text.format")


def _wishes(request: _Request) -> SamplingWishes:
    return SamplingWishes(
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
    )


def _template_kwargs(request: _Request) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    effort = decode(_decode_reasoning, present(request.reasoning) or b"{}", "reasoning").effort
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    return kwargs


def _notes(request: _Request, text: _Text) -> tuple[str, ...]:
    ignored = [name for name in _UNUSED if present(getattr(request, name)) is not None]
    if request.truncation == "auto":
        ignored.append("truncation")
    if text.verbosity is not None:
        ignored.append("verbosity")
    return tuple(f"ignored.{name}" for name in ignored)


def _echo(request: _Request) -> bytes:
    """Members of the response object: what was asked for, the vendor's defaults where nothing was."""

    def sent(raw: Raw, default: Any) -> Any:
        return default if present(raw) is None else raw

    conversation = request.conversation_id
    echo = {
        "background": False,
        "conversation": {"id": conversation} if conversation else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": sent(request.max_tool_calls, None),
        "metadata": sent(request.metadata, {}),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": sent(request.reasoning, {"effort": None, "summary": None}),
        "safety_identifier": request.safety_identifier,
        "service_tier": "default" if request.service_tier in (None, "auto") else request.service_tier,
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": sent(request.text, {"format": {"type": "text"}}),
        "tool_choice": sent(request.tool_choice, "auto"),
        "tools": sent(request.tools, []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
    return _encode(echo)[1:-1]
