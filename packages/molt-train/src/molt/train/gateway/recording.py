"""The recording of a session as JSON values."""

from typing import Any

import msgspec

from molt.train.gateway.sessions import Session


def recording(session: Session) -> dict[str, Any]:
    """What `GET /api/v1/sessions/{id}` answers, but for `segments`, which come of the trajectory."""
    return {
        "session_id": session.session_id,
        "state": session.state,
        "turns": [msgspec.to_builtins(turn) for turn in session.turns()],
        "counters": dict(session.counters),
    }
