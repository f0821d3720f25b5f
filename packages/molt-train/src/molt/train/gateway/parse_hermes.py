"""The reply format of Qwen3 and Hermes, read while it is sampled.

    <think>...</think>  text  <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...

The rules of the view. They are frozen, and the same however the text is cut into pieces:

- Reasoning is what a leading `<think>` opens, or the prompt did, without the newlines at its ends. Its first
  `</think>` ends it; marks before that are reasoning. Where none comes, the first `<tool_call>` ended it: what follows
  such a mark is held back until the reply is over, or `</think>` shows that it was reasoning.
- White space between reasoning, text and tool calls is dropped.
- A tool call begins to be shown as soon as its name is known and its arguments turn out to be an object. The arguments
  are shown as they are sampled, character for character; none at all are `{}`. It ends with `</tool_call>`, or with the
  reply where its JSON is whole by then. `</tool_call>` inside a JSON string does not end it.
- What is no call by then (its JSON breaks, it has no name, its arguments are no object, the reply ends) is text,
  `</tool_call>` included.
- A call whose JSON breaks later stays without an end, its arguments the valid beginning; what follows up to the next
  `</tool_call>` is not shown. So does one that the end of the reply cuts.
- Calls beyond `max_calls`, and text after the first call shown, are not shown.
- Without tools to call, `<tool_call>` is text.

Counted in `Reading.counters`: `tool_call_invalid`, `tool_call_cut`, `tool_call_unclosed` (whole, but without its mark),
`tool_call_hidden`, `tool_call_extra_keys`, `tool_call_in_reasoning` (it ended the reasoning), `text_after_tool_call`.
"""

from collections.abc import Callable, Sequence

from molt.train.gateway.call import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from molt.train.gateway.parse_call import END_CALL, CallText

THINK, END_THINK, CALL = "<think>", "</think>", "<tool_call>"


_NO_CALL = CallText()
"""Before the first call."""


