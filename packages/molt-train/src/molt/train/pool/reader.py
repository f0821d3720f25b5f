"""The read side of the ledger: for an audit, for resuming, and for what no longer is in memory."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from molt.train.pool.rows import EventRow, GroupRow, LeaseRow, ResultRow, RolloutRow, WindowRow
from molt.train.pool.schema import open_for_reading
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Task
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn

_GROUP = "SELECT seq, group_id, kind, task_id, task, size, position, key, state, reason, step FROM groups"
_ROLLOUT = """
    SELECT rollouts.rollout_id, group_id, member, state, rollouts.attempt, failures,
           outcome, reward, score, error, info,
           session_id, turns, segments, counters, delivered_fraction
    FROM rollouts LEFT JOIN results USING (result_id) LEFT JOIN recordings USING (recording_id)
"""
_LEASE = "SELECT lease_id, rollout_id, group_id, attempt, worker_id, session_id, state, granted, ended FROM leases"
_RESULT = """
    SELECT outcome, reward, score, error, info, counted, reason, lease_id, rollout_id, attempt FROM results
"""
_RECORDING = "SELECT session_id, turns, segments, counters, delivered_fraction FROM recordings"

_decode_turns = msgspec.msgpack.Decoder(list[Turn]).decode
_decode_segments = msgspec.msgpack.Decoder(list[Segment]).decode
_decode_counters = msgspec.json.Decoder(dict[str, int]).decode
_decode_group_ids = msgspec.json.Decoder(tuple[str, ...]).decode


class LedgerReader:
    """Reads a ledger, also while a run is writing it.

    Iterators read as they go, so that memory holds one row at a time; each sees the ledger as it was when it started.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the ledger at `path` for reading only. Raises ConfigError when it is missing or unreadable."""
        return cls(open_for_reading(path))

    def close(self) -> None:
        """Close the file. Nothing is pending: every write was committed when it was made."""
        self._db.close()

    def windows(self, *, after: int = 0) -> list[WindowRow]:
        """The windows of the updates after number `after`, in order."""
        rows = self._db.execute(
            "SELECT step, policy_version, group_ids FROM windows WHERE step > ? ORDER BY step", (after,)
        )
        return [WindowRow(step=row[0], policy_version=row[1], group_ids=_decode_group_ids(row[2])) for row in rows]

    def groups(self) -> Iterator[GroupRow]:
        """Every group, in the order of opening."""
        return map(_group_row, self._db.execute(f"{_GROUP} ORDER BY seq"))

    def group(self, group_id: str) -> GroupRow | None:
        """One group; None for an unknown id."""
        row = self._db.execute(f"{_GROUP} WHERE group_id = ?", (group_id,)).fetchone()
        return None if row is None else _group_row(row)

    def live_groups(self) -> list[GroupRow]:
        """The open groups in the order of opening, then the complete ones in the order of completion."""
        rows = self._db.execute(f"{_GROUP} WHERE state IN ('open', 'complete') ORDER BY ready_order NULLS FIRST, seq")
        return [_group_row(row) for row in rows]

    def rollouts(self, group_id: str) -> list[RolloutRow]:
        """The members of a group in their order, the finished ones with outcome and recording."""
        rows = self._db.execute(f"{_ROLLOUT} WHERE group_id = ? ORDER BY member", (group_id,))
        return [_rollout_row(row) for row in rows]

    def lease(self, lease_id: str) -> LeaseRow | None:
        """One lease; None for an unknown id."""
        row = self._db.execute(f"{_LEASE} WHERE lease_id = ?", (lease_id,)).fetchone()
        return None if row is None else _lease_row(row)

    def leases(self) -> Iterator[LeaseRow]:
        """Every lease, by the time it was granted."""
        return map(_lease_row, self._db.execute(f"{_LEASE} ORDER BY granted"))

    def results(self) -> Iterator[ResultRow]:
        """Every report, counted or not, in the order of arrival."""
        return map(_result_row, self._db.execute(f"{_RESULT} ORDER BY result_id"))

    def recording(self, session_id: str) -> Recording | None:
        """What a closed session recorded; None for a session that never closed, or is unknown."""
        where = "WHERE session_id = ? ORDER BY recording_id DESC LIMIT 1"
        row = self._db.execute(f"{_RECORDING} {where}", (session_id,)).fetchone()
        return None if row is None else _recording(*row)

    def recordings(self) -> Iterator[Recording]:
        """What every closed session recorded, in the order of closing."""
        return (_recording(*row) for row in self._db.execute(f"{_RECORDING} ORDER BY recording_id"))

    def events(self) -> Iterator[EventRow]:
        """Every event, in order."""
        rows = self._db.execute("SELECT time, kind, detail FROM events ORDER BY event_id")
        return (EventRow(time=row[0], kind=row[1], detail=msgspec.json.decode(row[2])) for row in rows)

    def next_seq(self) -> int:
        """The number of the group that is opened next."""
        return self._db.execute("SELECT coalesce(max(seq), 0) + 1 FROM groups").fetchone()[0]

    def next_position(self) -> int:
        """The first data position that no train group was taken from."""
        return self._db.execute("SELECT coalesce(max(position), -1) + 1 FROM groups WHERE kind = 'train'").fetchone()[0]


def _group_row(row: tuple[Any, ...]) -> GroupRow:
    seq, group_id, kind, task_id, task, size, position, key, state, reason, step = row
    return GroupRow(
        seq=seq,
        group_id=group_id,
        kind=kind,
        task=Task(task_id=task_id, data=msgspec.json.decode(task)),
        size=size,
        position=position,
        key=key,
        state=state,
        reason=reason,
        step=step,
    )


def _rollout_row(row: tuple[Any, ...]) -> RolloutRow:
    rollout_id, group_id, member, state, attempt, failures = row[:6]
    return RolloutRow(
        rollout_id=rollout_id,
        group_id=group_id,
        member=member,
        state=state,
        attempt=attempt,
        failures=failures,
        outcome=None if row[6] is None else _outcome(*row[6:11]),
        recording=None if row[11] is None else _recording(*row[11:]),
    )


def _lease_row(row: tuple[Any, ...]) -> LeaseRow:
    return LeaseRow(**dict(zip(LeaseRow.__struct_fields__, row, strict=True)))


def _result_row(row: tuple[Any, ...]) -> ResultRow:
    counted, reason, lease_id, rollout_id, attempt = row[5:]
    return ResultRow(
        outcome=_outcome(*row[:5]),
        counted=bool(counted),
        reason=reason,
        lease_id=lease_id,
        rollout_id=rollout_id,
        attempt=attempt,
    )


def _outcome(kind: Any, reward: float | None, score: float | None, error: str | None, info: bytes) -> Outcome:
    return Outcome(kind=kind, reward=reward, score=score, error=error, info=msgspec.json.decode(info))


def _recording(session_id: str, turns: bytes, segments: bytes, counters: bytes, delivered_fraction: float) -> Recording:
    return Recording(
        session_id=session_id,
        state="closed",
        turns=_decode_turns(turns),
        segments=_decode_segments(segments),
        counters=_decode_counters(counters),
        delivered_fraction=delivered_fraction,
    )
