"""Anthropic Messages: whole replies, streams of events and errors out."""

from collections.abc import Sequence
from typing import Any

import msgspec

from molt.train.gateway.call import (
    Content,
    Event,
    Reasoning,
    Reply,
    Step,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from molt.train.gateway.call_error import CallError, ErrorKind

_encode = msgspec.json.Encoder().encode

_ERRORS: dict[ErrorKind, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "prompt_too_long": (400, "invalid_request_error"),
    "authentication": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "closed": (410, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "unsupported_media": (415, "invalid_request_error"),
    "engine": (500, "api_error"),
    "overloaded": (529, "overloaded_error"),
}


def messages_error(error: CallError, request_id: str) -> tuple[int, bytes]:
    """Status and body of an error. The body has no place for a field's path: the message begins with it."""
    status, kind = _ERRORS[error.kind]
    message = error.message
    if error.param and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    return status, _encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesEncoder:
    """Writes the reply to one Messages request: blocks in the order thinking, text, tool calls."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._open: str | None = None
        self._signature = ""

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.whole`."""
        (reply,) = replies
        content: list[dict[str, Any]] = []
        if reply.reasoning and self._shows_thinking:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.response_id})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": msgspec.Raw(call.arguments.encode())}
            for call in reply.calls
        ]
        stop = {"stop_reason": _stop_reason(reply), "stop_sequence": _stop_sequence(reply)}
        return _encode(_message(reply, content) | stop | {"usage": _usage(reply)})

    def start(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.start`."""
        (reply,) = replies
        self._signature = reply.response_id
        message = _message(reply, []) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = _usage(reply)
        return _frame("message_start", {"type": "message_start", "message": message}) + PING

    def step(self, step: Step) -> bytes:
        """See `ReplyEncoder.step`."""
        return b"".join([self._event(event) for event in step.events])

    def finish(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.finish`."""
        (reply,) = replies
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": _stop_sequence(reply)}
        end = {"type": "message_delta", "delta": delta, "usage": _usage(reply)}
        return self._close() + _frame("message_delta", end) + _frame("message_stop", {"type": "message_stop"})

    def _event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._within("text", {"text": ""}) + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                if not self._shows_thinking:
                    return b""
                opening = self._within("thinking", {"thinking": "", "signature": ""})
                return opening + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallStart(name, call_id):
                return self._close() + self._within("tool_use", {"id": call_id, "name": name, "input": {}})
            case ToolCallArguments(text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case ToolCallEnd():
                return self._close()

    def _within(self, kind: str, block: dict[str, Any]) -> bytes:
        """Frames that lead into a block of this kind: none while one is open."""
        if self._open == kind:
            return b""
        closing, self._open = self._close(), kind
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": {"type": kind} | block}
        return closing + _frame("content_block_start", start)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        frames = b""
        if self._open == "thinking":
            frames = self._delta({"type": "signature_delta", "signature": self._signature})
        frames += _frame("content_block_stop", {"type": "content_block_stop", "index": self._num_blocks})
        self._open, self._num_blocks = None, self._num_blocks + 1
        return frames

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return _frame("content_block_delta", event)


def _frame(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


def _message(reply: Reply, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": reply.response_id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
    }


def _stop_reason(reply: Reply) -> str:
    if reply.calls and reply.calls[-1].complete:
        return "tool_use"
    if reply.finish_reason == "length":
        return "model_context_window_exceeded" if reply.window_full else "max_tokens"
    return "stop_sequence" if reply.stop_string is not None else "end_turn"


def _stop_sequence(reply: Reply) -> str | None:
    return reply.stop_string if _stop_reason(reply) == "stop_sequence" else None


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": len(reply.token_ids),
    }
