"""Random lives of a pool: workers die, stutter and come back late, disks fill, and the server restarts at any point."""

import itertools
from contextlib import suppress
from unittest import mock

import msgspec
import pytest
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

from molt.train.errors import LedgerFullError
from molt.train.records.rollout import Outcome

OUTCOMES = st.sampled_from(["completed", "truncated", "failed", "timeout", "infrastructure"])
POLICIES = st.sampled_from(["train", "mask", "retry", "fail_group"])
GPU = {"gpu": "a"}
WORKERS = {"w1": None, "w2": {}, "w3": GPU}
TTL_S = 30.0
GROUP_WAIT_S = 90.0
MAX_ATTEMPTS = 2
UNFINISHED = {"waiting", "leased"}


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
        self.clock.now = 1000.0
        self.hours = 0
        # What a power failure would take is not looked at here, and waiting for the disk is most of the time.
        self.patches = [mock.patch("time.time", side_effect=self.jumping_time), mock.patch("os.fdatasync")]
        for patch in self.patches:
            patch.start()
        self.pool = None
        self.policies = {}
        self.counted = {}
        self.numbers = itertools.count(1)
        self.step = 0
        self.taken = []
        self.evaluated = set()
        self.cut_told = set()
        self.cut_untold = set()
        """Leases that were cut before a restart, which nobody is told of."""

    def jumping_time(self):
        return 1.8e9 + 3600.0 * self.hours

    @initialize(failed=POLICIES, timeout=POLICIES, truncated=POLICIES, infrastructure=POLICIES)
    def begin(self, failed, timeout, truncated, infrastructure):
        infrastructure = "retry" if infrastructure == "train" else infrastructure
        self.policies = {"failed": failed, "timeout": timeout, "truncated": truncated, "infrastructure": infrastructure}
        self.pool = self.start()
        self.open(size=2, kind="train", extra=0, name="a", labels={})
        self.open(size=2, kind="train", extra=2, name="b", labels={})
        self.open(size=2, kind="eval", extra=0, name="c", labels={})

    def start(self):
        keys = {f"on_{outcome}": policy for outcome, policy in self.policies.items()}
        return self.open_pool(
            self.path, self.clock, max_attempts=MAX_ATTEMPTS, lease_ttl_s=TTL_S, group_wait_s=GROUP_WAIT_S, **keys
        )

    # What is done to it.

    @rule(
        size=st.integers(1, 3),
        kind=st.sampled_from(["train", "train", "eval"]),
        extra=st.integers(0, 2),
        name=st.sampled_from("abc"),
        labels=st.sampled_from([{}, {}, GPU]),
    )
    def open(self, size, kind, extra, name, labels):
        is_train = kind == "train"
        position = self.pool.next_position if is_train else None
        self.pool.open_group(
            self.task(name, **labels), kind=kind, size=size, position=position, extra=extra if is_train else 0
        )

    @rule(target=leases, worker=st.sampled_from(sorted(WORKERS)), kinds=st.lists(OUTCOMES, min_size=1, max_size=4))
    def work(self, worker, kinds):
        """Lease rollouts, and report each at once."""
        assignments = self.acquire(worker, len(kinds))
        for assignment, kind in zip(assignments, kinds, strict=False):
            self.report((assignment, worker), kind, age=0)
        return multiple(*[(assignment, worker) for assignment in assignments])

    @rule(target=leases)
    def lose(self):
        """What has waited longest kills all its attempts, while everything else goes well."""
        granted = []
        for _ in range(MAX_ATTEMPTS):
            granted += (assignments := self.acquire("w3", 9))
            for assignment in assignments:
                is_oldest = assignment.rollout_id == granted[0].rollout_id
                self.report((assignment, "w3"), "infrastructure" if is_oldest else "completed", age=0)
        return multiple(*[(assignment, "w3") for assignment in granted])

    @rule(target=leases, worker=st.sampled_from(sorted(WORKERS)), capacity=st.integers(1, 4))
    def take_leases(self, worker, capacity):
        return multiple(*[(assignment, worker) for assignment in self.acquire(worker, capacity)])

    def acquire(self, worker, capacity):
        has = WORKERS[worker]
        assignments = self.pool.acquire(worker, capacity, has)
        assert not {a.rollout_id for a in assignments} & self.counted.keys(), "a finished rollout runs again"
        assert all(a.task.labels.items() <= (has or {}).items() for a in assignments)
        assert len(assignments) <= capacity
        return assignments

    @rule(held=leases, kind=OUTCOMES, age=st.integers(0, 2))
    def report(self, held, kind, age):
        """Of any lease ever granted: in time, late, for the second time, cut, from before a restart."""
        assignment, _ = held
        was_live = self.is_live(assignment.lease_id)
        is_final = not self.is_retried(assignment.rollout_id, kind)
        version = max(0, self.step - age)
        verdict = self.report_to(self.pool, assignment, kind, reward=float(next(self.numbers)), version=version)
        assert verdict.accepted == was_live
        if was_live:
            assert verdict.retried != is_final
            if is_final:
                self.count(assignment.rollout_id, kind)

    @rule(held=leases)
    def release(self, held):
        assignment, _ = held
        was_live = self.is_live(assignment.lease_id)
        assert (self.pool.release(assignment.lease_id, assignment.attempt) is None) == was_live

    @rule(worker=st.sampled_from(sorted(WORKERS)))
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
        rollouts = {
            lease.rollout_id: self.is_retried(lease.rollout_id, "infrastructure")
            for lease in self.pool.ledger.leases()
            if lease.state == "granted"
        }
        for expired in self.pool.expire():
            assert expired.retried == rollouts[expired.rollout_id]
            if not expired.retried:
                self.count(expired.rollout_id, "infrastructure")

    @rule(key=st.sampled_from(["k1", "k2"]), kind=OUTCOMES)
    def finish_session(self, key, kind):
        outcome = Outcome(kind=kind, reward=1.0 if kind in ("completed", "truncated") else None)
        session_id = f"s{next(self.numbers)}"
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
    def take_evaluation(self):
        ready = [g.group_id for g in self.pool.ledger.groups() if (g.kind, g.state) == ("eval", "complete")]
        assert [group.group_id for group in self.pool.take_eval(ready)] == ready
        self.evaluated.update(ready)

    @rule()
    def train(self):
        self.step += 1
        self.pool.ledger.record_window(self.step, self.step - 1, self.taken)
        self.taken = []

    @rule()
    def drop_one(self):
        if self.taken:
            self.pool.drop(self.taken.pop(), "too old")

    @rule(max_age=st.integers(0, 2))
    def discard_stale(self, max_age):
        before = self.step - max_age
        dropped = {row.group_id for row in self.pool.discard_stale(before)}
        assert not dropped & set(self.taken)
        for group in self.pool.ledger.groups():
            if group.group_id in dropped:
                assert (group.state, group.reason, self.is_older(group, before)) == ("dropped", "stale", True)
            elif group.kind == "train" and group.state in ("open", "complete") and group.group_id not in self.taken:
                assert not self.is_older(group, before)

    @rule()
    def take_cut(self):
        told = [cut.lease_id for cut in self.pool.take_cut()]
        assert len(told) == len({*told} - self.cut_told), "a lease is cut once"
        self.cut_told.update(told)
        cut = {lease.lease_id for lease in self.pool.ledger.leases() if lease.state == "cut"}
        assert cut <= self.cut_told | self.cut_untold
        assert all(self.pool.ledger.lease(lease_id).state in ("cut", "late") for lease_id in told)

    @rule(held=leases, kind=OUTCOMES, after=st.integers(0, 2))
    def fill_the_disk(self, held, kind, after):
        """A write fails in the middle of a transaction: whoever asked is told, and the invariants say that is all."""
        assignment, worker = held
        put, calls = self.pool.ledger.put_rollouts, itertools.count()

        def fail_later(*args, **kwargs):
            put(*args, **kwargs)
            if next(calls) == after:
                raise LedgerFullError("full")

        before = self.finished_rollouts()
        with mock.patch.object(self.pool.ledger, "put_rollouts", fail_later):
            with suppress(LedgerFullError):
                self.report_to(self.pool, assignment, kind)
            with suppress(LedgerFullError):
                self.pool.acquire(worker, 2, WORKERS[worker])
            with suppress(LedgerFullError):
                self.pool.expire()
        for rollout_id in self.finished_rollouts() - before:
            self.count(rollout_id, self.member(rollout_id).outcome.kind)

    @rule()
    def restart(self):
        """As after kill -9: nothing is said to the old pool, and nothing of its memory is used."""
        self.pool.ledger.close()
        self.pool = self.start()
        self.taken = []
        self.cut_untold = {lease.lease_id for lease in self.pool.ledger.leases() if lease.state == "cut"}

    # What must hold.

    @invariant()
    def a_live_lease_is_the_only_one_of_a_rollout_and_has_a_holder(self):
        live = [lease for lease in self.pool.ledger.leases() if lease.state == "granted"]
        assert len(live) == len({lease.rollout_id for lease in live})
        running = {lease.rollout_id: lease.attempt for lease in live}
        rows = itertools.chain.from_iterable(self.pool.ledger.rollouts(g.group_id) for g in self.pool.ledger.groups())
        assert {row.rollout_id: row.attempt for row in rows if row.state == "leased"} == running
        assert all(lease.worker_id in self.pool.workers for lease in live)

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
            is_used = group.group_id in consumed or group.group_id in self.evaluated
            assert is_used == (group.state == "consumed")
            assert (group.reason is None) == (group.state not in ("failed", "dropped"))
            states = {row.state for row in self.pool.ledger.rollouts(group.group_id)}
            if group.state == "open":
                assert "cut" not in states
                assert group.key is not None or states & UNFINISHED
                assert not self.is_full(group)
            elif group.kind == "train" or group.state != "dropped":
                assert not states & UNFINISHED, "an evaluation that a restart cut is left as it stood"
            if group.state in ("complete", "consumed"):
                assert self.is_full(group) or "cut" not in states

    @invariant()
    def memory_agrees_with_the_ledger(self):
        books, ledger = self.pool._books, self.pool.ledger
        live = ledger.live_groups()
        opened = {row.group_id: row for row in live if row.state == "open"}
        assert {group_id: group.row for group_id, group in books.open.items()} == opened
        assert self.pool.num_open == sum(row.kind == "train" and row.key is None for row in opened.values())
        for group_id, group in books.open.items():
            rows = ledger.rollouts(group_id)
            assert list(group.members.values()) == [
                msgspec.structs.replace(row, outcome=None, recording=None) for row in rows
            ]
            assert {i: r.outcome for i, r in group.finished.items()} == {
                row.rollout_id: row.outcome for row in rows if row.outcome is not None
            }
        waiting = [row for group_id in opened for row in ledger.rollouts(group_id) if row.state == "waiting"]
        offers = books.offers.oldest(len(waiting) + 1, GPU)
        assert [offer.rollout_id for offer in offers] == [row.rollout_id for row in waiting]
        assert len(books.offers) == len(waiting)
        ready = [row.group_id for row in live if row.state == "complete" and row.kind == "train"]
        assert list(books.complete._by_kind["train"]) == [i for i in ready if i not in self.taken]
        granted = {lease.lease_id for lease in ledger.leases() if lease.state == "granted"}
        assert sum(books.leases.by_worker.values()) == len(books.leases) == len(granted)
        assert all(books.leases.get(lease_id) for lease_id in granted)
        assert {task: list(errors) for task, errors in self.pool.quarantined.items()} == ledger.quarantined()
        assert all(len(errors) == MAX_ATTEMPTS for errors in self.pool.quarantined.values())

    def teardown(self):
        """From any state the rest of the work can be finished, and then every group is accounted for."""
        try:
            if self.pool is None:
                return
            self.clock.now += 2 * TTL_S + GROUP_WAIT_S
            self.expire()
            while assignments := self.acquire("w3", 8):
                for assignment in assignments:
                    self.report((assignment, "w3"), "completed", age=0)
            self.take_cut()
            self.take_evaluation()
            self.taken += [group.group_id for group in self.pool.take(self.pool.num_ready)]
            self.train()
            assert {group.state for group in self.pool.ledger.groups()} <= {"consumed", "failed", "dropped"}
            self.every_group_is_in_one_place()
            self.memory_agrees_with_the_ledger()
        finally:
            if self.pool is not None:
                self.pool.ledger.close()
            for patch in self.patches:
                patch.stop()

    # What it looks at.

    def count(self, rollout_id, kind):
        assert rollout_id not in self.counted, "a rollout counts twice"
        self.counted[rollout_id] = kind

    def is_live(self, lease_id):
        return self.pool.ledger.lease(lease_id).state == "granted"

    def is_retried(self, rollout_id, kind):
        """Whether an outcome would make the rollout wait for another attempt now."""
        is_eval = self.pool.ledger.group(rollout_id.split(".")[0]).kind == "eval"
        policies = {"infrastructure": "retry"} if is_eval else self.policies
        return policies.get(kind) == "retry" and self.member(rollout_id).failures + 1 < MAX_ATTEMPTS

    def is_full(self, group):
        """Whether as many members of a group as it needs have finished."""
        kinds = [row.outcome.kind for row in self.pool.ledger.rollouts(group.group_id) if row.outcome is not None]
        if group.key is None:
            kinds = [kind for kind in kinds if kind == "completed" or self.policies[kind] == "train"]
        return len(kinds) >= group.size

    def is_older(self, group, before):
        rows = self.pool.ledger.rollouts(group.group_id)
        segments = [segment for row in rows if row.recording is not None for segment in row.recording.segments]
        return any(version < before for segment in segments for version in segment.versions if version is not None)

    def member(self, rollout_id):
        [row] = [r for r in self.pool.ledger.rollouts(rollout_id.split(".")[0]) if r.rollout_id == rollout_id]
        return row

    def finished_rollouts(self):
        groups = self.pool.ledger.groups()
        rows = (row for group in groups for row in self.pool.ledger.rollouts(group.group_id))
        return {row.rollout_id for row in rows if row.state == "finished"}


@pytest.mark.timeout(240)
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
            max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
