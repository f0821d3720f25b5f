"""What is too old is dropped before anyone works on it."""

import pytest


@pytest.fixture
def ages(pool, task, report):
    """A pool with groups of versions 3, 5 and none complete, and groups of versions 3, 5 and none open."""
    for position, (version, size) in enumerate([(3, 1), (5, 1), (3, 3), (5, 3), (None, 3)]):
        pool.open_group(task(str(position)), kind="train", size=size, position=position)
        [lease] = pool.acquire("w", 1)
        if version is None:
            pool.release(lease.lease_id, 1)
        else:
            report(pool, lease, version=version)
        pool.acquire("w", size - 1 if version else size)
    return pool


def test_groups_with_a_token_older_than_the_bound_are_dropped_open_or_complete(ages):
    dropped = ages.discard_stale(4)
    assert [(g.group_id, g.state, g.reason, g.task.task_id, g.position) for g in dropped] == [
        ("g3", "dropped", "stale", "2", 2),
        ("g1", "dropped", "stale", "0", 0),
    ]
    assert {g.group_id: g.state for g in ages.ledger.groups()} == {
        "g1": "dropped",
        "g2": "complete",
        "g3": "dropped",
        "g4": "open",
        "g5": "open",
    }
    assert (ages.num_open, ages.num_ready) == (2, 1)
    assert [c.lease_id.startswith("g3.") for c in ages.take_cut()] == [True, True]
    assert (ages.counters["groups_stale"], ages.counters["groups_dropped"], ages.counters["rollouts_cut"]) == (2, 2, 2)
    assert ages.discard_stale(4) == []


def test_a_version_equal_to_the_bound_is_young_enough(ages):
    assert ages.discard_stale(3) == []


def test_a_group_that_was_taken_is_left_to_its_taker(ages):
    [taken] = ages.take(1)
    assert taken.group_id == "g1"
    assert [g.group_id for g in ages.discard_stale(4)] == ["g3"]
    assert ages.ledger.group("g1").state == "complete"


def test_evaluations_do_not_get_too_old(pool, task, report):
    pool.open_group(task(), kind="eval", size=2, position=None)
    report(pool, pool.acquire("w", 1)[0], version=0)
    assert pool.discard_stale(100) == []


def test_what_was_dropped_stays_so_over_a_restart(ages, make_pool):
    ages.discard_stale(4)
    pool = make_pool()
    assert (pool.num_open, pool.num_ready) == (2, 1)
    assert {a.group_id for a in pool.acquire("w", 99)} == {"g4", "g5"}
