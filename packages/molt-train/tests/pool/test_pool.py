import asyncio

import msgspec
import pytest

from molt.train.records.rollout import Outcome


@pytest.fixture
def opened(pool, task):
    """A pool with one open train group of two."""
    pool.open_group(task("one"), kind="train", size=2, position=0)
    return pool


def test_members_are_leased_oldest_group_first(pool, task):
    for position, name in enumerate("abc"):
        pool.open_group(task(name), kind="train", size=2, position=position)
    assert [a.task.task_id for a in pool.acquire("w1", 3)] == ["a", "a", "b"]
    assert [(a.task.task_id, a.attempt, a.kind) for a in pool.acquire("w2", 9)] == [
        ("b", 1, "train"),
        ("c", 1, "train"),
        ("c", 1, "train"),
    ]
    assert pool.acquire("w3", 1) == []


def test_a_group_is_ready_when_its_last_member_is_reported(opened, report):
    first, second = opened.acquire("w", 2)
    verdict = report(opened, second, reward=2.0)
    assert (verdict.accepted, verdict.reason, verdict.group) == (True, None, None)
    assert (opened.num_open, opened.num_ready) == (1, 0)
    group = report(opened, first, reward=3.0).group
    assert [r.outcome.reward for r in group.rollouts] == [3.0, 2.0], "in the order of the members"
    assert (opened.num_open, opened.num_ready) == (0, 1)
    assert opened.take(1) == [group]
    assert opened.num_ready == 0


def test_the_groups_with_the_oldest_tokens_are_taken_first(pool, task, report):
    ids = [pool.open_group(task(name), kind="train", size=1, position=i) for i, name in enumerate("abcd")]
    for lease, version in zip(pool.acquire("w", 4), (3, 1, 2, 1), strict=True):
        report(pool, lease, version=version)
    assert [group.group_id for group in pool.take(4)] == [ids[1], ids[3], ids[2], ids[0]]


def test_groups_of_one_age_are_taken_in_the_order_of_completion_also_after_a_restart(make_pool, task, report):
    pool = make_pool()
    ids = [pool.open_group(task(name), kind="train", size=1, position=i) for i, name in enumerate("abc")]
    leases = pool.acquire("w", 3)
    for i in (2, 0, 1):
        report(pool, leases[i])
    wanted = [ids[2], ids[0], ids[1]]
    assert [group.group_id for group in pool.take(2)] == wanted[:2]
    pool = make_pool()
    groups = pool.take(3)
    assert [group.group_id for group in groups] == wanted, "taken but in no window: ready again"
    assert groups[0].rollouts[0].experiences[0].oldest_version == 0
    assert groups[0].rollouts[0].delivered_fraction == 0.5
    with pytest.raises(ValueError, match="1 groups were asked for, but 0 are complete"):
        pool.take(1)


@pytest.mark.parametrize("kind", ["failed", "timeout", "truncated", "completed"])
def test_an_outcome_of_the_agent_is_final_at_the_first_attempt(opened, report, kind):
    first, second = opened.acquire("w", 2)
    report(opened, first)
    group = report(opened, second, kind).group
    assert [r.outcome.kind for r in group.rollouts] == ["completed", kind]


def test_infrastructure_outcomes_are_tried_again_until_the_attempts_are_spent(opened, report):
    first, second = opened.acquire("w", 2)
    report(opened, second)
    for attempt in (1, 2):
        assert first.attempt == attempt
        verdict = report(opened, first, "infrastructure", error="sandbox gone")
        assert (verdict.accepted, verdict.group) == (True, None)
        assert f"attempt {attempt + 1} follows" in verdict.reason
        [first] = opened.acquire("w", 9)
        assert first.rollout_id.endswith(".0")
    verdict = report(opened, first, "infrastructure", error="sandbox gone")
    assert (verdict.accepted, verdict.group) == (True, None)
    assert opened.acquire("w", 9) == []
    assert (opened.num_open, opened.num_ready) == (0, 0)
    [group] = opened.ledger.groups()
    assert group.state == "failed"
    assert "was lost to infrastructure: sandbox gone" in group.reason
    assert [r.counted for r in opened.ledger.results()] == [True, False, False, True]


def test_a_rollout_that_recovers_counts_with_its_last_attempt_only(opened, report):
    first, second = opened.acquire("w", 2)
    report(opened, second)
    report(opened, first, "infrastructure")
    [again] = opened.acquire("w", 1)
    group = report(opened, again, reward=5.0).group
    assert (group.rollouts[0].attempt, group.rollouts[0].outcome.reward) == (2, 5.0)


def test_a_result_counts_once_and_its_repetition_is_kept(opened, report):
    first, _ = opened.acquire("w", 2)
    assert report(opened, first, reward=1.0).accepted
    verdict = report(opened, first, reward=9.0)
    assert (verdict.accepted, verdict.reason) == (False, "the lease was reported before")
    assert [(r.counted, r.outcome.reward) for r in opened.ledger.results()] == [(True, 1.0), (False, 9.0)]
    assert opened.ledger.rollouts("g1")[0].outcome.reward == 1.0


