"""OpenAI Chat Completions: whole replies and streams of chunks out."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from molt.train.gateway.call import (
    Content,
    Event,
    ModelCall,
    Reasoning,
    Reply,
    Step,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    TopLogprobs,
)
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.custom_tool import CustomInput, input_of
from molt.train.gateway.wires.openai_error import openai_error
from molt.train.gateway.wires.openai_reply import KEEPALIVE, finite, usage

_encode = msgspec.json.Encoder().encode


class ChatCall(ModelCall, frozen=True, kw_only=True):
    """A Chat Completions request."""

    include_usage: bool = False
    logprobs: bool = False
    names_tool: bool = False
    """`tool_choice` names a function: a reply that calls it ends with `stop`."""
    custom_tools: frozenset[str] = frozenset()
    """Tools whose calls are shown with their text instead of arguments."""
    legacy: bool = False
    """The request has `functions`, from before `tools`: the one call is shown as `function_call`."""
    service_tier: str | None = None


class ChatEncoder:
    """Writes the reply to one Chat Completions request."""

    def __init__(self, call: ChatCall, token_text: Callable[[int], str]) -> None:
        self._call = call
        self._token_text = token_text
        self._head = b""
        self._tail = b"]}\n\n"
        self._num_calls = [0] * call.num_choices
        self._inputs: list[CustomInput | None] = [None] * call.num_choices
        """Of each choice, the reader of its newest call where that is of a custom tool."""

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.whole`."""
        body = self._shared(replies[0], "chat.completion")
        body["choices"] = [self._choice(reply) for reply in replies]
        body["usage"] = usage(replies, num_choices=len(replies))
        return _encode(body | {"system_fingerprint": None})

    def start(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.start`."""
        self._head = b"data: " + _encode(self._shared(replies[0], "chat.completion.chunk"))[:-1]
        if self._call.include_usage:
            self._tail = b'],"usage":null}\n\n'
        return b"".join([self._chunk(reply.choice, {"role": "assistant", "content": ""}) for reply in replies])

    def step(self, step: Step) -> bytes:
        """See `ReplyEncoder.step`."""
        if len(step.events) == 1 and isinstance(step.events[0], Content) and not self._call.logprobs:
            return self._text_chunk(step.choice, step.events[0].text)
        chunks = [self._delta(step.choice, event) for event in step.events]
        deltas = [delta for delta in chunks if delta is not None]
        logprobs = self._logprobs(step.token_ids, step.logprobs, step.top_logprobs) if self._call.logprobs else None
        if logprobs and not deltas:
            deltas = [{}]
        frames = [self._chunk(step.choice, delta) for delta in deltas[1:]]
        return b"".join([self._chunk(step.choice, delta, logprobs=logprobs) for delta in deltas[:1]] + frames)

    def finish(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.finish`."""
        frames = b"".join([self._chunk(reply.choice, {}, self._finish_reason(reply)) for reply in replies])
        if self._call.include_usage:
            counts = _encode(usage(replies, num_choices=len(replies)))
            frames += self._head + b',"choices":[],"usage":' + counts + b"}\n\n"
        return frames + b"data: [DONE]\n\n"

    def keepalive(self) -> bytes:
        """See `ReplyEncoder.keepalive`."""
        return KEEPALIVE

    def failure(self, error: CallError, request_id: str) -> bytes:
        """See `ReplyEncoder.failure`."""
        return b"data: " + openai_error(error, request_id)[1] + b"\n\n"

    def _shared(self, first: Reply, kind: str) -> dict[str, Any]:
        shared = {"id": first.response_id, "object": kind, "created": first.created, "model": first.model}
        tier = self._call.service_tier
        return shared if tier is None else shared | {"service_tier": tier}

    def _choice(self, reply: Reply) -> dict[str, Any]:
        # `content` is "" even beside nothing but calls: a stream has to begin with it, and folds to the same reply.
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
        if reply.calls and self._call.legacy:
            message["function_call"] = _function(reply.calls[0])
        elif reply.calls:
            message["tool_calls"] = [self._shown(call) for call in reply.calls]
        choice: dict[str, Any] = {"index": reply.choice, "message": message}
        choice["finish_reason"] = self._finish_reason(reply)
        wanted = self._call.logprobs
        choice["logprobs"] = self._logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs) if wanted else None
        return choice

    def _shown(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._call.custom_tools:
            custom = {"name": call.name, "input": input_of(call.arguments)}
            return {"id": call.call_id, "type": "custom", "custom": custom}
        return {"id": call.call_id, "type": "function", "function": _function(call)}

    def _delta(self, choice: int, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case ToolCallStart(name, call_id):
                return self._call_opening(choice, name, call_id)
            case ToolCallArguments(text):
                return self._more_arguments(choice, text)
            case ToolCallEnd():
                return None

    def _call_opening(self, choice: int, name: str, call_id: str) -> dict[str, Any]:
        if self._call.legacy:
            return {"function_call": {"name": name, "arguments": ""}}
        index, self._num_calls[choice] = self._num_calls[choice], self._num_calls[choice] + 1
        is_custom = name in self._call.custom_tools
        self._inputs[choice] = CustomInput() if is_custom else None
        kind, opened = (
            ("custom", {"name": name, "input": ""}) if is_custom else ("function", {"name": name, "arguments": ""})
        )
        return {"tool_calls": [{"index": index, "id": call_id, "type": kind, kind: opened}]}

    def _more_arguments(self, choice: int, text: str) -> dict[str, Any] | None:
        if self._call.legacy:
            return {"function_call": {"arguments": text}}
        index, reader = self._num_calls[choice] - 1, self._inputs[choice]
        if reader is None:
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        shown = reader.feed(text)
        return {"tool_calls": [{"index": index, "custom": {"input": shown}}]} if shown else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if logprobs:
            choice["logprobs"] = logprobs
        return self._head + b',"choices":[' + _encode(choice) + self._tail

    def _text_chunk(self, index: int, text: str) -> bytes:
        """What `_chunk` writes for more text, which nearly all chunks are."""
        opening = b',"choices":[{"index":%d,"delta":{"content":' % index
        return self._head + opening + _encode(text) + b'},"finish_reason":null}' + self._tail

    def _finish_reason(self, reply: Reply) -> str:
        calls = any(call.complete for call in reply.calls)
        if not calls or reply.finish_reason != "stop" or self._call.names_tool:
            return reply.finish_reason
        return "function_call" if self._call.legacy else "tool_calls"

    def _logprobs(
        self, token_ids: list[int], logprobs: list[float], top_logprobs: list[TopLogprobs]
    ) -> dict[str, Any] | None:
        tops = top_logprobs or [[]] * len(token_ids)
        content = [
            self._token(token_id, logprob) | {"top_logprobs": [self._token(*other) for other in top]}
            for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None} if content else None

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def _function(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}
