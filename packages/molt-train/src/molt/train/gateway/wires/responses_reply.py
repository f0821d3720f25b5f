"""OpenAI Responses: whole replies and streams of events out."""

import time
from collections.abc import Callable, Sequence

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
from molt.train.gateway.wires.custom_tool import CustomInput
from molt.train.gateway.wires.responses_items import RESPONSE_PREFIX
from molt.train.gateway.wires.responses_logprobs import TextLogprobs
from molt.train.gateway.wires.responses_output import (
    CUSTOM_CALL,
    MESSAGE,
    REASONING,
    ItemKind,
    OutputItem,
    ResponsesCall,
    call_fields,
    call_kind,
    encode,
    final_fields,
    last_status,
    output_items,
    response_body,
    response_head,
)

_FAILURE_CODES: dict[ErrorKind, str] = {
    "prompt_too_long": "context_length_exceeded",
    "invalid_request": "invalid_prompt",
}
"""Codes inside `response.failed`; of any other kind `server_error`, after which clients try again."""


class ResponsesEncoder:
    """Writes the reply to one Responses request: items in the order reasoning, message, calls."""

    def __init__(self, call: ResponsesCall, token_text: Callable[[int], str]) -> None:
        self._call = call
        self._logprobs = TextLogprobs(token_text) if call.shows_logprobs else None
        self._response_id = ""
        self._head = b""
        """Empty until the stream has begun."""
        self._num_events = 0
        self._items: list[bytes] = []
        """The items that have ended."""
        self._open: OutputItem | None = None
        self._place = b""
        """Where the open item's deltas belong."""
        self._input = CustomInput()
        self._reasoning: list[str] = []

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.whole`."""
        (reply,) = replies
        self._name(reply.response_id, reply.created, reply.model)
        items = output_items(reply, self._call.offered)
        if self._logprobs:
            self._logprobs.add(reply.token_ids, reply.logprobs, reply.top_logprobs)
            for item in items:
                if item.kind is MESSAGE:
                    item.logprobs = self._logprobs.of(reply.reasoning, reply.content)
        self._items = [encode(item.fields()) for item in items]
        return self._final(reply)

    def start(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.start`."""
        (reply,) = replies
        return self._begin(reply.response_id, reply.created, reply.model)

    def step(self, step: Step) -> bytes:
        """See `ReplyEncoder.step`."""
        if self._logprobs:
            self._logprobs.add(step.token_ids, step.logprobs, step.top_logprobs)
        return b"".join([self._event(event) for event in step.events])

    def finish(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.finish`."""
        (reply,) = replies
        frames = b"" if self._open or self._items else self._add(MESSAGE)
        frames += self._close("incomplete" if self._open and self._open.kind.part is None else last_status(reply))
        response = self._final(reply)
        name = b"response.incomplete" if reply.finish_reason == "length" else b"response.completed"
        return frames + self._frame(name, b'"response":' + response)

    def keepalive(self) -> bytes:
        """See `ReplyEncoder.keepalive`. An event with data, since Codex does not take a comment for life."""
        return self._frame(b"response.in_progress", b'"response":' + self._response("in_progress"))

    def failure(self, error: CallError, request_id: str) -> bytes:
        """See `ReplyEncoder.failure`."""
        frames = b""
        if not self._head:
            response_id = RESPONSE_PREFIX + request_id.removeprefix("req_")
            frames = self._begin(response_id, int(time.time()), self._call.model)
        code = _FAILURE_CODES.get(error.kind, "server_error")
        response = self._response("failed", error={"code": code, "message": error.message})
        return frames + self._frame(b"response.failed", b'"response":' + response)

    def _event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                logprobs = self._logprobs.take() if self._logprobs else []
                return self._enter(MESSAGE) + self._delta(text, b',"logprobs":' + encode(logprobs))
            case Reasoning(text):
                self._reasoning.append(text)
                if self._logprobs:
                    self._logprobs.take()
                return self._enter(REASONING) + self._delta(text)
            case ToolCallStart(name, call_id):
                target = self._call.offered.target(name)
                self._input = CustomInput()
                return self._enter(None) + self._add(call_kind(target), call_fields(target, call_id))
            case ToolCallArguments(text):
                assert self._open is not None
                text = self._input.feed(text) if self._open.kind is CUSTOM_CALL else text
                return self._delta(text) if text else b""
            case ToolCallEnd():
                return self._close("completed")

    def _enter(self, kind: ItemKind | None) -> bytes:
        """Frames that lead into an item of text, none while it is open; with None, out of the open one."""
        opened = self._open
        if opened and opened.kind is kind:
            return b""
        # A call that is left before its end is not whole.
        closing = self._close("incomplete" if opened and opened.kind.part is None else "completed")
        return closing + self._add(kind) if kind else closing

    def _add(self, kind: ItemKind, call: dict[str, str] | None = None) -> bytes:
        item = self._open = OutputItem(kind, self._response_id, len(self._items))
        item.call = call or {}
        self._place = b'"item_id":"%s","output_index":%d,' % (item.item_id.encode(), item.index)
        added = b'"output_index":%d,"item":%s' % (item.index, encode(item.fields(has_part=False)))
        frames = self._frame(b"response.output_item.added", added)
        if kind.part:
            self._place += b'"content_index":0,'
            frames += self._frame(b"response.content_part.added", self._place + b'"part":' + encode(item.part()))
        return frames

    def _delta(self, text: str, more: bytes = b"") -> bytes:
        assert self._open is not None
        self._open.pieces.append(text)
        name = self._open.kind.event.encode() + b".delta"
        return self._frame(name, self._place + b'"delta":' + encode(text) + more)

    def _close(self, status: str) -> bytes:
        """Frames that end the open item."""
        item = self._open
        if item is None:
            return b""
        done = b'"%s":%s' % (item.kind.field.encode(), encode(item.text))
        if item.kind is MESSAGE:
            item.logprobs = self._logprobs.of("".join(self._reasoning), item.text) if self._logprobs else []
            done += b',"logprobs":' + encode(item.logprobs)
        frames = self._frame(item.kind.event.encode() + b".done", self._place + done)
        if item.kind.part:
            frames += self._frame(b"response.content_part.done", self._place + b'"part":' + encode(item.part()))
        item.status = status
        self._items.append(encode(item.fields()))
        self._open = None
        ended = b'"output_index":%d,"item":%s' % (item.index, self._items[-1])
        return frames + self._frame(b"response.output_item.done", ended)

    def _begin(self, response_id: str, created: int, model: str) -> bytes:
        self._name(response_id, created, model)
        response = b'"response":' + self._response("in_progress")
        return self._frame(b"response.created", response) + self._frame(b"response.in_progress", response)

    def _name(self, response_id: str, created: int, model: str) -> None:
        self._response_id = response_id
        self._head = response_head(response_id, created, model) + b"," + self._call.echo

    def _final(self, reply: Reply) -> bytes:
        """The response object at the end; the session keeps it for later requests."""
        call = self._call
        output = b"[" + b",".join(self._items) + b"]"
        call.past.keep(reply.response_id, call.messages[call.num_leading :], output, call.conversation)
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        return self._response(status, **final_fields(reply))

    def _response(self, status: str, **fields: object) -> bytes:
        return response_body(self._head, status, self._items, **fields)

    def _frame(self, name: bytes, members: bytes) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b'event: %s\ndata: {"type":"%s","sequence_number":%d,%s}\n\n' % (name, name, number, members)
