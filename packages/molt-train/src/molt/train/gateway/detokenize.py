"""From sampled token ids to text, as the ids come: nothing is shown that a later token could still change."""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from molt.train.gateway.call import Event
from molt.train.gateway.parse import Parser, Reading, partial_mark
from molt.train.gateway.render import Renderer

Decode = Callable[[list[int]], str]
_REPLACEMENT = "\ufffd"
_MAX_PENDING = 3
"""Bytes that a character may lack, each of which may be shown as one U+FFFD meanwhile."""
_MAX_HELD, _KEPT_HELD = 32, 12
"""Tokens held back. What is pending is the last three U+FFFD at most, of up to four bytes each."""


class Detokenizer:
    """Text of a growing list of tokens. Bytes of a character whose rest has not been sampled are held back."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []
        self._num_read: int | None = 0
        """Characters of the text of context and held tokens that were given out; None: those of the context."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete."""
        if len(token_ids) == 1 and not self._held:
            text = _text_behind(self._decode, self._context[0] if self._context else None, token_ids[0])
            if text is not None:
                self._context, self._num_read = [token_ids[0]], None
                return text
        if self._num_read is None:
            self._num_read = _length(self._decode, self._context[0])
        self._held.extend(token_ids)
        text = self._decode(self._context + self._held)
        if not text.endswith(_REPLACEMENT):
            return self._take(text)
        pending = min(_MAX_PENDING, len(text) - len(text.rstrip(_REPLACEMENT)))
        ready, self._num_read = text[self._num_read : -pending], max(self._num_read, len(text) - pending)
        if len(self._held) > _MAX_HELD:  # broken bytes without end
            self._context, self._held = [], self._held[-_KEPT_HELD:]
            self._num_read += len(self._decode(self._held)) - len(text)
        return ready

    def finish(self) -> str:
        """What was held back, broken characters as U+FFFD."""
        return self._take(self._decode(self._context + self._held)) if self._held else ""

    def _take(self, text: str) -> str:
        text = text[self._num_read :]
        # Some decoders (SentencePiece's) drop the first token's leading space: one token stays in front of the next.
        if self._held:
            self._context, self._held, self._num_read = self._held[-1:], [], None
        return text


@lru_cache(maxsize=65536)
def _text_behind(decode: Decode, before: int | None, token_id: int) -> str | None:
    """The text of a token behind another one; None where it ends in the middle of a character."""
    text = decode([token_id] if before is None else [before, token_id])
    if text.endswith(_REPLACEMENT):
        return None
    return text if before is None else text[_length(decode, before) :]


@lru_cache(maxsize=65536)
def _length(decode: Decode, token_id: int) -> int:
    return len(decode([token_id]))


class StopFilter:
    """Passes text on up to the first stop string, and holds back what may become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of the text so far that no stop string can claim, as far as it is new."""
        if not self._stops:
            return text
        self._held += text
        found = [start for start in map(self._held.find, self._stops) if start >= 0]
        cut = min(found) if found else len(self._held) - partial_mark(self._held, self._stops)
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def finish(self, stop_string: str | None) -> str:
        """The rest, without `stop_string`, which ended the sampling, and what follows it."""
        return self._held if stop_string is None else self._held.partition(stop_string)[0]


class TokenReader:
    """Token ids in, events out: the same ones, however the ids are cut into chunks."""

    def __init__(
        self, reading: Reading, *, decode: Decode, hidden: Collection[int], stops: tuple[str, ...] = ()
    ) -> None:
        """`hidden` are the control tokens that no client sees; the marks of the reply's format are not among them."""
        self._reading = reading
        self._hidden = hidden
        self._detokenizer = Detokenizer(decode)
        self._stops = StopFilter(stops)

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """Events that the tokens complete."""
        hidden = self._hidden
        visible = [token_id for token_id in token_ids if token_id not in hidden]
        if not visible:
            return []
        if self._reading.by_token:
            return [event for token_id in visible for event in self._feed_token(token_id)]
        text = self._stops.feed(self._detokenizer.feed(visible))
        return self._reading.feed(text) if text else []

    def finish(self, stop_string: str | None) -> list[Event]:
        """The last events, once the engine has ended the reply; `stop_string` is the one that ended it, if any did."""
        rest = self._stops.feed(self._detokenizer.finish()) + self._stops.finish(stop_string)
        return (self._reading.feed(rest) if rest else []) + self._reading.finish()

    def _feed_token(self, token_id: int) -> list[Event]:
        return self._reading.feed(self._stops.feed(self._detokenizer.feed([token_id])), [token_id])


def hidden_tokens(renderer: Renderer, parser: Parser) -> frozenset[int]:
    """The control tokens that no client sees: all that are no text, and end a reply, but the marks of its format."""
    marks = {renderer.control_tokens.get(mark) for mark in parser.marks}
    return (renderer.hidden_token_ids | renderer.end_token_ids) - marks
