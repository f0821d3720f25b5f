"""OpenAI Responses: the response object and its output items, the same in whole replies and in streams."""

import time
from typing import Any, NamedTuple

import msgspec

from molt.train.gateway.call import ModelCall, Reply
from molt.train.gateway.past import Past
from molt.train.gateway.wires.custom_tool import input_of
from molt.train.gateway.wires.responses_items import item_id
from molt.train.gateway.wires.responses_tools import OfferedTools, Target

encode = msgspec.json.Encoder().encode


class ItemKind(NamedTuple):
    """A kind of output item, and what its events are called."""

    name: str
    prefix: str
    """Of its ids."""
    event: str
    """Its events are `{event}.delta` and `{event}.done`."""
    field: str
    """Where its done event has the whole text."""
    part: str | None = None
    """Type of the one part that its text stands in; None: the item has no parts."""


REASONING = ItemKind("reasoning", "rs", "response.reasoning_text", "text", "reasoning_text")
MESSAGE = ItemKind("message", "msg", "response.output_text", "text", "output_text")
FUNCTION_CALL = ItemKind("function_call", "fc", "response.function_call_arguments", "arguments")
CUSTOM_CALL = ItemKind("custom_tool_call", "ctc", "response.custom_tool_call_input", "input")


class ResponsesCall(ModelCall, frozen=True, kw_only=True):
    """A Responses request."""

    echo: bytes
    """Members of a JSON object: the fields of the response that say what was asked for."""
    offered: OfferedTools
    past: Past
    conversation: str | None = None
    """To which the request and its response are added."""
    positions: list[int]
    """Index in `input` of the first item of each message that is the request's own; empty where `input` is text."""
    shows_logprobs: bool = False

    def where(self, index: int) -> str:
        """See `ModelCall.where`."""
        if index < self.num_leading:
            return "instructions"
        own = index - len(self.messages) + max(1, len(self.positions))
        if own < 0:
            return "previous_response_id"
        return f"input[{self.positions[own]}]" if self.positions else "input"

    async def accepted(self) -> None:
        """See `ModelCall.accepted`."""
        await self.past.learn(self.messages[self.num_leading :])


class OutputItem:
    """One item of a response's output, whole or growing."""

    def __init__(self, kind: ItemKind, response_id: str, index: int) -> None:
        self.kind, self.index = kind, index
        self.item_id = item_id(kind.prefix, response_id, index)
        self.status = "in_progress"
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.call: dict[str, Any] = {}
        """Of a call: who is called, and the call's id."""

    @property
    def text(self) -> str:
        """The reasoning, the message, the arguments or the input."""
        return "".join(self.pieces)

    def fields(self, *, has_part: bool = True) -> dict[str, Any]:
        """The item as JSON; without `has_part` as it is before its one part has begun."""
        shared = {"id": self.item_id, "type": self.kind.name, "status": self.status}
        if self.kind.part is None:
            return shared | self.call | {self.kind.field: self.text}
        content = {"content": [self.part()] if has_part else []}
        if self.kind is REASONING:
            return shared | {"summary": [], "encrypted_content": None} | content
        return shared | {"role": "assistant"} | content

    def part(self) -> dict[str, Any]:
        """The part with its text so far."""
        part: dict[str, Any] = {"type": self.kind.part, "text": self.text}
        return part | {"annotations": [], "logprobs": self.logprobs} if self.kind is MESSAGE else part


def call_kind(target: Target) -> ItemKind:
    """The kind of item that calls a tool."""
    return CUSTOM_CALL if target.is_custom else FUNCTION_CALL


def call_fields(target: Target, call_id: str) -> dict[str, Any]:
    """Who is called, and the call's id."""
    fields = {"call_id": call_id, "name": target.name}
    return fields | {"namespace": target.namespace} if target.namespace else fields


def output_items(reply: Reply, offered: OfferedTools) -> list[OutputItem]:
    """The output of a whole reply: reasoning, message, calls. There is always an item, which names the turn."""
    items: list[OutputItem] = []

    def add(kind: ItemKind, text: str, status: str) -> OutputItem:
        item = OutputItem(kind, reply.response_id, len(items))
        item.pieces.append(text)
        item.status = status
        items.append(item)
        return item

    if reply.reasoning:
        add(REASONING, reply.reasoning, "completed" if reply.content or reply.calls else last_status(reply))
    if reply.content or not (reply.reasoning or reply.calls):
        add(MESSAGE, reply.content, "completed" if reply.calls else last_status(reply))
    for call in reply.calls:
        target = offered.target(call.name)
        text = input_of(call.arguments) if target.is_custom else call.arguments
        item = add(call_kind(target), text, "completed" if call.complete else "incomplete")
        item.call = call_fields(target, call.call_id)
    return items


def last_status(reply: Reply) -> str:
    """Status of a reasoning or message item with which a reply ends."""
    return "incomplete" if reply.finish_reason == "length" else "completed"


def response_head(response_id: str, created: int, model: str) -> bytes:
    """Members of the response object that stay the same, beside `ResponsesCall.echo`."""
    return encode({"id": response_id, "object": "response", "created_at": created, "model": model})[1:-1]


def response_body(head: bytes, status: str, items: list[bytes], **fields: Any) -> bytes:
    """The response object: `fields` are those of its optional members that are not null."""
    members: dict[str, Any] = {"status": status, "error": None, "incomplete_details": None, "completed_at": None}
    members |= {"usage": None} | fields
    return b'{%s,%s,"output":[%s]}' % (head, encode(members)[1:-1], b",".join(items))


def final_fields(reply: Reply) -> dict[str, Any]:
    """What a response has to say when it has ended."""
    details = {"reason": "max_output_tokens"} if reply.finish_reason == "length" else None
    completed = None if details else int(time.time())
    return {"incomplete_details": details, "completed_at": completed, "usage": _usage(reply)}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": len(reply.token_ids),
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.prompt_tokens + len(reply.token_ids),
    }