def test_an_expired_lease_is_fenced_and_its_late_result_is_kept(opened, report, clock):
    old, _ = opened.acquire("slow", 2)
    opened.attach_session(old.lease_id, "s-old")
    clock.now += 30.0
    expired = opened.expire()
    assert [(e.rollout_id, e.attempt, e.retried) for e in expired] == [("g1.0", 1, True), ("g1.1", 1, True)]
    assert expired[0].session_id == "s-old"
    new, _ = opened.acquire("fast", 2)
    assert (new.rollout_id, new.attempt) == (old.rollout_id, 2)
    assert opened.check(old.lease_id, 1) == "the lease is over (expired), and attempt 1 of the rollout with it"
    assert not report(opened, old, reward=9.0).accepted
    assert opened.ledger.lease(old.lease_id).state == "late"
    assert opened.ledger.recording(old.lease_id).turns[0].token_ids == [9, 10]
    assert opened.ledger.rollouts("g1")[0].outcome is None
    assert opened.heartbeat("slow", [old.lease_id]) == [old.lease_id]
    assert opened.heartbeat("fast", [new.lease_id]) == []
    assert report(opened, new, reward=1.0).accepted


def test_a_report_must_name_the_attempt_of_its_lease(opened, report):
    first, _ = opened.acquire("w", 2)
    wrong = msgspec.structs.replace(first, attempt=2)
    verdict = report(opened, wrong)
    assert (verdict.accepted, verdict.reason) == (False, "the lease is for attempt 1, not 2")
    assert opened.check(first.lease_id, 1) is None


def test_a_lease_of_another_run_is_unknown_here(opened, report):
    first, _ = opened.acquire("w", 2)
    stranger = msgspec.structs.replace(first, lease_id="g1.0.1-beef")
    assert "unknown to this run" in report(opened, stranger).reason
    assert opened.release("g1.0.1-beef", 1) == "lease 'g1.0.1-beef' is unknown to this run"
    assert opened.num_ready == 0


def test_heartbeats_keep_a_lease_alive_and_only_its_owner_can_send_them(opened, clock):
    first, second = opened.acquire("w", 2)
    for _ in range(5):
        clock.now += 29.0
        assert opened.heartbeat("w", [first.lease_id]) == []
        assert opened.heartbeat("thief", [second.lease_id]) == [second.lease_id]
        opened.expire()
    assert opened.check(first.lease_id, 1) is None
    assert opened.check(second.lease_id, 1) is not None


def test_silence_spends_the_attempts(opened, report, clock):
    report(opened, opened.acquire("w", 1)[0])
    for attempt in (1, 2, 3):
        [lease] = opened.acquire("dying", 1)
        assert lease.attempt == attempt
        clock.now += 31.0
        [expired] = opened.expire()
        assert expired.retried == (attempt < 3)
    assert opened.acquire("w", 1) == []
    [group] = opened.ledger.groups()
    assert (group.state, "no heartbeat for 30 s from worker 'dying'" in group.reason) == ("failed", True)


def test_a_lease_given_back_is_offered_at_once_and_costs_no_attempt(opened, report):
    attempts = []
    for _ in range(5):
        lease = opened.acquire("w", 1)[0]
        attempts.append(lease.attempt)
        assert opened.release(lease.lease_id, lease.attempt) is None
        assert opened.release(lease.lease_id, lease.attempt) is not None
    assert attempts == [1, 2, 3, 4, 5], "each lease of a rollout has an attempt number of its own"
    leases = opened.acquire("w", 2)
    report(opened, leases[1])
    assert "follows" in report(opened, leases[0], "infrastructure").reason


def test_a_dropped_group_is_gone_with_its_reason(pool, task, report):
    for position in (0, 1):
        pool.open_group(task(), kind="train", size=1, position=position)
        report(pool, pool.acquire("w", 1)[0])
    pool.take(1)
    pool.drop("g1", "too old")
    pool.drop("g2", "degenerate")
    assert pool.num_ready == 0
    assert [(g.state, g.reason) for g in pool.ledger.groups()] == [("dropped", "too old"), ("dropped", "degenerate")]
    with pytest.raises(ValueError, match="'g1' is dropped, not complete"):
        pool.drop("g1", "again")


def test_evaluations_wait_apart_and_keep_members_lost_to_infrastructure(make_pool, task, report):
    pool = make_pool(max_attempts=1)
    ids = [pool.open_group(task(name), kind="eval", size=1, position=None) for name in "ab"]
    assert pool.num_open == 0
    first, second = pool.acquire("w", 2)
    report(pool, second)
    report(pool, first, "infrastructure", error="gone")
    assert pool.num_ready == 0
    groups = pool.take_eval(ids)
    assert [group.rollouts[0].outcome.kind for group in groups] == ["infrastructure", "completed"]
    assert [group.state for group in pool.ledger.groups()] == ["consumed", "consumed"]


