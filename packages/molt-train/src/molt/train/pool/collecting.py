"""Groups that are collected from self-driven sessions: agents that no worker runs, and that report themselves."""

from collections.abc import Callable

from molt.train.config import PoolConfig
from molt.train.pool.books import Books
from molt.train.pool.groups import ExperiencesOf
from molt.train.pool.leases import ReportVerdict
from molt.train.pool.outcomes import consequence_of, why_group_failed
from molt.train.pool.rows import GroupRow, ResultRow, SessionState
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Rollout, Task


class Collecting:
    """Fills a group of each key with the sessions that finish under it.

    `clock` gives seconds and must never go back. It is not the ledger's: how long a group has waited starts anew with
    the server.
    """

    def __init__(
        self, books: Books, *, settings: PoolConfig, clock: Callable[[], float], experiences_of: ExperiencesOf
    ) -> None:
        self._books = books
        self._settings = settings
        self._clock = clock
        self._experiences_of = experiences_of
        self._since: dict[str, float] = {group.row.group_id: clock() for group in books.collecting.values()}
        """When each open group began to wait, by group id."""

    def collect(self, key: str, *, task: Task, size: int, outcome: Outcome, recording: Recording) -> ReportVerdict:
        """See `Pool.collect`."""
        if outcome.kind == "infrastructure":
            is_row = self._books.ledger.session(recording.session_id) is not None
            self.keep(recording, outcome, "closed" if is_row else None)
            self._books.counters["sessions_lost_to_infrastructure"] += 1
            return ReportVerdict(accepted=True, reason="infrastructure: the session takes no place in its group")
        group = self._books.collecting.get(key)
        if group is None:
            group = self._books.open_group(task, kind="train", size=size, key=key)
            self._since[group.row.group_id] = self._clock()
        row = group.new_member(len(group.members))
        rollout = Rollout(
            rollout_id=row.rollout_id,
            group_id=row.group_id,
            attempt=row.attempt,
            outcome=outcome,
            experiences=self._experiences_of(recording.segments, row.rollout_id, row.group_id),
            delivered_fraction=recording.delivered_fraction,
        )
        # Nobody would run it again.
        consequence = consequence_of(outcome.kind, group="train", may_retry=False, settings=self._settings)
        failure = why_group_failed(rollout) if consequence == "fail_group" else None
        complete = self._books.finish(row, rollout, recording=recording, failure=failure)
        return ReportVerdict(accepted=True, group=complete, reason=failure)

    def keep(self, recording: Recording, outcome: Outcome | None, state: SessionState | None = None) -> None:
        """See `Pool.keep_session`."""
        ledger = self._books.ledger
        with ledger.transaction():
            recording_id = ledger.add_recording(recording)
            if outcome is not None:
                ledger.add_result(ResultRow(outcome=outcome, counted=False), recording_id=recording_id)
            if state is not None:
                ledger.move_session(recording.session_id, state)

    def expire(self) -> list[GroupRow]:
        """Fail the groups that have waited for `pool.group_wait_s` to fill. Returns them."""
        wait_s, now = self._settings.group_wait_s, self._clock()
        waiting = list(self._books.collecting.values())
        self._since = {group.row.group_id: self._since[group.row.group_id] for group in waiting}
        failed: list[GroupRow] = []
        for group in waiting:
            if now - self._since[group.row.group_id] >= wait_s:
                reason = f"{len(group.finished)} of {group.row.size} sessions finished within {wait_s:g} s"
                failed.append(self._books.give_up(group, "failed", f"{reason} (pool.group_wait_s)"))
                self._books.counters["groups_unfilled"] += 1
        return failed
