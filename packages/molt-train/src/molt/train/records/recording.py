"""What is kept of a session: its turns, and the segments they make."""

from typing import Literal

import msgspec

from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn

SessionState = Literal["open", "closed"]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One session as `GET /api/v1/sessions/{id}` shows it and the ledger keeps it."""

    session_id: str
    state: SessionState
    turns: list[Turn]
    segments: list[Segment]
    counters: dict[str, int]
    """How often each named thing happened: forks by reason, replays, ignored fields."""
    delivered_fraction: float = 1.0
    """Sampled tokens that reached the client, over all sampled tokens."""
