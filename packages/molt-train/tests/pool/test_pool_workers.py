"""Labels, and the table of workers."""

import asyncio

import pytest

from molt.train.pool.workers import SILENT_S, WorkerTable


@pytest.fixture
def mixed(pool, task):
    """A pool with tasks for anyone, for workers with a GPU, and for those with a GPU and a browser."""
    for position, labels in enumerate(({}, {"gpu": "a"}, {"gpu": "a", "browser": "yes"}, {"gpu": "b"}, {})):
        pool.open_group(task(str(position), **labels), kind="train", size=1, position=position)
    return pool


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (None, ["0", "4"]),
        ({"gpu": "a"}, ["0", "1", "4"]),
        ({"gpu": "b", "browser": "yes"}, ["0", "3", "4"]),
        ({"gpu": "a", "browser": "yes", "more": "than enough"}, ["0", "1", "2", "4"]),
        ({"browser": "yes"}, ["0", "4"]),
    ],
)
def test_a_worker_is_given_what_it_has_the_labels_for_the_oldest_first(mixed, labels, wanted):
    assert [a.task.task_id for a in mixed.acquire("w", 9, labels)] == wanted
    assert mixed.acquire("w", 9, labels) == []


def test_capacity_holds_over_all_labels_together(mixed):
    gpu = {"gpu": "a", "browser": "yes"}
    assert [a.task.task_id for a in mixed.acquire("w", 3, gpu)] == ["0", "1", "2"]
    assert [a.task.task_id for a in mixed.acquire("w", 3, gpu)] == ["4"]


def test_labels_survive_a_restart(make_pool, task):
    pool = make_pool()
    pool.open_group(task("x", gpu="a"), kind="train", size=1, position=0)
    pool = make_pool()
    assert pool.acquire("w", 1) == []
    assert [a.task.labels for a in pool.acquire("w", 1, {"gpu": "a"})] == [{"gpu": "a"}]


async def test_a_long_poll_waits_for_something_that_the_worker_can_run(pool, task):
    polls = [asyncio.create_task(pool.wait_offers(30, labels)) for labels in (None, {"gpu": "a"})]
    await asyncio.sleep(0)
    pool.open_group(task("x", gpu="a"), kind="train", size=1, position=0)
    assert await polls[1]
    await asyncio.sleep(0)
    assert not polls[0].done()
    assert not await pool.wait_offers(0.0)
    pool.wake()
    assert await polls[0]


def test_status_names_what_no_worker_can_take_and_why(mixed):
    def unmatched():
        return [(u.labels, u.missing, u.num_waiting) for u in mixed.status().unmatched]

    both, other = {"gpu": "a", "browser": "yes"}, {"gpu": "b"}
    assert unmatched() == [({"gpu": "a"}, {"gpu": "a"}, 1), (both, both, 1), (other, other, 1)]
    mixed.acquire("w", 1, {"gpu": "a"})
    assert unmatched() == [(both, {"browser": "yes"}, 1), (other, other, 1)]
    mixed.workers.forget("w")
    mixed.acquire("v", 1, {"gpu": "b", "browser": "yes"})
    assert unmatched() == [({"gpu": "a"}, {"gpu": "a"}, 1), (both, {"gpu": "a"}, 1)]


def test_status_shows_workers_with_what_they_hold(pool, task, report, clock):
    pool.open_group(task(), kind="train", size=3, position=0)
    first, _ = pool.acquire("w", 2, {"gpu": "a"})
    clock.now += 5.0
    pool.acquire("v", 4)
    status = pool.status()
    assert [(w.worker_id, w.capacity, w.labels, w.leases, w.seen_s) for w in status.workers] == [
        ("w", 2, {"gpu": "a"}, 2, 5.0),
        ("v", 4, {}, 1, 0.0),
    ]
    assert (status.oldest_lease_s, status.groups) == (5.0, {"open": 1})
    report(pool, first)
    pool.heartbeat("w", [])
    pool.acquire("w", 1, {"gpu": "a"})
    assert [(w.capacity, w.leases, w.seen_s) for w in pool.status().workers] == [(2, 1, 0.0), (4, 1, 0.0)]


def test_a_silent_worker_is_forgotten_but_not_while_it_holds_leases(pool, task, clock):
    pool.open_group(task(), kind="train", size=1, position=0)
    [held] = pool.acquire("holds", 1)
    pool.acquire("idle", 1)
    clock.now += SILENT_S
    pool.heartbeat("holds", [held.lease_id])
    pool.expire()
    assert [w.worker_id for w in pool.status().workers] == ["holds"]
    assert pool.counters["workers_lost"] == 1
    clock.now += SILENT_S
    pool.expire()
    assert len(pool.workers) == 0, "its lease expired, too"


def test_a_heartbeat_changes_nothing_of_what_a_worker_said(clock):
    table = WorkerTable(clock=clock)
    table.seen("w", capacity=3, labels={"gpu": "a"})
    clock.now += 1.0
    table.seen("w")
    table.seen("unknown to this server")
    assert [(w.capacity, w.labels, w.seen_s) for w in table.rows({})] == [(3, {"gpu": "a"}, 0.0), (None, {}, 0.0)]
    table.forget("w")
    table.forget("w")
    assert "w" not in table
