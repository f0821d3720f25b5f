"""The read side of the ledger: for an audit, for resuming, and for what no longer is in memory."""

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from molt.train.errors import PayloadDamagedError
from molt.train.pool.frames import decode_frame
from molt.train.pool.payloads import PayloadPlace, PayloadReader
from molt.train.pool.rows import EventRow, GroupRow, GroupState, LeaseRow, ResultRow, RolloutRow, SessionRow, WindowRow
from molt.train.pool.schema import open_for_reading
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Task

OnDamage = Callable[[PayloadDamagedError], None]
"""Told of a recording that cannot be read, which is left out; without one the error is raised."""

_GROUP = "SELECT seq, group_id, kind, task, size, position, key, state, reason, step FROM groups"
_RECORDED = "file, offset, length, crc, session_id, counters, delivered_fraction"
_ROLLOUT = f"""
    SELECT rollouts.rollout_id, group_id, member, state, rollouts.attempt, failures,
           outcome, reward, score, error, info, answer, {_RECORDED}
    FROM rollouts LEFT JOIN results USING (result_id) LEFT JOIN recordings USING (recording_id)
"""
_LEASE = "SELECT lease_id, rollout_id, group_id, attempt, worker_id, session_id, state, granted, ended FROM leases"
_RESULT = """
    SELECT outcome, reward, score, error, info, answer, counted, reason, lease_id, rollout_id, attempt FROM results
"""
_RECORDING = f"SELECT {_RECORDED} FROM recordings"
_LIVE_RECORDINGS = """
    SELECT recording_id FROM groups JOIN rollouts USING (group_id) JOIN results USING (result_id)
    WHERE groups.state IN ('open', 'complete')
"""
_SESSION = "SELECT session_id, key, task, metadata, state, opened FROM sessions"

_decode_task = msgspec.json.Decoder(Task).decode
_decode_outcome = msgspec.json.Decoder(Outcome).decode
_decode_errors = msgspec.json.Decoder(list[str]).decode
_decode_counters = msgspec.json.Decoder(dict[str, int]).decode
_decode_group_ids = msgspec.json.Decoder(tuple[str, ...]).decode


