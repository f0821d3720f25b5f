"""Anthropic Messages: whole replies, streams of events and errors out."""

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import jiter
import msgspec

from molt.train.gateway.call import (
    Content,
    Event,
    Reasoning,
    Reply,
    Step,
    ToolCall,
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
    "timeout": (408, "timeout_error"),
    "closed": (410, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "unsupported_media": (415, "invalid_request_error"),
    "headers_too_large": (431, "request_too_large"),
    "engine": (500, "api_error"),
    "not_implemented": (501, "api_error"),
    "overloaded": (529, "overloaded_error"),
}

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""For a kind of block the type of its deltas, and their field."""


def messages_error(error: CallError, request_id: str) -> tuple[int, bytes]:
    """Status and body of an error. The body has no place for a field's path: the message begins with it."""
    status, kind = _ERRORS[error.kind]
    message = error.message
    if error.param and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    return status, _encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


class MessagesEncoder:
    """Writes the reply to one Messages request: blocks in the order thinking, text, tool calls."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._open: str | None = None
        self._before_delta = b""
        """The frame of a delta of the open block, up to its text."""
        self._thoughts = hashlib.sha256()

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.whole`."""
        (reply,) = replies
        content: list[dict[str, Any]] = []
        if reply.reasoning and self._shows_thinking:
            signature = _signature(hashlib.sha256(reply.reasoning.encode()).digest())
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": signature})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call)} for call in reply.calls
        ]
        return _encode(_message(reply, content) | _stop(reply) | {"usage": _usage(reply)})

    def start(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.start`."""
        (reply,) = replies
        message = _message(reply, []) | {"stop_reason": None, "stop_sequence": None, "usage": _usage(reply)}
        return _frame("message_start", {"type": "message_start", "message": message}) + PING

    def step(self, step: Step) -> bytes:
        """See `ReplyEncoder.step`."""
        return b"".join([self._event(event) for event in step.events])

    def finish(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.finish`."""
        (reply,) = replies
        end = {"type": "message_delta", "delta": _stop(reply), "usage": _usage(reply)}
        return self._close() + _frame("message_delta", end) + _frame("message_stop", {"type": "message_stop"})

    def keepalive(self) -> bytes:
        """See `ReplyEncoder.keepalive`."""
        return PING

    def failure(self, error: CallError, request_id: str) -> bytes:
        """See `ReplyEncoder.failure`."""
        return b"event: error\ndata: " + messages_error(error, request_id)[1] + b"\n\n"

    def _event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._within("text", {"text": ""}) + self._delta(text) if text else b""
            case Reasoning(text):
                if not text or not self._shows_thinking:
                    return b""
                opening = self._within("thinking", {"thinking": "", "signature": ""})
                self._thoughts.update(text.encode())
                return opening + self._delta(text)
            case ToolCallStart(name, call_id):
                return self._close() + self._within("tool_use", {"id": call_id, "name": name, "input": {}})
            case ToolCallArguments(text):
                return self._delta(text) if text else b""
            case ToolCallEnd():
                return self._close()

    def _within(self, kind: str, block: dict[str, Any]) -> bytes:
        """Frames that lead into a block of this kind: none while one is open."""
        if self._open == kind:
            return b""
        closing, self._open = self._close(), kind
        self._before_delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (self._num_blocks, *[name.encode() for name in _DELTAS[kind]])
        )
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": {"type": kind} | block}
        return closing + _frame("content_block_start", start)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        frames = b""
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": _signature(self._thoughts.digest())}
            event = {"type": "content_block_delta", "index": self._num_blocks, "delta": signed}
            frames, self._thoughts = _frame("content_block_delta", event), hashlib.sha256()
        frames += _frame("content_block_stop", {"type": "content_block_stop", "index": self._num_blocks})
        self._open, self._num_blocks = None, self._num_blocks + 1
        return frames

    def _delta(self, text: str) -> bytes:
        return self._before_delta + _encode(text) + b"}}\n\n"


def _frame(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


def _signature(digest: bytes) -> str:
    """What thoughts of this digest are signed with: the same for the same thoughts, whole or streamed."""
    return base64.b64encode(digest).decode()


def _input(call: ToolCall) -> Any:
    """The input of a call: of one that was cut, what the SDK has made of it by the end of the same stream."""
    if call.complete:
        return msgspec.Raw(call.arguments.encode() or b"{}")
    try:
        return jiter.from_json(call.arguments.encode(), partial_mode=True)
    except ValueError:  # no value yet, or half of an escaped character, which the parser does not read
        return {}


def _message(reply: Reply, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": reply.response_id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
    }


def _stop(reply: Reply) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`. Complete calls are to be run; a last one that was cut says what cut it."""
    was_cut = reply.finish_reason == "length" or reply.stop_string is not None
    if any(call.complete for call in reply.calls) and (reply.calls[-1].complete or not was_cut):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reply.finish_reason == "length":
        full = "model_context_window_exceeded" if reply.window_full else "max_tokens"
        return {"stop_reason": full, "stop_sequence": None}
    reason = "end_turn" if reply.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_string}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": len(reply.token_ids),
        "output_tokens_details": {"thinking_tokens": reply.reasoning_tokens},
    }
