"""What each outcome does to rollout and group, by policy."""

import pytest

from molt.train.config import PoolConfig
from molt.train.pool.outcomes import consequence_of

AGENT_OUTCOMES = ("failed", "timeout", "truncated")


@pytest.mark.parametrize("outcome", AGENT_OUTCOMES)
@pytest.mark.parametrize(
    ("policy", "may_retry", "wanted"),
    [
        ("train", True, "finish"),
        ("mask", True, "finish"),
        ("retry", True, "retry"),
        ("retry", False, "finish"),
        ("fail_group", True, "fail_group"),
        ("fail_group", False, "fail_group"),
    ],
)
def test_a_policy_decides_about_an_outcome_of_its_own_kind_only(outcome, policy, may_retry, wanted):
    settings = PoolConfig(**{f"on_{outcome}": policy})
    assert consequence_of(outcome, group="train", may_retry=may_retry, settings=settings) == wanted
    for other in ("completed", *(kind for kind in AGENT_OUTCOMES if kind != outcome)):
        assert consequence_of(other, group="train", may_retry=True, settings=settings) == "finish"


@pytest.mark.parametrize(
    ("policy", "may_retry", "wanted"),
    [
        ("retry", True, "retry"),
        ("retry", False, "fail_group"),
        ("mask", True, "finish"),
        ("fail_group", True, "fail_group"),
    ],
)
def test_infrastructure_that_is_spent_fails_the_group(policy, may_retry, wanted):
    settings = PoolConfig(on_infrastructure=policy)
    assert consequence_of("infrastructure", group="train", may_retry=may_retry, settings=settings) == wanted


@pytest.mark.parametrize("policy", ["mask", "retry", "fail_group"])
def test_an_evaluation_measures_failures_and_retries_outages_whatever_the_policies(policy):
    settings = PoolConfig(on_failed=policy, on_timeout=policy, on_truncated=policy, on_infrastructure=policy)
    for outcome in ("completed", *AGENT_OUTCOMES):
        assert consequence_of(outcome, group="eval", may_retry=True, settings=settings) == "finish"
    assert consequence_of("infrastructure", group="eval", may_retry=True, settings=settings) == "retry"
    assert consequence_of("infrastructure", group="eval", may_retry=False, settings=settings) == "finish"


def test_a_retried_failure_is_kept_and_only_the_last_attempt_counts(make_pool, task, report):
    pool = make_pool(on_failed="retry")
    pool.open_group(task(), kind="train", size=1, position=0)
    verdict = report(pool, pool.acquire("w", 1)[0], "failed", error="KeyError: 'x'")
    assert (verdict.accepted, verdict.retried, verdict.group) == (True, True, None)
    assert verdict.reason == "failed: KeyError: 'x'; attempt 2 follows"
    [again] = pool.acquire("w", 1)
    group = report(pool, again, reward=2.0).group
    assert [(r.attempt, r.outcome.reward) for r in group.rollouts] == [(2, 2.0)]
    assert [(r.counted, r.outcome.kind) for r in pool.ledger.results()] == [(False, "failed"), (True, "completed")]


def test_a_failure_whose_attempts_are_spent_is_a_member_of_its_group(make_pool, task, report):
    pool = make_pool(on_timeout="retry", max_attempts=2)
    pool.open_group(task(), kind="train", size=2, position=0)
    first, second = pool.acquire("w", 2)
    report(pool, second)
    report(pool, first, "timeout")
    group = report(pool, pool.acquire("w", 1)[0], "timeout").group
    assert [(r.attempt, r.outcome.kind) for r in group.rollouts] == [(2, "timeout"), (1, "completed")]


def test_fail_group_ends_the_group_at_once_and_what_runs_of_it_is_cut(make_pool, task, report):
    pool = make_pool(on_failed="fail_group")
    pool.open_group(task(), kind="train", size=4, position=0)
    done, fails, runs = pool.acquire("w", 3)
    pool.attach_session(runs.lease_id, "s-runs")
    report(pool, done)
    verdict = report(pool, fails, "failed", error="boom")
    reason = "rollout g1.1 ended as 'failed': boom"
    assert (verdict.accepted, verdict.reason, verdict.group) == (True, reason, None)
    [group] = pool.ledger.groups()
    assert (group.state, group.reason) == ("failed", reason)
    assert [row.state for row in pool.ledger.rollouts("g1")] == ["finished", "finished", "cut", "cut"]
    assert pool.acquire("w", 9) == [], "the member that waited is offered no more"
    assert pool.heartbeat("w", [runs.lease_id]) == [runs.lease_id]
    assert [(cut.lease_id, cut.session_id) for cut in pool.take_cut()] == [(runs.lease_id, "s-runs")]
    assert pool.take_cut() == []
    assert (pool.counters["rollouts_cut"], pool.counters["leases_cut"], pool.counters["groups_failed"]) == (2, 1, 1)
    assert (pool.num_open, pool.num_ready) == (0, 0)


def test_masked_infrastructure_leaves_the_group_to_the_others(make_pool, task, report, clock):
    pool = make_pool(on_infrastructure="mask")
    pool.open_group(task(), kind="train", size=3, position=0)
    first, second, _ = pool.acquire("w", 3)
    report(pool, first, "infrastructure", error="sandbox gone")
    report(pool, second)
    clock.now += 31.0
    [expired] = pool.expire()
    assert not expired.retried
    [group] = pool.take(1)
    assert [r.outcome.kind for r in group.rollouts] == ["infrastructure", "completed", "infrastructure"]


def test_two_leases_that_expire_together_end_their_group_once(make_pool, task, clock):
    pool = make_pool(on_infrastructure="fail_group")
    pool.open_group(task(), kind="train", size=2, position=0)
    first, second = pool.acquire("w", 2)
    clock.now += 31.0
    assert [expired.lease_id for expired in pool.expire()] == [first.lease_id]
    assert [cut.lease_id for cut in pool.take_cut()] == [second.lease_id]
    assert pool.ledger.lease(first.lease_id).state == "expired"
    assert pool.ledger.lease(second.lease_id).state == "cut"
    assert pool.status().groups == {"failed": 1}


def test_a_group_of_which_nothing_counts_is_complete_all_the_same(make_pool, task, report):
    """Whoever forms windows drops it with a reason."""
    pool = make_pool()
    pool.open_group(task(), kind="train", size=2, position=0)
    first, second = pool.acquire("w", 2)
    report(pool, first, "failed")
    assert [r.outcome.kind for r in report(pool, second, "timeout").group.rollouts] == ["failed", "timeout"]


def test_an_evaluation_reports_the_members_that_it_lost(make_pool, task, report):
    pool = make_pool(max_attempts=2, on_failed="fail_group", on_infrastructure="fail_group")
    group_id = pool.open_group(task(), kind="eval", size=2, position=None)
    first, second = pool.acquire("w", 2)
    report(pool, second, "failed")
    assert report(pool, first, "infrastructure").retried
    report(pool, pool.acquire("w", 1)[0], "infrastructure", error="gone")
    [group] = pool.take_eval([group_id])
    assert [(r.attempt, r.outcome.kind) for r in group.rollouts] == [(2, "infrastructure"), (1, "failed")]
    assert not pool.quarantined
