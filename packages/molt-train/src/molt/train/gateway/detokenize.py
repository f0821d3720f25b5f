"""From sampled token ids to text, as the ids come: nothing is shown that a later token could still change."""

from collections.abc import Callable, Collection, Sequence

from molt.train.gateway.call import Event
from molt.train.gateway.parse import Reading, partial_mark

Decode = Callable[[list[int]], str]
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing list of tokens. Bytes of a character whose rest has not been sampled are held back."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []
        self._num_read = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete."""
        self._held.extend(token_ids)
        text = self._decode(self._context + self._held)
        return "" if text.endswith(_REPLACEMENT) else self._take(text)

    def finish(self) -> str:
        """What was held back, broken characters as U+FFFD."""
        return self._take(self._decode(self._context + self._held)) if self._held else ""

    def _take(self, text: str) -> str:
        text = text[self._num_read :]
        # Some decoders (SentencePiece's) drop the first token's leading space: one token stays in front of the next.
        self._context = self._held[-1:] or self._context
        self._held = []
        self._num_read = len(self._decode(self._context))
        return text


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
    """Token ids in, events out."""

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
        visible = [token_id for token_id in token_ids if token_id not in self._hidden]
        text = self._stops.feed(self._detokenizer.feed(visible)) if visible else ""
        return self._reading.feed(text) if text else []

    def finish(self, stop_string: str | None) -> list[Event]:
        """The last events, once the engine has ended the reply; `stop_string` is the one that ended it, if any did."""
        rest = self._stops.feed(self._detokenizer.finish()) + self._stops.finish(stop_string)
        return (self._reading.feed(rest) if rest else []) + self._reading.finish()