def test_an_evaluation_cut_by_a_restart_is_dropped(make_pool, task, report):
    pool = make_pool()
    for name in "ab":
        pool.open_group(task(name), kind="eval", size=1, position=None)
    report(pool, pool.acquire("w", 1)[0])
    pool = make_pool()
    assert pool.acquire("w", 9) == []
    assert [(g.state, g.reason) for g in pool.ledger.groups()] == [
        ("dropped", "the server restarted during the evaluation")
    ] * 2


def test_a_restart_keeps_finished_members_and_runs_the_others_again(make_pool, task, report):
    pool = make_pool()
    pool.open_group(task("kept"), kind="train", size=3, position=0)
    done, lost, _ = pool.acquire("w", 3)
    report(pool, done, reward=4.0)
    pool = make_pool()
    assert pool.check(lost.lease_id, 1) == "the lease is over (expired), and attempt 1 of the rollout with it"
    again = pool.acquire("w", 9)
    assert [(a.rollout_id, a.attempt, a.task.task_id) for a in again] == [("g1.1", 2, "kept"), ("g1.2", 2, "kept")]
    report(pool, again[0])
    assert "follows" in report(pool, again[1], "infrastructure").reason, "the restart itself spends no attempt"
    group = report(pool, pool.acquire("w", 1)[0]).group
    assert [r.outcome.reward for r in group.rollouts] == [4.0, 1.0, 1.0]
    assert all(len(r.experiences) == 1 for r in group.rollouts)
    assert pool.open_group(task("new"), kind="train", size=1, position=1) == "g2"


def test_sessions_of_one_key_make_groups_over_restarts_too(make_pool, task, recording):
    pool = make_pool()

    def finish(session_id, reward=1.0, kind="completed"):
        outcome = Outcome(kind=kind, reward=reward)
        return pool.collect("k", task=task("k"), size=2, outcome=outcome, recording=recording(session_id))

    assert finish("s1", 1.0).group is None
    assert finish("s2", None, "infrastructure").group is None
    assert (pool.num_open, pool.num_ready) == (0, 0)
    pool = make_pool()
    assert pool.acquire("w", 9) == [], "no worker runs a member of such a group"
    group = finish("s3", 3.0).group
    assert [r.outcome.reward for r in group.rollouts] == [1.0, 3.0]
    assert [e.segment_id for r in group.rollouts for e in r.experiences] == ["s1/0", "s3/0"]
    assert finish("s4").group is None
    assert [(g.group_id, g.key, g.state) for g in pool.ledger.groups()] == [
        ("g1", "k", "complete"),
        ("g2", "k", "open"),
    ]
    assert pool.ledger.recording("s2").turns[0].token_ids == [9, 10]


async def test_a_long_poll_wakes_when_work_arrives_is_retried_or_is_given_back(pool, task, report):
    assert not await pool.wait_offers(0.0)
    waiting = [asyncio.create_task(pool.wait_offers(30)) for _ in range(3)]
    await asyncio.sleep(0)
    pool.open_group(task(), kind="train", size=1, position=0)
    assert await asyncio.gather(*waiting) == [True] * 3
    for again in (lambda a: report(pool, a, "infrastructure"), lambda a: pool.release(a.lease_id, a.attempt)):
        [assignment] = pool.acquire("w", 1)
        poll = asyncio.create_task(pool.wait_offers(30))
        await asyncio.sleep(0)
        assert not poll.done()
        again(assignment)
        assert await poll


async def test_wake_lets_a_long_poll_look_again(pool):
    poll = asyncio.create_task(pool.wait_offers(30))
    await asyncio.sleep(0)
    pool.wake()
    assert await poll


async def test_waiting_for_groups(pool, task, report):
    for position in (0, 1):
        pool.open_group(task(), kind="train", size=1, position=position)
    first, second = pool.acquire("w", 2)
    assert not await pool.wait_groups(1, 0.0)
    waiter = asyncio.create_task(pool.wait_groups(2, 30))
    report(pool, first)
    await asyncio.sleep(0)
    assert not waiter.done()
    report(pool, second)
    assert await waiter
    assert await pool.wait_groups(2, 0.0)


async def test_waiting_for_an_evaluation(pool, task, report):
    ids = [pool.open_group(task(), kind="eval", size=1, position=None) for _ in range(2)]
    first, second = pool.acquire("w", 2)
    report(pool, first)
    assert not await pool.wait_eval(ids, 0.0)
    waiter = asyncio.create_task(pool.wait_eval(ids, 30))
    await asyncio.sleep(0)
    report(pool, second)
    assert await waiter
    assert len(pool.take_eval(ids)) == 2


def test_status_counts_what_is_where(pool, task, report, clock):
    for position in (0, 1):
        pool.open_group(task(), kind="train", size=2, position=position)
    first, _, third = pool.acquire("w", 3)
    report(pool, first)
    pool.release(third.lease_id, 1)
    pool.acquire("v", 1)
    status = pool.status()
    assert (status.num_open, status.num_ready, status.num_waiting, status.num_leased) == (2, 0, 1, 2)
    assert {worker.worker_id: worker.leases for worker in status.workers} == {"w": 1, "v": 1}
    assert status.counters["rollouts_finished"] == 1
    assert status.counters["leases_released"] == 1
