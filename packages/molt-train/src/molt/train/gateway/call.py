"""A model call and its reply in the shape that all wires share."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from molt.train.engine.protocol import EngineFinish
from molt.train.gateway.call_error import CallError
from molt.train.records.turn import Wire

Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content` (text), and where they apply `tool_calls`, `tool_call_id`,
`name`, `reasoning_content`. The arguments of a tool call are a dict, or text where they are no JSON object. `turn_id`,
where the client names the turn that it is, is for the history only."""

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
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools the reply may call, and whether it must."""

    mode: Literal["auto", "none", "required"] = "auto"
    """`none`: what looks like a tool call is text, whatever the tools."""
    names: tuple[str, ...] = ()
    """Only these tools may be called; empty: any."""
    max_calls: int | None = None
    """Tool calls that the reply may show; 1 where the client wants none in parallel."""
    strict: tuple[str, ...] = ()
    """Tools whose arguments must follow their schema."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of the reply must be."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
    spec: Any = None
    """The schema, expression, choices, grammar or tag, as JSON; None for `json_object`."""
    param: str = "response_format"
    """The field of the request that asks for it."""


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed request. `messages` and `tools` stay the client's JSON, since most of it was converted before."""

    model: str
    messages: list[bytes]
    num_leading: int = 0
    """Of `messages`, those in front that stand elsewhere in the request (the system text of Messages)."""
    raw_prompts: tuple[str | list[int], ...] = ()
    """Texts or token ids that are prompts as they are, instead of messages: each has `num_choices` replies, as text."""
    joins_turns: bool = False
    """Messages of one user, or one assistant, that follow one another are one turn."""
    tools: bytes = b"null"
    tool_choice: ToolChoice = ToolChoice()
    response_format: ResponseFormat | None = None
    """None: free text."""
    wishes: SamplingWishes = SamplingWishes()
    num_choices: int = 1
    """Independent samples of one reply (`n`)."""
    num_top_logprobs: int = 0
    """Likeliest alternatives of each token that the client wants to see."""
    stream: bool = False
    prefill: str = ""
    """The beginning of the reply, given by the client."""
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()
    """Names under which to count what of the request has no effect."""

    def where(self, index: int) -> str:
        """Path in the request of one of `messages`."""
        return f"messages[{index - self.num_leading}]" if index >= self.num_leading else "system"

    async def accepted(self) -> None:
        """Called before the call is sampled."""


class Reasoning(msgspec.Struct, frozen=True):
    """More reasoning text."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More text for the user."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call begins: the tool is known."""

    name: str
    call_id: str = ""


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the newest call's arguments, as it was sampled."""

    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The newest call is whole. A call that is cut, or whose JSON breaks, has no end."""


Event = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd


class ToolCall(msgspec.Struct):
    """One tool call of a reply. `arguments` is JSON, or the beginning of JSON where the call is not complete."""

    name: str
    call_id: str
    arguments: str = ""
    complete: bool = False


TopLogprobs = list[tuple[int, float]]
"""The likeliest tokens at one position, with their log-probs, best first."""


class Step(msgspec.Struct, frozen=True):
    """Newly sampled tokens of one choice, and what they say."""

    events: list[Event]
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] = []
    """One a token where the call asks for them, else empty."""
    choice: int = 0


class Reply(msgspec.Struct, kw_only=True):
    """What the client sees of a turn, growing while it is sampled."""

    response_id: str
    model: str
    created: int
    """Unix time in seconds."""
    choice: int = 0
    """Place among the samples of one request."""
    prompt_tokens: int
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    top_logprobs: list[TopLogprobs] = []
    finish_reason: EngineFinish = "stop"
    stop_string: str | None = None
    window_full: bool = False
    """Sampling ended because the context window did, before the tokens asked for."""
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class ReplyEncoder(Protocol):
    """Writes one reply in a wire's format: either `whole`, or `start`, any number of `step`s, `finish`.

    `replies` are the choices in order; wires that know no choices are given one.
    """

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """The whole JSON body."""
        ...

    def start(self, replies: Sequence[Reply]) -> bytes:
        """The frames before the first token."""
        ...

    def step(self, step: Step) -> bytes:
        """The frames of newly sampled tokens and what they said; may be empty."""
        ...

    def finish(self, replies: Sequence[Reply]) -> bytes:
        """The last frames, the terminal one included."""
        ...

    def keepalive(self) -> bytes:
        """What clients of a stream count as life, between any two writes after `start`."""
        ...

    def failure(self, error: CallError, request_id: str) -> bytes:
        """The frames that end a stream by an error, whatever of it has been written."""
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
    """What clients of a stream count as life before its `ReplyEncoder.start`."""

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
