"""A model call and its reply in the shape that all wires share."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from molt.train.engine.protocol import EngineFinish
from molt.train.gateway.call_error import CallError
from molt.train.records.turn import Wire

Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content` (text), and where they apply `tool_calls`, `tool_call_id`,
`name`, `reasoning_content`. The arguments of a tool call are a dict, or text where they are no JSON object."""

Count = Callable[[str], None]
"""Counts something dropped, ignored or changed, under a name."""


class SamplingWishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked for; None where it asked for nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed request. `messages` and `tools` stay the client's JSON, since most of it was converted before."""

    model: str
    messages: list[bytes]
    num_leading: int = 0
    """Of `messages`, those in front that stand elsewhere in the request (the system text of Messages)."""
    tools: bytes = b"null"
    offers_tools: bool = True
    """False: what looks like a tool call in the reply is text, whatever the tools."""
    max_calls: int | None = None
    """Tool calls that the reply may show."""
    wishes: SamplingWishes = SamplingWishes()
    stream: bool = False
    prefill: str = ""
    """The beginning of the reply, given by the client."""
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()
    """Names under which to count what of the request has no effect."""


class Reasoning(msgspec.Struct, frozen=True):
    """More reasoning text."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More text for the user."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """One whole tool call. `arguments` is the JSON text as it was sampled."""

    name: str
    arguments: str
    call_id: str = ""


Event = Reasoning | Content | ToolCall


class Reply(msgspec.Struct, kw_only=True):
    """What the client sees of a turn, growing while it is sampled."""

    response_id: str
    model: str
    created: int
    """Unix time in seconds."""
    prompt_tokens: int
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: EngineFinish = "stop"
    stop_string: str | None = None
    window_full: bool = False
    """Sampling ended because the context window did, before the tokens asked for."""
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class ReplyEncoder(Protocol):
    """Writes one reply in a wire's format: either `whole`, or `start`, any number of `events`, `finish`."""

    def whole(self, reply: Reply) -> bytes:
        """The whole JSON body."""
        ...

    def start(self, reply: Reply) -> bytes:
        """The frames before the first token."""
        ...

    def events(self, events: list[Event], token_ids: list[int], logprobs: list[float]) -> bytes:
        """The frames of newly sampled tokens and what they said; may be empty."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """The last frames, the terminal one included."""
        ...


class Dialect(Protocol):
    """One wire: how its requests read, and how its replies are written."""

    @property
    def wire(self) -> Wire:
        """Its name in records."""
        ...

    response_prefix: str
    call_prefix: str
    keepalive: bytes
    """What clients of a stream count as life, allowed between any two events."""

    def parse(self, body: bytes) -> ModelCall:
        """Read a request. Raises CallError."""
        ...

    def messages(self, raw: bytes, where: str, count: Count) -> list[Message]:
        """Convert one of `ModelCall.messages`; `where` is its path in the request. Raises CallError."""
        ...

    def tools(self, raw: bytes, count: Count) -> list[dict[str, Any]]:
        """Convert `ModelCall.tools` to function schemas as chat templates take them. Raises CallError."""
        ...

    def encoder(self, call: ModelCall, token_text: Callable[[int], str]) -> ReplyEncoder:
        """An encoder for the reply to `call`."""
        ...

    def error(self, error: CallError, request_id: str) -> tuple[int, bytes]:
        """Status and body of an error."""
        ...

    def failure(self, error: CallError, request_id: str) -> bytes:
        """The frame that ends a stream by an error."""
        ...
