"""From sampled text to what a client sees: reasoning, text, tool calls. A view only; the token ids are the record.

    <think>...</think>  text  <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...

Rules of the view, the same however the text is cut into pieces:

- Reasoning is what a leading `<think>` opens, without the newlines at its ends. Marks inside it are reasoning.
- White space between reasoning, text and tool calls is dropped.
- A tool call is shown when it is whole and its JSON valid: clients' SDKs raise on a stream of broken arguments. One
  that is not becomes text. `</tool_call>` inside a JSON string does not end it.
- Text after a tool call is not shown.
"""

import re
from typing import Protocol

import msgspec

from molt.train.gateway.call import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"


class Reading(Protocol):
    """The parse of one reply."""

    counters: dict[str, int]
    """What was not shown, or shown as text, by reason."""

    def feed(self, text: str) -> list[Event]:
        """Events that `text` completes."""
        ...

    def finish(self) -> list[Event]:
        """Events of what was held back, once the reply is over."""
        ...


class Parser(Protocol):
    """A model family's reply format."""

    marks: tuple[str, ...]
    """Control tokens that the format is made of."""
    opens_reasoning: str
    closes_reasoning: str

    def start(self, *, offers_tools: bool, max_calls: int | None = None, in_reasoning: bool = False) -> Reading:
        """Begin a reply. `in_reasoning`: the prompt has opened the reasoning already."""
        ...


class HermesParser:
    """The format of Qwen3 and Hermes: `<think>` reasoning and JSON in `<tool_call>`."""

    marks: tuple[str, ...] = (_THINK, _END_THINK, _CALL, _END_CALL)
    opens_reasoning, closes_reasoning = _THINK, _END_THINK

    def start(self, *, offers_tools: bool, max_calls: int | None = None, in_reasoning: bool = False) -> Reading:
        """See `Parser.start`."""
        return _HermesReading(offers_tools=offers_tools, max_calls=max_calls, in_reasoning=in_reasoning)


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _HermesReading:
    def __init__(self, *, offers_tools: bool, max_calls: int | None, in_reasoning: bool) -> None:
        self.counters: dict[str, int] = {}
        self._offers_tools = offers_tools
        self._calls_left = max_calls
        self._held = ""
        self._events: list[Event] = []
        self._part = self._reasoning if in_reasoning else self._opening
        self._at_reasoning_start = True
        self._space = ""
        self._scanned = 0
        self._called = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._part():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._part == self._reasoning:
            self._emit_reasoning(held)
        elif self._part == self._call:
            self._count("tool_call_unfinished")
            self._show(self._space + _CALL + held)
        elif self._part != self._after_reasoning:
            self._show(held)
        events, self._events = self._events, []
        return events

    # A part reads what it can of the held text, and says whether another part has to go on with the rest.

    def _opening(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(_THINK):
            self._held = text[len(_THINK) :]
            self._part = self._reasoning
            return True
        if _THINK.startswith(text):
            return False
        self._part = self._text
        return True

    def _reasoning(self) -> bool:
        text, mark, rest = self._held.partition(_END_THINK)
        if mark:
            self._emit_reasoning(text.rstrip("\n"))
            self._held = rest
            self._part = self._after_reasoning
            return True
        ready = text[: len(text) - partial_mark(text, (_END_THINK,))].rstrip("\n")
        self._held = text[len(ready) :]
        self._emit_reasoning(ready)
        return False

    def _after_reasoning(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._part = self._text
        return bool(self._held)

    def _text(self) -> bool:
        if not self._offers_tools:
            self._show(self._held)
            self._held = ""
            return False
        text, mark, rest = self._held.partition(_CALL)
        ready = (text if mark else text[: len(text) - partial_mark(text, (_CALL,))]).rstrip()
        self._show(ready)
        if not mark:
            self._held = text[len(ready) :]
            return False
        self._space = text[len(ready) :]
        self._held, self._scanned = rest, 0
        self._part = self._call
        return True

    def _call(self) -> bool:
        end = self._held.find(_END_CALL, self._scanned)
        while end >= 0 and '"' in _STRING.sub("", self._held[:end]):
            end = self._held.find(_END_CALL, end + 1)
        if end < 0:
            self._scanned = max(self._scanned, len(self._held) - len(_END_CALL) + 1)
            return False
        body, self._held = self._held[:end], self._held[end + len(_END_CALL) :]
        self._part = self._text
        call = _tool_call(body)
        if call is None:
            self._count("tool_call_invalid")
            self._show(self._space + _CALL + body + _END_CALL)
        elif self._calls_left == 0:
            self._count("tool_call_hidden")
        else:
            self._called = True
            self._calls_left = None if self._calls_left is None else self._calls_left - 1
            self._events += [ToolCallStart(call[0]), ToolCallArguments(call[1]), ToolCallEnd()]
        return True

    def _show(self, text: str) -> None:
        if not self._called:
            if text:
                self._events.append(Content(text))
        elif text.strip():
            self.counters["text_after_tool_call"] = 1

    def _emit_reasoning(self, text: str) -> None:
        if self._at_reasoning_start:
            text = text.lstrip("\n")
        if text:
            self._at_reasoning_start = False
            self._events.append(Reasoning(text))

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1


def _tool_call(body: str) -> tuple[str, str] | None:
    try:
        function = msgspec.json.decode(body, type=_Function)
        if isinstance(msgspec.json.decode(function.arguments), dict):
            return function.name, bytes(function.arguments).decode()
    except (msgspec.DecodeError, RecursionError):
        pass
    return None


def partial_mark(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of `marks` begins, without being whole."""
    for size in range(min(max(map(len, marks)) - 1, len(text)), 0, -1):
        end = text[-size:]
        if any(len(mark) > size and mark.startswith(end) for mark in marks):
            return size
    return 0
