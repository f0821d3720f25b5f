"""Groups that are collected from sessions no worker drives."""

import pytest

from molt.train.records.rollout import Outcome

WAIT_S = 100.0


@pytest.fixture
def finish(task, recording):
    """Finish a session under a key, in a pool."""
    numbers = iter(range(1000))

    def run(pool, key, kind="completed", *, size=2):
        outcome = Outcome(kind=kind, reward=1.0 if kind in ("completed", "truncated") else None, error="why")
        session = recording(f"s{next(numbers)}")
        return pool.collect(key, task=task(key), size=size, outcome=outcome, recording=session)

    return run


def test_a_group_that_does_not_fill_in_time_fails_and_its_key_starts_anew(make_pool, finish, clock):
    pool = make_pool(group_wait_s=WAIT_S)
    finish(pool, "k", size=3)
    clock.now += WAIT_S - 1
    finish(pool, "k", size=3)
    finish(pool, "young")
    pool.expire()
    assert pool.status().groups == {"open": 2}
    clock.now += 1
    pool.expire()
    group = pool.ledger.group("g1")
    assert (group.state, group.reason) == ("failed", "2 of 3 sessions finished within 100 s (pool.group_wait_s)")
    assert (pool.counters["groups_unfilled"], pool.counters["groups_failed"]) == (1, 1)
    assert finish(pool, "k", size=1).group.group_id == "g3"
    assert finish(pool, "young").group.group_id == "g2"


def test_the_wait_starts_anew_with_the_server(make_pool, finish, clock):
    pool = make_pool(group_wait_s=WAIT_S)
    finish(pool, "k")
    clock.now += WAIT_S - 1
    pool = make_pool(group_wait_s=WAIT_S)
    clock.now += WAIT_S - 1
    pool.expire()
    assert pool.status().groups == {"open": 1}
    clock.now += 1
    pool.expire()
    assert pool.status().groups == {"failed": 1}


def test_infrastructure_takes_no_place_whatever_the_policy(make_pool, finish):
    pool = make_pool(on_infrastructure="fail_group")
    finish(pool, "k")
    verdict = finish(pool, "k", "infrastructure")
    assert (verdict.accepted, verdict.group, pool.counters["sessions_lost_to_infrastructure"]) == (True, None, 1)
    assert len(finish(pool, "k").group.rollouts) == 2


def test_nobody_would_run_it_again_so_retry_is_mask(make_pool, finish):
    pool = make_pool(on_failed="retry")
    assert not finish(pool, "k", "failed").retried
    assert [r.outcome.kind for r in finish(pool, "k").group.rollouts] == ["failed", "completed"]


def test_fail_group_fails_it(make_pool, finish):
    pool = make_pool(on_timeout="fail_group")
    finish(pool, "k")
    verdict = finish(pool, "k", "timeout", size=2)
    assert (verdict.accepted, verdict.group) == (True, None)
    assert pool.ledger.group("g1").reason == verdict.reason == "rollout g1.1 ended as 'timeout': why"
    assert finish(pool, "k", size=1).group.group_id == "g2"


def test_an_old_group_of_sessions_is_dropped_as_stale(pool, finish):
    finish(pool, "k")
    [dropped] = pool.discard_stale(1)
    assert (dropped.key, dropped.position, dropped.reason) == ("k", None, "stale")
    assert (pool.num_open, pool.num_ready) == (0, 0)
    finish(pool, "k")
    assert pool.ledger.group("g2").state == "open"
