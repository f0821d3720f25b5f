"""One JSON value, checked while its text comes: each character is looked at once, however the text is cut."""

import re
from collections.abc import Callable

MAX_DEPTH = 56
"""Nested objects and arrays. Less than what a request body may have, so that a client can send the value back."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_CLOSERS = {"{": "}", "[": "]"}
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

_ZERO, _INTEGER, _FRACTION, _EXPONENT = "zero", "integer", "fraction", "exponent"
_DIGITS = "0123456789"
_NUMBER: dict[str, dict[str, str]] = {
    "start": {"-": "minus", "0": _ZERO} | dict.fromkeys("123456789", _INTEGER),
    "minus": {"0": _ZERO} | dict.fromkeys("123456789", _INTEGER),
    _ZERO: {".": "point", "e": "e", "E": "e"},
    _INTEGER: {".": "point", "e": "e", "E": "e"} | dict.fromkeys(_DIGITS, _INTEGER),
    "point": dict.fromkeys(_DIGITS, _FRACTION),
    _FRACTION: {"e": "e", "E": "e"} | dict.fromkeys(_DIGITS, _FRACTION),
    "e": {"+": "sign", "-": "sign"} | dict.fromkeys(_DIGITS, _EXPONENT),
    "sign": dict.fromkeys(_DIGITS, _EXPONENT),
    _EXPONENT: dict.fromkeys(_DIGITS, _EXPONENT),
}
_WHOLE_NUMBERS = frozenset({_ZERO, _INTEGER, _FRACTION, _EXPONENT})


_Reader = Callable[["JsonText", str, int], int]
"""Not bound to its object: that would be a cycle, and garbage to collect, in every reply."""


class JsonText:
    """A value in the making, by RFC 8259 to the letter. Leading white space belongs to it."""

    def __init__(self) -> None:
        self.whole = False
        self.broken = False
        """What came is the beginning of no JSON value."""
        self._open: list[str] = []
        self._read: _Reader = JsonText._value
        self._is_key = False
        self._left = 0
        self._rest = ""
        self._number = "start"

    def feed(self, text: str, start: int = 0) -> int:
        """Read `text` from index `start`.

        Returns:
            The index behind the last character that belongs to the value: the end of `text` while it is neither whole
            nor broken.
        """
        size = len(text)
        while start < size and not (self.whole or self.broken):
            start = self._read(self, text, start)
        return start

    # A reader takes what it can of the text from an index on, says where it stopped, and who goes on.

    def _value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            self._is_key, self._read = False, JsonText._string
        elif char in _CLOSERS and len(self._open) < MAX_DEPTH:
            self._open.append(char)
            self._read = JsonText._first_key if char == "{" else JsonText._first_item
        elif char in _LITERALS:
            self._rest, self._read = _LITERALS[char], JsonText._literal
        elif char in _NUMBER["start"]:
            self._number, self._read = _NUMBER["start"][char], JsonText._digits
        else:
            self.broken = True
            return at
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at < len(text):
            self._read = JsonText._behind if text[at] == "]" else JsonText._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at < len(text):
            self._read = JsonText._behind if text[at] == "}" else JsonText._key
        return at

    def _key(self, text: str, at: int) -> int:
        return self._expect(text, at, '"', JsonText._string, is_key=True)

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", JsonText._value)

    def _expect(self, text: str, at: int, char: str, then: _Reader, *, is_key: bool = False) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != char:
            self.broken = True
            return at
        self._is_key, self._read = is_key, then
        return at + 1

    def _behind(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        innermost = self._open[-1]
        if text[at] == ",":
            self._read = JsonText._key if innermost == "{" else JsonText._value
        elif text[at] == _CLOSERS[innermost]:
            self._open.pop()
            self._end()
        else:
            self.broken = True
            return at
        return at + 1

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._read = JsonText._colon
            else:
                self._end()
        elif text[at] == "\\":
            self._read = JsonText._escape
        else:
            self.broken = True
            return at
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] in _ESCAPES:
            self._read = JsonText._string
        elif text[at] == "u":
            self._left, self._read = 4, JsonText._code_point
        else:
            self.broken = True
            return at
        return at + 1

    def _code_point(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            self.broken = True
            return at
        self._left -= 1
        if not self._left:
            self._read = JsonText._string
        return at + 1

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._rest[0]:
            self.broken = True
            return at
        self._rest = self._rest[1:]
        if not self._rest:
            self._end()
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        then = _NUMBER[self._number].get(text[at])
        if then is not None:
            self._number = then
            return at + 1
        if self._number in _WHOLE_NUMBERS:
            self._end()
        else:
            self.broken = True
        return at

    def _end(self) -> None:
        if self._open:
            self._read = JsonText._behind
        else:
            self.whole = True


def skip_space(text: str, at: int) -> int:
    """The index of the next character that is no white space of JSON's."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
