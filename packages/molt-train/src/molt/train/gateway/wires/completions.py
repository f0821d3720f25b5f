"""OpenAI Completions: requests in. Prompts go to the engine as they are, without a chat template.

Control tokens spelled in a text prompt count as such: whoever sends raw prompts writes the model's own format.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from molt.train.gateway.call import Count, Message, ModelCall
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import decode, present
from molt.train.gateway.wires.completions_reply import CompletionsCall, CompletionsEncoder
from molt.train.gateway.wires.openai_error import openai_error
from molt.train.gateway.wires.openai_fields import ABSENT, OpenAIFields
from molt.train.gateway.wires.openai_reply import KEEPALIVE

MAX_CHOICES = 2048
"""Prompts times `n`."""

_Ids = list[Annotated[int, Meta(ge=0)]]
_decode_text = msgspec.json.Decoder(str)
_decode_texts = msgspec.json.Decoder(list[str])
_decode_ids = msgspec.json.Decoder(_Ids)
_decode_lists = msgspec.json.Decoder(list[_Ids])


class _Request(OpenAIFields, kw_only=True):
    prompt: Raw = ABSENT
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


_decode_request = msgspec.json.Decoder(_Request)


class CompletionsDialect:
    """The wire of `POST /v1/completions`."""

    wire: Literal["completions"] = "completions"
    response_prefix = "cmpl-"
    call_prefix = "call_"
    keepalive = KEEPALIVE

    def parse(self, body: bytes) -> CompletionsCall:
        """See `Dialect.parse`."""
        request = decode(_decode_request, body)
        _refuse_unserved(request)
        prompts = _prompts(present(request.prompt))
        num_choices = request.n or 1
        if len(prompts) * num_choices > MAX_CHOICES:
            message = f"{len(prompts)} prompts times n {num_choices} is above {MAX_CHOICES}: send several requests"
            raise CallError("invalid_request", message, param="prompt")
        return CompletionsCall(
            model=request.model,
            messages=[],
            raw_prompts=prompts,
            response_format=request.bound(),
            wishes=request.wishes(),
            num_choices=num_choices,
            num_top_logprobs=request.logprobs or 0,
            stream=bool(request.stream),
            notes=request.unused,
            include_usage=request.includes_usage,
            logprobs=request.logprobs is not None,
        )

    def messages(self, raw: bytes, where: str, count: Count) -> list[Message]:  # noqa: ARG002 - this wire has none
        """See `Dialect.messages`."""
        return []

    def tools(self, raw: bytes, count: Count) -> list[dict[str, Any]]:  # noqa: ARG002 - this wire has none
        """See `Dialect.tools`."""
        return []

    def encoder(self, call: ModelCall, token_text: Callable[[int], str]) -> CompletionsEncoder:
        """See `Dialect.encoder`."""
        assert isinstance(call, CompletionsCall)
        return CompletionsEncoder(call, token_text)

    def error(self, error: CallError, request_id: str) -> tuple[int, bytes]:
        """See `Dialect.error`."""
        return openai_error(error, request_id)


def _refuse_unserved(request: _Request) -> None:
    if request.echo:
        raise CallError("invalid_request", "echo is not served: the prompt is known to you; leave it out", param="echo")
    if request.suffix:
        raise CallError("invalid_request", "suffix is not served: the model only continues a prompt", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        message = f"best_of is {request.best_of}, n is {request.n or 1}: every sample is returned; raise n instead"
        raise CallError("invalid_request", message, param="best_of")


def _prompts(sent: bytes | None) -> tuple[str | list[int], ...]:
    """A text, texts, token ids, or lists of them, each as one prompt."""
    if sent is None:
        raise CallError("invalid_request", "prompt is missing: send a text or token ids", param="prompt")
    if not sent.startswith(b"["):
        return (decode(_decode_text, sent, "prompt"),)
    first = sent[1:].lstrip()[:1]
    if first == b'"':
        return tuple(decode(_decode_texts, sent, "prompt"))
    if first == b"[":
        return tuple(decode(_decode_lists, sent, "prompt"))
    return (decode(_decode_ids, sent, "prompt"),)