class LedgerReader:
    """Reads a ledger, also while a run is writing it.

    Iterators read as they go, so that memory holds one row at a time; each sees the ledger as it was when it started.
    What gives recordings raises PayloadDamagedError for one that its payload file does not hold (any more).
    """

    def __init__(self, db: sqlite3.Connection, payloads: Path) -> None:
        self._db = db
        self._recorded = PayloadReader(payloads)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the ledger at `path` for reading only. Raises ConfigError when it is missing or unreadable."""
        return cls(open_for_reading(path), payload_folder(path))

    def close(self) -> None:
        """Close the files. Nothing is pending: every write was committed when it was made."""
        self._recorded.close()
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

    def count_groups(self) -> dict[GroupState, int]:
        """How many groups are in each state; those with none are absent."""
        return dict(self._db.execute("SELECT state, count(*) FROM groups GROUP BY state"))

    def count_drops(self) -> dict[str, int]:
        """How many groups were dropped for each reason."""
        return dict(self._db.execute("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"))

    def count_leases(self) -> dict[str, int]:
        """How many live leases each worker holds."""
        return dict(
            self._db.execute("SELECT worker_id, count(*) FROM leases WHERE state = 'granted' GROUP BY worker_id")
        )

    def rollouts(self, group_id: str) -> list[RolloutRow]:
        """The members of a group in their order, the finished ones with outcome and recording."""
        return list(self.each_rollout(group_id))

    def each_rollout(self, group_id: str, *, on_damage: OnDamage | None = None) -> Iterator[RolloutRow]:
        """As `rollouts`, with one recording at a time in memory. With an `on_damage` a damaged one is None."""
        for row in self._db.execute(f"{_ROLLOUT} WHERE group_id = ? ORDER BY member", (group_id,)):
            recording = None if row[12] is None else self._recording(row[12:], on_damage)
            yield _rollout_row(row, recording)

    def outcomes(self, group_id: str) -> list[RolloutRow]:
        """As `rollouts`, without the recordings."""
        rows = self._db.execute(f"{_ROLLOUT} WHERE group_id = ? ORDER BY member", (group_id,))
        return [_rollout_row(row, None) for row in rows]

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

    def attempt_errors(self, rollout_id: str) -> list[str]:
        """What each attempt that a rollout lost to infrastructure died of, in order."""
        rows = self._db.execute(
            "SELECT error FROM results WHERE rollout_id = ? AND outcome = 'infrastructure' ORDER BY result_id",
            (rollout_id,),
        )
        return [error or "no error was given" for (error,) in rows]

    def recording(self, session_id: str) -> Recording | None:
        """What a closed session recorded; None for a session that never closed, or is unknown."""
        where = "WHERE session_id = ? ORDER BY recording_id DESC LIMIT 1"
        row = self._db.execute(f"{_RECORDING} {where}", (session_id,)).fetchone()
        return None if row is None else self._recording(row, None)

    def recordings(self, *, on_damage: OnDamage | None = None) -> Iterator[Recording]:
        """What every closed session recorded, in the order of closing."""
        for row in self._db.execute(f"{_RECORDING} ORDER BY recording_id"):
            recording = self._recording(row, on_damage)
            if recording is not None:
                yield recording

    def damaged(self, *, after: int = 0) -> Iterator[tuple[int, PayloadDamagedError]]:
        """The recordings that cannot be read, by their checksums: id, and what is wrong.

        With `after`, only those of higher ids, and those that live groups need.
        """
        rows = self._db.execute(
            "SELECT recording_id, file, offset, length, crc FROM recordings WHERE recording_id > ? "
            f"OR recording_id IN ({_LIVE_RECORDINGS}) ORDER BY recording_id",
            (after,),
        )
        for recording_id, *place in rows:
            try:
                self._recorded.read(PayloadPlace(*place))
            except PayloadDamagedError as error:
                yield recording_id, error

    def session(self, session_id: str) -> SessionRow | None:
        """A session that no worker drives; None for an unknown id, or any other session's."""
        row = self._db.execute(f"{_SESSION} WHERE session_id = ?", (session_id,)).fetchone()
        return None if row is None else _session_row(row)

    def open_sessions(self) -> list[SessionRow]:
        """The sessions that no worker drives and whose result may still come, in the order of opening."""
        rows = self._db.execute(f"{_SESSION} WHERE state IN ('open', 'idle') ORDER BY opened, session_id")
        return [_session_row(row) for row in rows]

    def quarantined(self) -> dict[str, list[str]]:
        """The tasks that are offered no more: by task id, the errors of their attempts."""
        rows = self._db.execute("SELECT task_id, errors FROM quarantine ORDER BY task_id")
        return {task_id: _decode_errors(errors) for task_id, errors in rows}

    def grade_names(self) -> list[str]:
        """The gradings that were added later, sorted."""
        return [name for (name,) in self._db.execute("SELECT DISTINCT name FROM grades ORDER BY name")]

    def grades(self, name: str) -> dict[str, Outcome]:
        """What a later grading says of each rollout that it looked at, by rollout id. Empty for an unknown name."""
        rows = self._db.execute("SELECT rollout_id, outcome FROM grades WHERE name = ? ORDER BY rollout_id", (name,))
        return {rollout_id: _decode_outcome(outcome) for rollout_id, outcome in rows}

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

    def _recording(self, row: tuple[Any, ...], on_damage: OnDamage | None) -> Recording | None:
        session_id, counters, delivered_fraction = row[4:]
        try:
            turns, segments = decode_frame(self._recorded.read(PayloadPlace(*row[:4])))
        except PayloadDamagedError as error:
            if on_damage is None:
                raise
            on_damage(error)
            return None
        return Recording(
            session_id=session_id,
            state="closed",
            turns=turns,
            segments=segments,
            counters=_decode_counters(counters),
            delivered_fraction=delivered_fraction,
        )


def payload_folder(path: Path) -> Path:
    """Where the payload files of the ledger at `path` are."""
    return path.with_name("payloads")


def _group_row(row: tuple[Any, ...]) -> GroupRow:
    seq, group_id, kind, task, size, position, key, state, reason, step = row
    return GroupRow(
        seq=seq,
        group_id=group_id,
        kind=kind,
        task=_decode_task(task),
        size=size,
        position=position,
        key=key,
        state=state,
        reason=reason,
        step=step,
    )


def _rollout_row(row: tuple[Any, ...], recording: Recording | None) -> RolloutRow:
    rollout_id, group_id, member, state, attempt, failures = row[:6]
    return RolloutRow(
        rollout_id=rollout_id,
        group_id=group_id,
        member=member,
        state=state,
        attempt=attempt,
        failures=failures,
        outcome=None if row[6] is None else _outcome(*row[6:12]),
        recording=recording,
    )


def _lease_row(row: tuple[Any, ...]) -> LeaseRow:
    return LeaseRow(**dict(zip(LeaseRow.__struct_fields__, row, strict=True)))


def _result_row(row: tuple[Any, ...]) -> ResultRow:
    counted, reason, lease_id, rollout_id, attempt = row[6:]
    return ResultRow(
        outcome=_outcome(*row[:6]),
        counted=bool(counted),
        reason=reason,
        lease_id=lease_id,
        rollout_id=rollout_id,
        attempt=attempt,
    )


def _outcome(
    kind: Any, reward: float | None, score: float | None, error: str | None, info: bytes, answer: bytes | None
) -> Outcome:
    return Outcome(
        kind=kind,
        reward=reward,
        score=score,
        error=error,
        info=msgspec.json.decode(info),
        answer=None if answer is None else msgspec.json.decode(answer),
    )


def _session_row(row: tuple[Any, ...]) -> SessionRow:
    session_id, key, task, metadata, state, opened = row
    return SessionRow(
        session_id=session_id,
        group=key,
        task=None if task is None else _decode_task(task),
        metadata=msgspec.json.decode(metadata),
        state=state,
        opened=opened,
    )
