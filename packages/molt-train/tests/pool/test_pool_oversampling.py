"""Groups with more members than they need: the first that count make the group, the rest are cut."""

import pytest


@pytest.fixture
def five(make_pool, task):
    """A pool with a group of three that five rollouts run for."""
    pool = make_pool()
    pool.open_group(task(), kind="train", size=3, position=0, extra=2)
    return pool


def test_the_first_that_count_make_the_group_in_member_order(five, report):
    leases = five.acquire("w", 5)
    report(five, leases[4], reward=4.0)
    report(five, leases[1], "failed")
    report(five, leases[0], reward=0.0)
    assert five.num_ready == 0, "a masked member does not count"
    group = report(five, leases[3], reward=3.0).group
    wanted = [(0, "completed"), (1, "failed"), (3, "completed"), (4, "completed")]
    assert [(int(r.rollout_id[-1]), r.outcome.kind) for r in group.rollouts] == wanted
    states = [row.state for row in five.ledger.rollouts("g1")]
    assert states == ["finished", "finished", "cut", "finished", "finished"]


def test_a_straggler_is_cut_and_its_late_report_is_kept_without_counting(five, report, make_pool):
    leases = five.acquire("w", 4)
    five.attach_session(leases[3].lease_id, "s3")
    for lease in leases[:3]:
        report(five, lease)
    assert [(c.lease_id, c.worker_id, c.session_id) for c in five.take_cut()] == [(leases[3].lease_id, "w", "s3")]
    assert five.acquire("w", 9) == [], "the fifth member never started"
    assert five.counters["rollouts_cut"] == 2
    assert five.check(leases[3].lease_id, 1) == "the lease is over (cut), and attempt 1 of the rollout with it"
    verdict = report(five, leases[3], reward=9.0)
    assert (verdict.accepted, five.counters["results_refused"]) == (False, 1)
    assert five.ledger.lease(leases[3].lease_id).state == "late"
    [kept] = [r for r in five.ledger.results() if not r.counted]
    assert kept.outcome.reward == 9.0
    pool = make_pool()
    assert pool.acquire("w", 9) == []
    assert [len(group.rollouts) for group in pool.take(1)] == [3]


def test_a_group_goes_on_with_what_it_has_once_too_few_can_count(five, report):
    leases = five.acquire("w", 5)
    for lease in leases[:3]:
        report(five, lease, "failed")
    assert report(five, leases[3]).group is None
    group = report(five, leases[4]).group
    assert [r.outcome.kind for r in group.rollouts] == ["failed"] * 3 + ["completed"] * 2
    assert five.counters["rollouts_cut"] == 0


def test_members_that_count_by_policy_fill_the_group(make_pool, task, report):
    pool = make_pool(on_failed="train")
    pool.open_group(task(), kind="train", size=2, position=0, extra=1)
    leases = pool.acquire("w", 3)
    report(pool, leases[0], "failed")
    assert report(pool, leases[1], "failed").group is not None


def test_a_member_that_waits_for_another_attempt_can_be_cut(five, report):
    leases = five.acquire("w", 5)
    assert report(five, leases[0], "infrastructure").retried
    five.release(leases[1].lease_id, 1)
    for lease in leases[2:4]:
        report(five, lease)
    assert report(five, leases[4]).group is not None
    assert (five.status().num_waiting, five.status().num_leased, five.counters["rollouts_cut"]) == (0, 0, 2)
    assert five.take_cut() == [], "nothing of it ran"


def test_an_oversampled_group_fills_up_over_a_restart(five, report, make_pool):
    leases = five.acquire("w", 5)
    report(five, leases[2])
    pool = make_pool()
    again = pool.acquire("w", 9)
    assert [a.member for a in again] == [0, 1, 3, 4]
    report(pool, again[0])
    assert len(report(pool, again[1]).group.rollouts) == 3
    assert len(pool.take_cut()) == 2


def test_a_group_has_members(pool, task):
    with pytest.raises(ValueError, match="group size is 0 and 0 more"):
        pool.open_group(task(), kind="train", size=0, position=0)
    with pytest.raises(ValueError, match="group size is 2 and -1 more"):
        pool.open_group(task(), kind="train", size=2, position=0, extra=-1)
