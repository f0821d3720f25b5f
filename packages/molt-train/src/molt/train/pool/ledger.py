"""The write side of the ledger: what happened in a run, durable before anyone is told."""

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from molt.train.errors import ConfigError
from molt.train.pool.leases import Assignment
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import GroupRow, GroupState, LeaseState, ResultRow, RolloutRow, WindowRow
from molt.train.pool.schema import open_for_writing
from molt.train.records.recording import Recording

_encode_blob = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode


class Ledger(LedgerReader):
    """The one writer of the ledger at `path`, which it makes when there is none.

    Every method is one transaction, unless it is called inside `transaction()`, which makes one of all that it spans.
    A method that raises (`sqlite3.OperationalError` when the disk is full) has changed nothing.

    Raises:
        ConfigError: another process writes this ledger, or the file is none.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_for_writing(path)
        try:
            super().__init__(open_for_writing(path))
        except ConfigError:
            self._lock.close()
            raise

    def close(self) -> None:
        """Close the file and let another process write it."""
        super().close()
        self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All the writes of the block, or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def recover(self) -> int:
        """Put right what the death of the last writer left: to be called before the pool is rebuilt.

        Live leases have expired, because their sessions are gone, and their rollouts wait for the next attempt, at no
        cost to their budget. Evaluations start anew, so their groups are dropped. Returns the number of such leases.
        """
        with self.transaction():
            lost = self._db.execute(
                "UPDATE leases SET state = 'expired', ended = ? WHERE state = 'granted'", (time.time(),)
            ).rowcount
            self._db.execute("UPDATE rollouts SET state = 'waiting', attempt = attempt + 1 WHERE state = 'leased'")
            self._db.execute(
                "UPDATE groups SET state = 'dropped', reason = 'the server restarted during the evaluation' "
                "WHERE kind = 'eval' AND state IN ('open', 'complete')"
            )
            if lost:
                self.record_event("leases_lost_to_restart", {"num_leases": lost})
        return lost

    def add_group(self, group: GroupRow) -> None:
        """A new open group."""
        self._db.execute(
            "INSERT INTO groups (seq, group_id, kind, task_id, task, size, position, key, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'open')",
            (
                group.seq,
                group.group_id,
                group.kind,
                group.task.task_id,
                _encode_json(group.task.data),
                group.size,
                group.position,
                group.key,
            ),
        )

    def put_rollouts(self, rows: Sequence[RolloutRow], *, result_id: int | None = None) -> None:
        """New members, or the new state of old ones. `result_id` is what finished them."""
        self._db.executemany(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO UPDATE SET "
            "state = excluded.state, attempt = excluded.attempt, failures = excluded.failures, "
            "result_id = excluded.result_id",
            [(r.rollout_id, r.group_id, r.member, r.state, r.attempt, r.failures, result_id) for r in rows],
        )

    def add_leases(self, assignments: Sequence[Assignment], worker_id: str) -> None:
        """Leases granted to a worker now."""
        now = time.time()
        self._db.executemany(
            "INSERT INTO leases VALUES (?, ?, ?, ?, ?, NULL, 'granted', ?, NULL)",
            [(a.lease_id, a.rollout_id, a.group_id, a.attempt, worker_id, now) for a in assignments],
        )

    def attach_session(self, lease_id: str, session_id: str) -> None:
        """The session that a lease's model calls go to."""
        self._db.execute("UPDATE leases SET session_id = ? WHERE lease_id = ?", (session_id, lease_id))

    def end_attempt(
        self,
        row: RolloutRow,
        *,
        lease: tuple[str, LeaseState] | None,
        result: ResultRow | None = None,
        recording: Recording | None = None,
    ) -> int | None:
        """An attempt is over: the rollout is in the state of `row` now, and `lease` (its id) in the state given.

        Returns the id of the result, which, when the rollout is finished, is the one that counts.
        """
        recording_id = None if recording is None else self.add_recording(recording)
        result_id = None if result is None else self.add_result(result, recording_id=recording_id)
        self.put_rollouts([row], result_id=result_id if row.state == "finished" else None)
        if lease is not None:
            self.end_lease(*lease)
        return result_id

    def end_lease(self, lease_id: str, state: LeaseState) -> None:
        """A lease is over; one that becomes `late` keeps the time at which it ended first."""
        self._db.execute(
            "UPDATE leases SET state = ?, ended = coalesce(ended, ?) WHERE lease_id = ?", (state, time.time(), lease_id)
        )

    def add_recording(self, recording: Recording) -> int:
        """What a session recorded. Returns its id."""
        cursor = self._db.execute(
            "INSERT INTO recordings (session_id, delivered_fraction, segments, turns, counters, time) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                recording.session_id,
                recording.delivered_fraction,
                _encode_blob(recording.segments),
                _encode_blob(recording.turns),
                _encode_json(recording.counters),
                time.time(),
            ),
        )
        return _inserted_id(cursor.lastrowid)

    def add_result(self, result: ResultRow, *, recording_id: int | None) -> int:
        """A report. Returns its id."""
        outcome = result.outcome
        cursor = self._db.execute(
            "INSERT INTO results (lease_id, rollout_id, attempt, counted, reason, outcome, reward, score, error, info, "
            "recording_id, time) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                result.lease_id,
                result.rollout_id,
                result.attempt,
                result.counted,
                result.reason,
                outcome.kind,
                outcome.reward,
                outcome.score,
                outcome.error,
                _encode_json(outcome.info),
                recording_id,
                time.time(),
            ),
        )
        return _inserted_id(cursor.lastrowid)

    def close_group(self, group_id: str, state: GroupState, *, reason: str | None, ready_order: int | None) -> None:
        """Move an open group on: to `complete`, in the order `ready_order`, or to `failed`."""
        self._move_group(group_id, "open", state, "reason = ?, ready_order = ?", (reason, ready_order))

    def drop_group(self, group_id: str, reason: str) -> None:
        """A complete group will not be used. Raises ValueError when it is not complete."""
        self._move_group(group_id, "complete", "dropped", "reason = ?", (reason,))

    def consume_eval(self, group_ids: Sequence[str]) -> None:
        """Complete groups have gone into an evaluation. Raises ValueError when one is not complete."""
        with self.transaction():
            for group_id in group_ids:
                self._move_group(group_id, "complete", "consumed", "step = NULL", ())

    def record_window(self, step: int, policy_version: int, group_ids: Sequence[str]) -> None:
        """Update number `step` trains on these groups, which are consumed by it.

        To be called before the update is made: a window that is recorded and whose update is lost with the process is
        found again by `rewind`. Recording the same window again changes nothing.

        Raises:
            ValueError: the step has another window, or a group is not complete (consumed before, or dropped).
        """
        window = WindowRow(step=step, policy_version=policy_version, group_ids=tuple(group_ids))
        recorded = self.windows(after=step - 1)
        if recorded and recorded[0].step == step:
            if recorded[0] != window:
                raise ValueError(f"step {step} has a window already, of other groups or of another policy version")
            return
        with self.transaction():
            for group_id in group_ids:
                self._move_group(group_id, "complete", "consumed", "step = ?", (step,))
            self._db.execute("INSERT INTO windows VALUES (?, ?, ?)", (step, policy_version, _encode_json(group_ids)))

    def rewind(self, step: int) -> list[WindowRow]:
        """Go back to the checkpoint of update number `step`.

        Returns the windows recorded after it, in order: updates that were lost, to be made again of the same groups,
        which stay consumed by them.
        """
        windows = self.windows(after=step)
        self.record_event("rewind", {"to_step": step, "lost_steps": [window.step for window in windows]})
        return windows

    def record_event(self, kind: str, detail: dict[str, Any]) -> None:
        """Something worth knowing later."""
        self._db.execute(
            "INSERT INTO events (time, kind, detail) VALUES (?, ?, ?)", (time.time(), kind, _encode_json(detail))
        )

    def _move_group(
        self, group_id: str, old: GroupState, new: GroupState, assignment: str, values: tuple[Any, ...]
    ) -> None:
        statement = f"UPDATE groups SET state = ?, {assignment} WHERE group_id = ? AND state = ?"
        if self._db.execute(statement, (new, *values, group_id, old)).rowcount != 1:
            group = self.group(group_id)
            found = "unknown" if group is None else group.state
            raise ValueError(f"group {group_id!r} is {found}, not {old}, so it cannot become {new}")


def _lock_for_writing(path: Path) -> IO[str]:
    # A file of its own: SQLite's locks on the ledger are released when any descriptor of that file is closed.
    lock = path.with_name(path.name + ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"run folder {str(path.parent)!r} is in use by another process; stop it, or give another run.dir"
        ) from None
    return lock


def _inserted_id(rowid: int | None) -> int:
    assert rowid is not None, "an INSERT of one row has a row id"
    return rowid