class HermesReading:
    """A `Reading` of one reply, by the rules above."""

    by_token: bool = False

    def __init__(self, *, offers_tools: bool, max_calls: int | None, in_reasoning: bool) -> None:
        self.counters: dict[str, int] = {}
        self._calls_left = max_calls
        self._text_marks = (CALL,) if offers_tools else ()
        self._reasoning_marks = (END_THINK, *self._text_marks)
        self._part: Callable[[HermesReading, str, int], int] = HermesReading._opening
        self._in_reasoning = in_reasoning
        self._held = ""
        """What may become a mark."""
        self._space: list[str] = []
        """White space that is shown only if the same part goes on behind it."""
        self._doubtful: list[str] = []
        self._events: list[Event] = []
        self._call = _NO_CALL
        self._raw: list[str] = []
        self._starts_reasoning = True
        self._begun = self._hidden = self._called = False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:  # noqa: ARG002 - not `by_token`
        """See `Reading.feed`."""
        if self._held:
            text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            at = self._part(self, text, at)
        return self._take()

    def finish(self) -> list[Event]:
        """See `Reading.finish`."""
        events: list[Event] = []
        if self._part == HermesReading._doubt:
            self._count("tool_call_in_reasoning")
            self._space, self._part = [], HermesReading._text
            held, self._held = self._held, ""
            events = self.feed("".join(self._doubtful) + held)
        elif self._part == HermesReading._opening and self._in_reasoning:
            self._go_on_reasoning()
        held, self._held = self._held, ""
        if self._part == HermesReading._reasoning:
            self._show_reasoning(held)
            self._emit(Reasoning, "".join(self._space))
        elif self._part == HermesReading._in_call:
            self._finish_call()
        elif self._part != HermesReading._after_reasoning and not (self._part == HermesReading._broken and self._begun):
            self._show(held)
            self._show_space()
        return events + self._take()

    # A part reads what it can of the text from an index on, says where it stopped, and which part goes on there. It is
    # no bound method, which would make every reading a cycle, and garbage to collect.

    def _opening(self, text: str, at: int) -> int:
        rest = text[at:]
        begin = rest.lstrip()
        if begin.startswith(THINK):
            self._space, self._part = [], HermesReading._reasoning
            return len(text) - len(begin) + len(THINK)
        if THINK.startswith(begin):
            self._space.append(rest[: len(rest) - len(begin)])
            self._held = begin
            return len(text)
        self._part = HermesReading._text
        if self._in_reasoning:
            self._go_on_reasoning()
        return at

    def _go_on_reasoning(self) -> None:
        """What was read so far is the beginning of the reasoning that the prompt opened."""
        space, self._space, self._part = self._space, [], HermesReading._reasoning
        self._show_reasoning("".join(space))

    def _reasoning(self, text: str, at: int) -> int:
        end, mark = _find_mark(text, at, self._reasoning_marks)
        self._show_reasoning(text[at:end])
        if mark == END_THINK:
            self._space, self._part = [], HermesReading._after_reasoning
        elif mark:
            self._doubtful, self._part = [CALL], HermesReading._doubt
        return self._behind(text, end, mark)

    def _doubt(self, text: str, at: int) -> int:
        end, mark = _find_mark(text, at, (END_THINK,))
        self._doubtful.append(text[at:end])
        if mark:
            self._show_reasoning("".join(self._doubtful))
            self._doubtful = []
            self._space, self._part = [], HermesReading._after_reasoning
        return self._behind(text, end, mark)

    def _after_reasoning(self, text: str, at: int) -> int:
        rest = text[at:].lstrip()
        if rest:
            self._part = HermesReading._text
        return len(text) - len(rest)

    def _text(self, text: str, at: int) -> int:
        end, mark = _find_mark(text, at, self._text_marks)
        self._show(text[at:end])
        if mark:
            self._call, self._raw = CallText(), [CALL]
            self._begun = self._hidden = False
            self._part = HermesReading._in_call
        return self._behind(text, end, mark)

    def _in_call(self, text: str, at: int) -> int:
        call = self._call
        end = call.feed(text, at)
        if not self._begun:
            self._raw.append(text[at:end])
            if call.starts or call.closed:
                self._begin_call()
        if self._begun and not self._hidden:
            self._emit(ToolCallArguments, call.take_arguments())
        if call.closed:
            self._end_call()
            self._part = HermesReading._text
        elif call.broken:
            self._break_call()
        return end

    def _broken(self, text: str, at: int) -> int:
        end, mark = _find_mark(text, at, (END_CALL,))
        end = self._behind(text, end, mark)
        if not self._begun:
            self._show(text[at : end - len(self._held)])
        if mark:
            self._part = HermesReading._text
        return end

    def _behind(self, text: str, end: int, mark: str | None) -> int:
        """Where to go on behind a mark that was found at `end`; what may become one is held back."""
        if mark:
            return end + len(mark)
        self._held = text[end:]
        return len(text)

    def _begin_call(self) -> None:
        self._begun, self._raw = True, []
        if self._calls_left == 0:
            self._hidden = True
            self._count("tool_call_hidden")
            return
        self._space, self._called = [], True
        self._calls_left = None if self._calls_left is None else self._calls_left - 1
        self._events.append(ToolCallStart(self._call.name or ""))

    def _end_call(self) -> None:
        if self._call.has_more:
            self._count("tool_call_extra_keys")
        if not self._hidden:
            self._events.append(ToolCallEnd())

    def _break_call(self) -> None:
        self._part = HermesReading._broken
        if not self._hidden:
            self._count("tool_call_invalid")
        if not self._begun:
            self._show("".join(self._raw))

    def _finish_call(self) -> None:
        """The reply is over in a call, which may be whole but for its mark."""
        if self._call.whole:
            self._count("tool_call_unclosed")
            if not self._begun:
                self._begin_call()
                if not self._hidden:
                    self._emit(ToolCallArguments, self._call.take_arguments())
            self._end_call()
        elif not self._hidden:
            self._count("tool_call_cut")
            if not self._begun:
                self._show("".join(self._raw))
                self._show_space()

    def _show(self, text: str) -> None:
        shown = text.rstrip()
        if self._called:
            if shown:
                self.counters["text_after_tool_call"] = 1
            return
        if shown:
            self._show_space()
            self._emit(Content, shown)
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def _show_space(self) -> None:
        if self._space and not self._called:
            self._emit(Content, "".join(self._space))
        self._space = []

    def _show_reasoning(self, text: str) -> None:
        if self._starts_reasoning:
            text = text.lstrip("\n")
            self._starts_reasoning = not text
        shown = text.rstrip("\n")
        if shown:
            self._emit(Reasoning, "".join([*self._space, shown]))
            self._space = []
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def _emit(self, kind: type[Content | Reasoning | ToolCallArguments], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1


def _find_mark(text: str, at: int, marks: tuple[str, ...]) -> tuple[int, str | None]:
    """Where the first of `marks` stands, and which; without one, where the end of `text` may begin one."""
    at = text.find("<", at)
    while at >= 0:
        for mark in marks:
            if text.startswith(mark, at):
                return at, mark
            if len(text) - at < len(mark) and mark.startswith(text[at:]):
                return at, None
        at = text.find("<", at + 1)
    return len(text), None
