"""Tasks that kill their attempts are offered no more; outages are no reason."""

import pytest


@pytest.fixture
def two(make_pool, task):
    """A pool that grants two attempts, with the tasks `killer` and `other`."""
    pool = make_pool(max_attempts=2)
    for position, name in enumerate(("killer", "other")):
        pool.open_group(task(name), kind="train", size=2, position=position)
    return pool


def lose(pool, report, lease, *errors):
    """Lose a rollout's attempts to infrastructure, one by one."""
    for number, error in enumerate(errors):
        report(pool, lease, "infrastructure", error=error)
        if number + 1 < len(errors):
            [lease] = pool.acquire("w", 1)


def test_a_task_that_kills_its_attempts_while_others_finish_is_quarantined(two, report, make_pool):
    killer, _, other, _ = two.acquire("w", 4)
    report(two, killer, "infrastructure", error="OOM 1")
    report(two, other)
    [again] = two.acquire("w", 1)
    report(two, again, "infrastructure", error="OOM 2")
    assert two.quarantined == {"killer": ["OOM 1", "OOM 2"]}
    assert two.counters["tasks_quarantined"] == 1
    assert two.status().quarantined == {"killer": "OOM 2"}
    events = [event.detail for event in two.ledger.events() if event.kind == "task_quarantined"]
    assert events == [{"task_id": "killer", "rollout_id": "g1.0"}]
    assert two.ledger.group("g1").state == "failed"
    assert make_pool(max_attempts=2).quarantined == {"killer": ["OOM 1", "OOM 2"]}


def test_an_outage_condemns_no_task(two, report):
    killer, sibling, other, _ = two.acquire("w", 4)
    report(two, other)
    report(two, sibling)
    lose(two, report, killer, "network", "network")
    assert two.quarantined == {}, "nothing of another task finished since its first attempt was lost"


def test_rollouts_of_the_same_task_say_nothing_of_an_outage(two, report):
    killer, sibling, _, _ = two.acquire("w", 4)
    report(two, killer, "infrastructure")
    report(two, sibling)
    report(two, two.acquire("w", 1)[0], "infrastructure")
    assert two.quarantined == {}


def test_another_task_counts_however_much_of_the_same_task_finished_after_it(make_pool, task, report):
    pool = make_pool(max_attempts=2)
    pool.open_group(task("killer"), kind="train", size=3, position=0)
    pool.open_group(task("other"), kind="train", size=2, position=1)
    killer, *siblings, other, _ = pool.acquire("w", 5)
    report(pool, killer, "infrastructure")
    report(pool, other, "failed")
    for sibling in siblings:
        report(pool, sibling)
    report(pool, pool.acquire("w", 1)[0], "infrastructure")
    assert list(pool.quarantined) == ["killer"]


def test_silence_condemns_as_well(two, report, clock):
    _, _, other, _ = two.acquire("w", 4)
    clock.now += 20.0
    two.heartbeat("w", [other.lease_id])
    clock.now += 11.0
    two.expire()
    report(two, other)
    two.acquire("w", 1)
    clock.now += 31.0
    two.expire()
    [errors] = two.quarantined.values()
    assert [error.split(",")[1] for error in errors] == [" attempt 1", " attempt 2"]


def test_errors_from_before_a_restart_are_told_and_others_have_to_finish_after_it(two, report, make_pool):
    killer, _, other, _ = two.acquire("w", 4)
    report(two, killer, "infrastructure", error="before")
    report(two, other)
    pool = make_pool(max_attempts=2)
    killer, _, other = pool.acquire("w", 3)
    assert (killer.rollout_id, other.rollout_id) == ("g1.0", "g2.1")
    report(pool, other)
    report(pool, killer, "infrastructure", error="after")
    assert pool.quarantined == {"killer": ["before", "after"]}


def test_attempts_that_were_spent_on_the_agent_condemn_nothing(make_pool, task, report):
    pool = make_pool(max_attempts=2, on_failed="retry")
    for position, name in enumerate(("flaky", "other")):
        pool.open_group(task(name), kind="train", size=2, position=position)
    flaky, _, *others = pool.acquire("w", 4)
    assert report(pool, flaky, "failed").retried
    report(pool, others[0])
    [again] = pool.acquire("w", 1)
    assert not report(pool, again, "infrastructure").retried
    pool.open_group(task("flaky"), kind="train", size=1, position=2)
    [flaky] = pool.acquire("w", 1)
    assert report(pool, flaky, "infrastructure").retried
    report(pool, others[1])
    assert report(pool, pool.acquire("w", 1)[0], "failed").group is not None
    assert pool.quarantined == {}


def test_an_evaluation_row_is_never_quarantined(make_pool, task, report):
    pool = make_pool(max_attempts=1)
    pool.open_group(task("killer"), kind="eval", size=1, position=None)
    pool.open_group(task("other"), kind="train", size=1, position=0)
    killer, other = pool.acquire("w", 2)
    report(pool, other)
    report(pool, killer, "infrastructure")
    assert pool.quarantined == {}
