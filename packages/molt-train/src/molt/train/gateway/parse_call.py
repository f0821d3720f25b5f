"""The JSON of one tool call, read while it is sampled: `{"name": ..., "arguments": {...}}` and its closing mark."""

from collections.abc import Callable

import msgspec

from molt.train.gateway.json_text import JsonText, skip_space

END_CALL = "</tool_call>"
_OPENERS = {"name": '"', "arguments": "{"}
"""What the values of the two members begin with."""


_Reader = Callable[["CallText", str, int], int]
"""Not bound to its object: that would be a cycle, and garbage to collect, in every reply."""


class CallText:
    """What stands between `<tool_call>` and `</tool_call>`, the closing mark included.

    Strict JSON: an object with a `name`, not empty, and `arguments`, an object; neither twice; in any order, among
    other members. Arguments may be missing, which makes them `{}`.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.whole = False
        """The object is complete."""
        self.closed = False
        """So is the mark behind it."""
        self.broken = False
        self.has_more = False
        """There are members beside the two."""
        self._read: _Reader = CallText._opening
        self._value = JsonText()
        self._key: str | None = None
        self._text: list[str] = []
        self._seen: set[str] = set()
        self._new: list[str] = []
        self._mark_read = 0

    @property
    def starts(self) -> bool:
        """The call is known: its name, and that its arguments are an object."""
        return self.name is not None and "arguments" in self._seen

    def feed(self, text: str, start: int) -> int:
        """Read `text` from index `start`; returns the index behind what belongs to the call."""
        while start < len(text) and not (self.closed or self.broken):
            start = self._read(self, text, start)
        return start

    def take_arguments(self) -> str:
        """The JSON text of the arguments, as far as it has not been taken yet."""
        text, self._new = "".join(self._new), []
        return text

    def _opening(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", CallText._first_key)

    def _first_key(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at < len(text):
            self._read = CallText._behind if text[at] == "}" else CallText._next_key
        return at

    def _next_key(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at < len(text):
            self._key = None
            self._begin(text, at, '"')
        return at

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", CallText._before_value)

    def _before_value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        key = self._key or ""
        self.has_more |= key not in _OPENERS
        self._begin(text, at, _OPENERS.get(key))
        if key in _OPENERS and not self.broken:
            self.broken = key in self._seen
            self._seen.add(key)
        return at

    def _begin(self, text: str, at: int, opener: str | None) -> None:
        self.broken = opener is not None and text[at] != opener
        self._value, self._text, self._read = JsonText(), [], CallText._inside

    def _inside(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self.broken = self._value.broken
        if self._key in (None, "name", "arguments"):
            self._text.append(text[at:end])
        if self._key == "arguments":
            self._new.append(text[at:end])
        if self._value.whole:
            self._take_value()
        return end

    def _take_value(self) -> None:
        self._read = CallText._colon if self._key is None else CallText._behind
        value = None
        if self._text:
            try:
                # The last word on what clients can decode: lone surrogates and numbers out of range break a call too.
                value = msgspec.json.decode("".join(self._text))
            except (msgspec.DecodeError, RecursionError):
                self.broken = True
                return
        if self._key is None:
            self._key = value
        elif self._key == "name":
            self.name, self.broken = value or None, not value

    def _behind(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._read = CallText._next_key
        elif text[at] == "}" and self.name is not None:
            self._read, self.whole = CallText._mark, True
            if "arguments" not in self._seen:
                self._new.append("{}")
        else:
            self.broken = True
            return at
        return at + 1

    def _mark(self, text: str, at: int) -> int:
        at = at if self._mark_read else skip_space(text, at)
        while at < len(text) and not self.closed:
            if text[at] != END_CALL[self._mark_read]:
                self.broken = True
                return at
            self._mark_read += 1
            self.closed = self._mark_read == len(END_CALL)
            at += 1
        return at

    def _expect(self, text: str, at: int, char: str, then: _Reader) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != char:
            self.broken = True
            return at
        self._read = then
        return at + 1
