"""From sampled text to what a client sees: reasoning, text, tool calls. A view only; the token ids are the record."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from molt.train.gateway.call import Event
from molt.train.gateway.parse_call import END_CALL
from molt.train.gateway.parse_hermes import CALL, END_THINK, THINK, HermesReading


class Reading(Protocol):
    """The parse of one reply."""

    counters: dict[str, int]
    """What was not shown, or not as what it was meant to be, by reason."""
    by_token: bool
    """Wants its text token by token, and the tokens with it."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Events that `text` completes; it is the text of `token_ids`, which are only given `by_token`."""
        ...

    def finish(self) -> list[Event]:
        """Events of what was held back, once the reply is over."""
        ...


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a tool call is written: `begin`, the name as JSON, `middle`, the arguments as JSON, `end`."""

    begin: str
    middle: str
    end: str
    between: str
    """Between two calls."""
    trigger: str
    """Of `begin`, what text has for no other reason."""


class Parser(Protocol):
    """A model family's reply format."""

    marks: tuple[str, ...]
    """Control tokens that the format is made of."""
    opens_reasoning: str
    closes_reasoning: str
    call_format: CallFormat | None
    """For grammars; None where no grammar can bound this family's calls."""

    def start(
        self,
        *,
        offers_tools: bool,
        max_calls: int | None = None,
        in_reasoning: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        prompt_end: Sequence[int] = (),
    ) -> Reading:
        """Begin a reply.

        Args:
            offers_tools: There are tools that the reply may call; without, what looks like a call is text.
            max_calls: Tool calls that are shown; None: all.
            in_reasoning: The prompt has opened the reasoning already.
            tools: Function schemas, for formats that write arguments without their types.
            prompt_end: The last tokens of the prompt.
        """
        ...


class HermesParser:
    """The format of Qwen3 and Hermes: `<think>` reasoning and JSON in `<tool_call>`."""

    marks: tuple[str, ...] = (THINK, END_THINK, CALL, END_CALL)
    opens_reasoning, closes_reasoning = THINK, END_THINK
    call_format: CallFormat | None = CallFormat(
        begin=f'{CALL}\n{{"name": ', middle=', "arguments": ', end=f"}}\n{END_CALL}", between="\n", trigger=CALL
    )

    def start(
        self,
        *,
        offers_tools: bool,
        max_calls: int | None = None,
        in_reasoning: bool = False,
        tools: Sequence[dict[str, Any]] = (),  # noqa: ARG002 - JSON has types
        prompt_end: Sequence[int] = (),  # noqa: ARG002 - `in_reasoning` says it
    ) -> Reading:
        """See `Parser.start`."""
        return HermesReading(offers_tools=offers_tools, max_calls=max_calls, in_reasoning=in_reasoning)


def partial_mark(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of `marks` begins, without being whole."""
    longest = 0
    for mark in marks:
        start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while 0 <= start < len(text) - longest:
            if mark.startswith(text[start:]):
                longest = len(text) - start
                break
            start = text.find(mark[0], start + 1)
    return longest
