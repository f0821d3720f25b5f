"""Recorded rows of a session, found by the token ids that a raw prompt begins with.

A row is known by its length and by a digest of its ids. The digest of a turn's row goes on from that of its parent's,
and a prompt is digested once, whatever the number of rows. Sessions without raw prompts pay nothing: turns are learnt
when one is looked up.
"""

import hashlib
from bisect import insort
from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

from molt.train.records.turn import TurnStatus

_ID_BYTES = 4


class RecordedTurn(Protocol):
    """What is needed of a turn; its ids are packed, `_ID_BYTES` each."""

    turn_id: str
    context_ids: bytes
    token_ids: bytes
    status: TurnStatus

    @property
    def row_length(self) -> int:
        """Tokens of the row."""
        ...

    @property
    def parent(self) -> Self | None:
        """The turn whose row this one extends."""
        ...


_Turn = TypeVar("_Turn", bound=RecordedTurn)


class TokenRows(Generic[_Turn]):
    """The rows that a prompt can continue."""

    def __init__(self) -> None:
        self._num_learnt = 0
        self._digests: dict[str, hashlib._Hash] = {}
        self._lengths: list[int] = []
        self._rows: dict[int, dict[bytes, list[_Turn]]] = {}

    def learn(self, turns: Sequence[_Turn]) -> None:
        """Know the rows of a session's turns; `turns` grows from call to call."""
        for turn in turns[self._num_learnt :]:
            if turn.status in ("delivered", "undelivered") and turn.token_ids:
                self._learn(turn)
        self._num_learnt = len(turns)

    def find(self, packed: bytes) -> _Turn | None:
        """The turn with the longest row that a prompt of these packed ids begins with.

        Of turns with that row it is the latest that was delivered.
        """
        digest, at, found = hashlib.sha256(), 0, None
        for length in self._lengths:
            end = length * _ID_BYTES
            if end > len(packed):
                break
            digest.update(packed[at:end])
            at = end
            found = self._rows[length].get(digest.digest(), found)
        if found is None:
            return None
        return next((turn for turn in reversed(found) if turn.status == "delivered"), found[-1])

    def _learn(self, turn: _Turn) -> None:
        digest = self._digests[turn.parent.turn_id].copy() if turn.parent else hashlib.sha256()
        digest.update(turn.context_ids)
        digest.update(turn.token_ids)
        self._digests[turn.turn_id] = digest
        length = turn.row_length
        if length not in self._rows:
            self._rows[length] = {}
            insort(self._lengths, length)
        self._rows[length].setdefault(digest.digest(), []).append(turn)
