"""Reply formats that another library parses: what it finds, put under the gateway's rules of the view.

The library is fed token by token, so that what it finds cannot depend on how the engine cut its chunks. Its arguments
are its own JSON, where the format writes none. The rules of what is shown are those of `parse_hermes`: no newlines at
the ends of reasoning, no white space between the parts; text behind a call and calls beyond `max_calls` are counted
and not shown; a call has an end if its arguments are whole.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from molt.train.gateway.call import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from molt.train.gateway.parse import CallFormat, Reading


class ForeignReply(Protocol):
    """The library's parse of one reply."""

    def feed(
        self, text: str, token_ids: Sequence[int], *, is_last: bool = False
    ) -> Sequence[tuple[Literal["reasoning", "content", "call", "arguments"], str]]:
        """What the next token says: more text of a kind, or the name that a call begins with."""
        ...


class ForeignFormat(Protocol):
    """The library's parser of a format."""

    reasoning_marks: tuple[str, str]
    """What opens and closes reasoning; empty where nothing does."""

    def start(self, *, offers_tools: bool, tools: Sequence[dict[str, Any]], prompt_end: Sequence[int]) -> ForeignReply:
        """Begin a reply."""
        ...


class ForeignParser:
    """A `Parser` on top of a library's."""

    call_format: CallFormat | None = None

    def __init__(self, form: ForeignFormat, *, marks: Sequence[str]) -> None:
        """`marks`: control tokens that the library has to see, which are all but those that end a reply."""
        self._format = form
        self.marks = tuple(marks)
        self.opens_reasoning, self.closes_reasoning = form.reasoning_marks

    def start(
        self,
        *,
        offers_tools: bool,
        max_calls: int | None = None,
        in_reasoning: bool = False,  # noqa: ARG002 - the library sees the prompt's end
        tools: Sequence[dict[str, Any]] = (),
        prompt_end: Sequence[int] = (),
    ) -> Reading:
        """See `Parser.start`."""
        reply = self._format.start(offers_tools=offers_tools, tools=tools, prompt_end=prompt_end)
        return _ForeignReading(reply, max_calls)


class _ForeignReading:
    by_token: bool = True

    def __init__(self, reply: ForeignReply, max_calls: int | None) -> None:
        self.counters: dict[str, int] = {}
        self._reply = reply
        self._calls_left = max_calls
        self._newlines, self._space = "", ""
        self._reasoned = self._told = False
        self._called = self._in_call = self._hidden = False
        self._arguments: list[str] = []
        self._events: list[Event] = []

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        return self._see(text, token_ids, is_last=False)

    def finish(self) -> list[Event]:
        events = self._see("", (), is_last=True)
        self._end_call()
        if not self._called and self._space:
            self._events.append(Content(self._space))
        return events + self._take()

    def _see(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> list[Event]:
        for kind, more in self._reply.feed(text, token_ids, is_last=is_last):
            match kind:
                case "reasoning":
                    self._show_reasoning(more)
                case "content":
                    self._show(more)
                case "call":
                    self._end_call()
                    self._begin_call(more)
                case "arguments":
                    self._arguments.append(more)
                    if self._in_call and not self._hidden:
                        self._events.append(ToolCallArguments(more))
        return self._take()

    def _show_reasoning(self, text: str) -> None:
        text = self._newlines + text if self._reasoned else text.lstrip("\n")
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        if shown:
            self._reasoned = True
            self._events.append(Reasoning(shown))

    def _show(self, text: str) -> None:
        if self._reasoned and not self._told:
            text = text.lstrip()
        self._told |= bool(text)
        shown = text.rstrip()
        if self._called:
            if shown:
                self.counters["text_after_tool_call"] = 1
            return
        if shown:
            self._events.append(Content(self._space + shown))
            self._space = ""
        self._space += text[len(shown) :]

    def _begin_call(self, name: str) -> None:
        self._in_call, self._arguments = True, []
        self._hidden = self._calls_left == 0
        if self._hidden:
            self._count("tool_call_hidden")
            return
        self._called = True
        self._calls_left = None if self._calls_left is None else self._calls_left - 1
        self._events.append(ToolCallStart(name))

    def _end_call(self) -> None:
        if not self._in_call or self._hidden:
            return
        self._in_call = False
        if not self._arguments:
            self._events.append(ToolCallArguments("{}"))
        if _is_object("".join(self._arguments) or "{}"):
            self._events.append(ToolCallEnd())
        else:
            self._count("tool_call_cut")

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
