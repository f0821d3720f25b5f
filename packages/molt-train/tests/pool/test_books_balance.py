"""Random lives of a pool: workers die, stutter and come back late, and the server restarts at any point."""

import itertools
from unittest import mock

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from molt.train.records.rollout import Outcome

OUTCOMES = ("completed", "truncated", "failed", "timeout", "infrastructure")
WORKERS = st.sampled_from(["w1", "w2", "w3"])
TTL_S = 30.0
MAX_ATTEMPTS = 2


class PoolLife(RuleBasedStateMachine):
    """A pool, beside the little that must hold of it: `counted` is what was accepted as final, by rollout."""

    leases = Bundle("leases")

    def __init__(self, *, directory, open_pool, clock, report, task, recording):
        super().__init__()
        self.path = directory / "ledger.sqlite"
        self.open_pool, self.clock, self.report_to, self.task, self.recording = (
            open_pool,
            clock,
            report,
            task,
            recording,
        )
        self.wall = mock.patch("molt.train.pool.ledger.time.time", side_effect=self.jumping_time)
        self.wall.start()
        self.hours = 0
        self.pool = self.start()
        self.counted = {}
        self.rewards = itertools.count(1)
        self.step = 0
        self.taken = []
        self.num_groups = 0

    def start(self):
        return self.open_pool(self.path, self.clock, max_attempts=MAX_ATTEMPTS, lease_ttl_s=TTL_S)

    def jumping_time(self):
        return 1.8e9 + 3600.0 * self.hours

    @initialize()
    def begin(self):
        self.open(size=2, kind="train")

    @rule(size=st.integers(1, 3), kind=st.sampled_from(["train", "train", "eval"]))
    def open(self, size, kind):
        position = self.pool.next_position if kind == "train" else None
        self.pool.open_group(self.task(), kind=kind, size=size, position=position)
        self.num_groups += 1

    @rule(target=leases, worker=WORKERS, capacity=st.integers(1, 4))
    def acquire(self, worker, capacity):
        assignments = self.pool.acquire(worker, capacity)
        assert not {a.rollout_id for a in assignments} & self.counted.keys(), "a finished rollout runs again"
        return multiple(*[(a, worker) for a in assignments])

    @rule(held=leases, kind=st.sampled_from(OUTCOMES))
    def report(self, held, kind):
        """Of any lease ever granted: in time, late, for the second time, from before a restart."""
        assignment, _ = held
        lease = self.pool.ledger.lease(assignment.lease_id)
        was_live = lease.state == "granted"
        failures = self.member(assignment.rollout_id).failures
        verdict = self.report_to(self.pool, assignment, kind, reward=float(next(self.rewards)))
        assert verdict.accepted == was_live
        is_final = kind != "infrastructure" or failures + 1 == MAX_ATTEMPTS
        if was_live and is_final:
            self.count(assignment.rollout_id, kind)

    @rule(held=leases)
    def release(self, held):
        assignment, _ = held
        was_live = self.pool.ledger.lease(assignment.lease_id).state == "granted"
        assert (self.pool.release(assignment.lease_id, assignment.attempt) is None) == was_live

    @rule(worker=WORKERS)
    def heartbeat(self, worker):
        mine = [lease for lease in self.pool.ledger.leases() if lease.worker_id == worker]
        lost = self.pool.heartbeat(worker, [lease.lease_id for lease in mine])
        assert set(lost) == {lease.lease_id for lease in mine if lease.state != "granted"}

    @rule(seconds=st.floats(0.0, 20.0), hours=st.integers(-1, 1))
    def pass_time(self, seconds, hours):
        """The monotonic clock goes on; the clock on the wall is also set by an hour, either way."""
        self.clock.now += seconds
        self.hours += hours

    @rule()
    def expire(self):
        for expired in self.pool.expire():
            if not expired.retried:
                self.count(expired.rollout_id, "infrastructure")

    @rule(key=st.sampled_from(["k1", "k2"]), kind=st.sampled_from(OUTCOMES))
    def finish_session(self, key, kind):
        outcome = Outcome(kind=kind, reward=1.0 if kind in ("completed", "truncated") else None)
        session_id = f"s{next(self.rewards)}"
        before = self.finished_rollouts()
        self.pool.collect(key, task=self.task(), size=2, outcome=outcome, recording=self.recording(session_id))
        new = self.finished_rollouts() - before
        assert len(new) == (kind != "infrastructure")
        for rollout_id in new:
            self.count(rollout_id, kind)

    @rule(n=st.integers(1, 2))
    def take(self, n):
        n = min(n, self.pool.num_ready)
        self.taken += [group.group_id for group in self.pool.take(n)]

    @rule()
    def train(self):
        self.step += 1
        self.pool.ledger.record_window(self.step, self.step - 1, self.taken)
        self.taken = []

    @rule()
    def drop_one(self):
        if self.taken:
            self.pool.drop(self.taken.pop(), "too old")

    @rule()
    def restart(self):
        """As after kill -9: nothing is said to the old pool, and nothing of its memory is used."""
        self.pool.ledger.close()
        self.pool = self.start()
        self.taken = []

    @invariant()
    def no_rollout_has_two_live_leases(self):
        live = [lease.rollout_id for lease in self.pool.ledger.leases() if lease.state == "granted"]
        assert len(live) == len(set(live))

    @invariant()
    def every_lease_of_a_rollout_has_its_own_attempt(self):
        attempts = [(lease.rollout_id, lease.attempt) for lease in self.pool.ledger.leases()]
        assert len(attempts) == len(set(attempts))

    @invariant()
    def exactly_what_was_counted_is_in_the_ledger(self):
        recorded = {
            row.rollout_id: row.outcome.kind
            for group in self.pool.ledger.groups()
            for row in self.pool.ledger.rollouts(group.group_id)
            if row.outcome is not None
        }
        assert recorded == self.counted
        assert sum(result.counted for result in self.pool.ledger.results()) == len(self.counted)

    @invariant()
    def every_group_is_in_one_place(self):
        consumed = [group_id for window in self.pool.ledger.windows() for group_id in window.group_ids]
        assert len(consumed) == len(set(consumed))
        for group in self.pool.ledger.groups():
            rows = self.pool.ledger.rollouts(group.group_id)
            is_done = sum(row.state == "finished" for row in rows) == group.size
            assert is_done or group.state == "open" or (group.state == "dropped" and group.kind == "eval")
            assert not is_done or group.state != "open"
            assert (group.group_id in consumed) == (group.state == "consumed")
            assert (group.reason is None) == (group.state not in ("failed", "dropped"))

    @invariant()
    def memory_agrees_with_the_ledger(self):
        books, ledger = self.pool._books, self.pool.ledger
        live = ledger.live_groups()
        opened = {row.group_id: row for row in live if row.state == "open"}
        assert {group_id: group.row for group_id, group in books.open.items()} == opened
        for group_id, group in books.open.items():
            rows = ledger.rollouts(group_id)
            assert list(group.members.values()) == [
                msgspec.structs.replace(row, outcome=None, recording=None) for row in rows
            ]
            assert {i: r.outcome for i, r in group.finished.items()} == {
                row.rollout_id: row.outcome for row in rows if row.outcome is not None
            }
        waiting = [row for group_id in opened for row in ledger.rollouts(group_id) if row.state == "waiting"]
        offers = books.offers.oldest(len(waiting) + 1)
        assert [offer.rollout_id for offer in offers] == [row.rollout_id for row in waiting]
        ready = [row.group_id for row in live if row.state == "complete" and row.kind == "train"]
        assert books.complete.first(books.complete.count("train")) == [i for i in ready if i not in self.taken]
        granted = {lease.lease_id for lease in ledger.leases() if lease.state == "granted"}
        assert sum(books.leases.count_by_worker().values()) == len(granted)
        assert all(books.leases.get(lease_id) for lease_id in granted)

    def teardown(self):
        """From any state the rest of the work can be finished, and then every group is accounted for."""
        try:
            self.clock.now += 2 * TTL_S
            self.expire()
            while assignments := self.pool.acquire("last", 8):
                for assignment in assignments:
                    self.report((assignment, "last"), "completed")
            self.taken += [group.group_id for group in self.pool.take(self.pool.num_ready)]
            self.train()
            for group in self.pool.ledger.groups():
                is_waiting_for_sessions = group.key is not None and group.state == "open"
                is_evaluation = group.kind == "eval" and group.state == "complete"
                is_settled = group.state in ("consumed", "failed", "dropped")
                assert is_settled or is_waiting_for_sessions or is_evaluation
            self.memory_agrees_with_the_ledger()
        finally:
            self.pool.ledger.close()
            self.wall.stop()

    def count(self, rollout_id, kind):
        assert rollout_id not in self.counted, "a rollout counts twice"
        self.counted[rollout_id] = kind

    def member(self, rollout_id):
        [row] = [r for r in self.pool.ledger.rollouts(rollout_id.split(".")[0]) if r.rollout_id == rollout_id]
        return row

    def finished_rollouts(self):
        groups = self.pool.ledger.groups()
        rows = (row for group in groups for row in self.pool.ledger.rollouts(group.group_id))
        return {row.rollout_id for row in rows if row.state == "finished"}


def test_the_books_balance_in_every_life(tmp_path_factory, open_pool, clock, report, task, recording):
    def new_life():
        return PoolLife(
            directory=tmp_path_factory.mktemp("life"),
            open_pool=open_pool,
            clock=clock,
            report=report,
            task=task,
            recording=recording,
        )

    run_state_machine_as_test(
        new_life,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
