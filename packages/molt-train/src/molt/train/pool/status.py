"""The pool at a glance."""

import msgspec

from molt.train.pool.books import Books
from molt.train.pool.rows import GroupState
from molt.train.pool.workers import WorkerRow, WorkerTable


class Unmatched(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that wait for a worker with labels that none has all of."""

    labels: dict[str, str]
    """What they need."""
    missing: dict[str, str]
    """What the worker that comes closest lacks."""
    num_waiting: int


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at a glance."""

    groups: dict[GroupState, int]
    """Groups of the whole run, by state."""
    num_open: int
    """Train groups that workers are still to finish."""
    num_ready: int
    """Complete train groups that wait to be taken."""
    num_waiting: int
    """Rollouts that wait for a worker."""
    num_leased: int
    oldest_lease_s: float | None
    """Seconds since the oldest live lease was granted."""
    workers: tuple[WorkerRow, ...]
    """Those that were heard of lately."""
    unmatched: tuple[Unmatched, ...]
    """Rollouts that no worker can take."""
    quarantined: dict[str, str]
    """Tasks that are offered no more, with the last error of each."""
    counters: dict[str, int]
    """How often each named thing happened since the server started."""


def status_of(books: Books, workers: WorkerTable) -> PoolStatus:
    """What the books and the workers come to."""
    return PoolStatus(
        groups=books.ledger.count_groups(),
        num_open=books.num_driven,
        num_ready=books.complete.count("train"),
        num_waiting=len(books.offers),
        num_leased=len(books.leases),
        oldest_lease_s=books.leases.oldest_age_s(),
        workers=tuple(workers.rows(books.leases.by_worker)),
        unmatched=_unmatched(books, workers),
        quarantined={task: errors[-1] if errors else "" for task, errors in books.quarantine.tasks.items()},
        counters=dict(books.counters),
    )


def _unmatched(books: Books, workers: WorkerTable) -> tuple[Unmatched, ...]:
    found: list[Unmatched] = []
    for needed, num_waiting in books.offers.count_by_labels().items():
        labels = dict(sorted(needed))
        missing = workers.missing(labels)
        if missing:
            found.append(Unmatched(labels=labels, missing=missing, num_waiting=num_waiting))
    return tuple(found)
