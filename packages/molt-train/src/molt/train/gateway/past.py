"""The responses of a session as later requests can name them: by `previous_response_id`, conversation or item.

What a response answered is kept as a path in a tree of messages, so that a message is stored once however often a
client sends its history again.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import compress, count
from operator import ne

import msgspec

_SLICE = 5000
"""Messages that are kept at a stretch, some 20 ms; between two stretches other sessions go on."""
_NUM_RECENT = 2
"""Requests that later ones are compared with, so that they cost what is new: an agent and its sub-agent take turns."""

_decode_ids = msgspec.json.Decoder(list[msgspec.Raw])


class _Identified(msgspec.Struct):
    id: str | None = None


_decode_identity = msgspec.json.Decoder(_Identified)


class FoldedInput(msgspec.Struct, kw_only=True):
    """The items of a request as the messages of a call."""

    text: bytes = b""
    """The JSON array that they came in, without its end."""
    num_items: int = 0
    messages: list[bytes] = []
    """JSON of an item, or of an array of items that are one assistant turn."""
    positions: list[int] = []
    """Index of the first item of each message; none where the input was a text."""
    turn: list[bytes] = []
    """The items of the assistant turn at the end, which may go on; `messages` has it not yet."""
    issuer: str | None = None
    """The turn of ours that an id in `turn` names."""

    def all_messages(self) -> list[bytes]:
        """The messages, the turn at the end with them."""
        return [*self.messages, _array(self.turn)] if self.turn else self.messages

    def copy(self) -> "FoldedInput":
        """The same, to be added to."""
        copied = FoldedInput(num_items=self.num_items, messages=self.messages[:], positions=self.positions[:])
        copied.turn, copied.issuer = self.turn[:], self.issuer
        return copied

    def add(self, item: bytes, index: int) -> None:
        """One more message, of the one item at `index`."""
        self.messages.append(item)
        self.positions.append(index)

    def begin(self, item: bytes, index: int, issuer: str | None) -> None:
        """An assistant turn begins with the item at `index`."""
        self.turn, self.issuer = [item], issuer
        self.positions.append(index)

    def close(self) -> None:
        """The assistant turn at the end, if there is one, is whole."""
        if self.turn:
            self.messages.append(_array(self.turn))
            self.turn, self.issuer = [], None


class _Line(msgspec.Struct, frozen=True):
    """The messages that a response answered, and the path after each."""

    messages: list[bytes]
    paths: list[int]


class Past:
    """The responses of one session."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, bytes]] = [(0, b"")]
        """The path that goes before, and the message that it adds; the first is the empty path."""
        self._paths: dict[tuple[int, bytes], int] = {}
        self._recent: deque[_Line] = deque(maxlen=_NUM_RECENT)
        self._inputs: deque[FoldedInput] = deque(maxlen=_NUM_RECENT)
        self._responses: dict[str, int] = {}
        self._conversations: dict[str, str] = {}

    async def learn(self, messages: Sequence[bytes]) -> None:
        """Keep the messages that a response is to answer. Only a long conversation takes long enough to need it."""
        for end in range(_SLICE, len(messages), _SLICE):
            self._line(messages[:end])
            await asyncio.sleep(0)

    def keep(self, response_id: str, messages: Sequence[bytes], output: bytes, conversation: str | None = None) -> None:
        """Keep a response: the messages that it answered, and its output items as one JSON array."""
        paths = self._line(messages)
        self._responses[response_id] = self._after(paths[-1] if paths else 0, output)
        if conversation is not None:
            self._conversations[conversation] = response_id

    def messages(self, response_id: str) -> list[bytes] | None:
        """What the response answered, then its output; None where the session has no such response."""
        path = self._responses.get(response_id)
        if path is None:
            return None
        messages: list[bytes] = []
        while path:
            path, message = self._nodes[path]
            messages.append(message)
        return messages[::-1]

    def conversation(self, conversation: str) -> list[bytes]:
        """The messages of a conversation up to its newest response; none where it has none."""
        return self.messages(self._conversations.get(conversation, "")) or []

    def item(self, response_id: str, item_id: str) -> bytes | None:
        """One output item of a response."""
        path = self._responses.get(response_id)
        items = _decode_ids.decode(self._nodes[path][1]) if path else ()
        return next((bytes(item) for item in items if _decode_identity.decode(item).id == item_id), None)

    def remember(self, folded: FoldedInput) -> None:
        """Keep an input while it is recent. It is not to be changed any more."""
        self._inputs.append(folded)

    def folded_before(self, text: bytes) -> FoldedInput | None:
        """The longest recent input that the JSON array `text`, without its end, begins with."""
        begun = [folded for folded in tuple(self._inputs) if text.startswith(folded.text)]
        return max(begun, key=lambda folded: folded.num_items, default=None)

    def _line(self, messages: Sequence[bytes]) -> list[int]:
        """The path after each message; the messages are recent from now on."""
        line, num_shared = self._longest_common(messages)
        paths = line.paths[:num_shared]
        for message in messages[num_shared:]:
            paths.append(self._after(paths[-1] if paths else 0, message))
        self._recent.append(_Line([*line.messages[:num_shared], *messages[num_shared:]], paths))
        return paths

    def _longest_common(self, messages: Sequence[bytes]) -> tuple["_Line", int]:
        """The recent line that begins with most of `messages`, and with how many."""
        lines = [(line, _num_common(line.messages, messages)) for line in tuple(self._recent)]
        return max(lines, key=lambda found: found[1], default=(_Line([], []), 0))

    def _after(self, path: int, message: bytes) -> int:
        node = (path, message)
        number = self._paths.get(node)
        if number is None:
            number = self._paths[node] = len(self._nodes)
            self._nodes.append(node)
        return number


def _num_common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    return next(compress(count(), map(ne, first, second)), min(len(first), len(second)))


def _array(items: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"
