"""The write side of the ledger: what happened in a run, durable before anyone is told."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from molt.train.config import PoolConfig
from molt.train.pool.disk import DiskRoom
from molt.train.pool.frames import encode_frame
from molt.train.pool.leases import Assignment
from molt.train.pool.rows import (
    GroupRow,
    GroupState,
    LeaseState,
    ResultRow,
    RolloutRow,
    SessionRow,
    SessionState,
    WindowRow,
)
from molt.train.pool.store import LedgerStore
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome

_DEFAULTS = PoolConfig()
_encode_json = msgspec.json.Encoder().encode


class Ledger(LedgerStore):
    """What is written in a run.

    Every method is one transaction, unless it is called inside `transaction()`, which makes one of all that it spans.
    A method that raises (LedgerFullError when the disk is full) has changed nothing.
    """

    def __init__(self, path: Path, settings: PoolConfig = _DEFAULTS, *, room: DiskRoom | None = None) -> None:
        super().__init__(path, settings, room=room)

    def recover(self) -> int:
        """Put right what the death of the last writer left: to be called before the pool is rebuilt.

        Live leases have expired, because their sessions are gone, and their rollouts wait for the next attempt, at no
        cost to their budget. Evaluations start anew, so their groups are dropped. Results whose recordings were lost
        with the power, or are damaged before they were trained, count no more, and their rollouts run again. Returns
        the number of the leases.
        """
        with self.transaction(synced=True):
            for recording_id, error in list(self.damaged(after=self.synced_recording())):
                self._forget_recording(recording_id, str(error))
            lost = self._db.execute(
                "UPDATE leases SET state = 'expired', ended = ? WHERE state = 'granted'", (time.time(),)
            ).rowcount
            self._db.execute("UPDATE rollouts SET state = 'waiting', attempt = attempt + 1 WHERE state = 'leased'")
            self._db.execute(
                "UPDATE groups SET state = 'dropped', reason = 'the server restarted during the evaluation' "
                "WHERE kind = 'eval' AND state IN ('open', 'complete')"
            )
            self.mark_synced()
        return lost

    def _forget_recording(self, recording_id: int, why: str) -> None:
        """A recording is lost, so the rollout that it finished has to run again, unless its group is past that."""
        self.record_event("recording_lost", {"recording_id": recording_id, "error": why})
        results = self._db.execute(
            "UPDATE results SET recording_id = NULL, counted = 0, reason = ? "
            "WHERE recording_id = ? RETURNING result_id",
            (f"its recording was lost: {why}", recording_id),
        ).fetchall()
        self._db.execute("DELETE FROM recordings WHERE recording_id = ?", (recording_id,))
        live = "SELECT group_id FROM groups WHERE state IN ('open', 'complete')"
        for result in results:
            groups = self._db.execute(
                "UPDATE rollouts SET state = 'waiting', attempt = attempt + 1, result_id = NULL "
                f"WHERE result_id = ? AND group_id IN ({live}) RETURNING group_id",
                result,
            ).fetchall()
            for group in groups:
                self._reopen(*group)

    def _reopen(self, group_id: str) -> None:
        """A live group waits for a member again; one of self-driven sessions fails, as nobody would run it again."""
        self._db.execute(
            "UPDATE groups SET state = iif(key IS NULL, 'open', 'failed'), ready_order = NULL, "
            "reason = iif(key IS NULL, NULL, 'a recording was lost') WHERE group_id = ?",
            (group_id,),
        )
        self._db.execute(
            "UPDATE rollouts SET state = 'cut' WHERE group_id = ? AND state = 'waiting' "
            "AND (SELECT state FROM groups WHERE groups.group_id = rollouts.group_id) = 'failed'",
            (group_id,),
        )

    def add_group(self, group: GroupRow) -> None:
        """A new open group."""
        self.execute(
            "INSERT INTO groups (seq, group_id, kind, task, size, position, key, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 'open')",
            (
                group.seq,
                group.group_id,
                group.kind,
                _encode_json(group.task),
                group.size,
                group.position,
                group.key,
            ),
        )

    def put_rollouts(self, rows: Sequence[RolloutRow], *, result_id: int | None = None) -> None:
        """New members, or the new state of old ones. `result_id` is what finished them."""
        with self.transaction():
            self._db.executemany(
                "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO UPDATE SET "
                "state = excluded.state, attempt = excluded.attempt, failures = excluded.failures, "
                "result_id = excluded.result_id",
                [(r.rollout_id, r.group_id, r.member, r.state, r.attempt, r.failures, result_id) for r in rows],
            )

    def add_leases(self, assignments: Sequence[Assignment], worker_id: str) -> None:
        """Leases granted to a worker now."""
        now = time.time()
        with self.transaction():
            self._db.executemany(
                "INSERT INTO leases VALUES (?, ?, ?, ?, ?, NULL, 'granted', ?, NULL)",
                [(a.lease_id, a.rollout_id, a.group_id, a.attempt, worker_id, now) for a in assignments],
            )

    def attach_session(self, lease_id: str, session_id: str) -> None:
        """The session that a lease's model calls go to."""
        self.execute("UPDATE leases SET session_id = ? WHERE lease_id = ?", (session_id, lease_id))

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
        with self.transaction():
            recording_id = None if recording is None else self.add_recording(recording)
            result_id = None if result is None else self.add_result(result, recording_id=recording_id)
            self.put_rollouts([row], result_id=result_id if row.state == "finished" else None)
            if lease is not None:
                self.end_lease(*lease)
        return result_id

    def end_lease(self, lease_id: str, state: LeaseState) -> None:
        """A lease is over; one that becomes `late` keeps the time at which it ended first."""
        self.execute(
            "UPDATE leases SET state = ?, ended = coalesce(ended, ?) WHERE lease_id = ?", (state, time.time(), lease_id)
        )

    def add_recording(self, recording: Recording) -> int:
        """What a session recorded. Returns its id. A session that is recorded already keeps what it has."""
        found = self._db.execute(
            "SELECT recording_id FROM recordings WHERE session_id = ?", (recording.session_id,)
        ).fetchone()
        if found is not None:
            return found[0]
        frame = encode_frame(recording.turns, recording.segments)
        with self.transaction():
            return self.execute(
                "INSERT INTO recordings (session_id, delivered_fraction, counters, file, offset, length, crc, time) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    recording.session_id,
                    recording.delivered_fraction,
                    _encode_json(recording.counters),
                    *self._payloads.append(frame),
                    time.time(),
                ),
            )

    def add_result(self, result: ResultRow, *, recording_id: int | None) -> int:
        """A report. Returns its id."""
        outcome = result.outcome
        return self.execute(
            "INSERT INTO results (lease_id, rollout_id, attempt, counted, reason, outcome, reward, score, error, info, "
            "answer, recording_id, time) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                None if outcome.answer is None else _encode_json(outcome.answer),
                recording_id,
                time.time(),
            ),
        )

    def close_group(
        self,
        group_id: str,
        state: GroupState,
        *,
        reason: str | None = None,
        ready_order: int | None = None,
        old: Literal["open", "complete"] = "open",
    ) -> None:
        """Move a group on: to `complete`, in the order `ready_order`, or, with a reason, to `failed` or `dropped`.

        Raises ValueError when it is not in the state `old`.
        """
        with self.transaction():
            if old == "open":
                self._move_group(group_id, old, state, "reason = ?, ready_order = ?", (reason, ready_order))
            else:
                self._move_group(group_id, old, state, "reason = ?", (reason,))

    def consume_eval(self, group_ids: Sequence[str]) -> None:
        """Complete groups have gone into an evaluation. Raises ValueError when one is not complete."""
        with self.transaction():
            for group_id in group_ids:
                self._move_group(group_id, "complete", "consumed", "step = NULL", ())

    def record_window(self, step: int, policy_version: int, group_ids: Sequence[str]) -> None:
        """Update number `step` trains on these groups, which are consumed by it.

        To be called before the update is made: a window that is recorded and whose update is lost with the process is
        found again by `rewind`. It is on disk when this returns, with all that came before. Recording the same window
        again changes nothing.

        Raises:
            ValueError: the step has another window, or a group is not complete (consumed before, or dropped).
        """
        window = WindowRow(step=step, policy_version=policy_version, group_ids=tuple(group_ids))
        recorded = self.windows(after=step - 1)
        if recorded and recorded[0].step == step:
            if recorded[0] != window:
                raise ValueError(f"step {step} has a window already, of other groups or of another policy version")
            return
        with self.transaction(synced=True):
            for group_id in group_ids:
                self._move_group(group_id, "complete", "consumed", "step = ?", (step,))
            self.mark_synced()
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
        self.execute(
            "INSERT INTO events (time, kind, detail) VALUES (?, ?, ?)", (time.time(), kind, _encode_json(detail))
        )

    def add_session(self, row: SessionRow) -> None:
        """A session that no worker drives."""
        self.execute(
            "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
            (
                row.session_id,
                row.group,
                None if row.task is None else _encode_json(row.task),
                _encode_json(row.metadata),
                row.state,
                row.opened,
            ),
        )

    def move_session(self, session_id: str, state: SessionState) -> None:
        """A session that no worker drives is in another state. Raises ValueError for an unknown one."""
        with self.transaction():
            statement = "UPDATE sessions SET state = ? WHERE session_id = ?"
            if self._db.execute(statement, (state, session_id)).rowcount != 1:
                raise ValueError(f"session {session_id!r} is unknown to the ledger, so it cannot become {state}")

    def add_quarantine(self, task_id: str, errors: Sequence[str]) -> None:
        """A task is offered no more, because of `errors`, one an attempt. They replace those of the same task."""
        self.execute("INSERT OR REPLACE INTO quarantine VALUES (?, ?)", (task_id, _encode_json(errors)))

    def add_grade(self, name: str, rollout_id: str, outcome: Outcome) -> None:
        """What a later grading, `name`, says of a rollout; it replaces what the same grading said before."""
        self.execute("INSERT OR REPLACE INTO grades VALUES (?, ?, ?)", (name, rollout_id, _encode_json(outcome)))

    def _move_group(
        self, group_id: str, old: GroupState, new: GroupState, assignment: str, values: tuple[Any, ...]
    ) -> None:
        statement = f"UPDATE groups SET state = ?, {assignment} WHERE group_id = ? AND state = ?"
        if self._db.execute(statement, (new, *values, group_id, old)).rowcount != 1:
            group = self.group(group_id)
            found = "unknown" if group is None else group.state
            raise ValueError(f"group {group_id!r} is {found}, not {old}, so it cannot become {new}")
