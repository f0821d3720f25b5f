"""Which workers there are: what they can run, and when they were last heard of."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import msgspec

SILENT_S = 150.0
"""Seconds without a word after which a worker that holds no lease is forgotten: two of the longest polls, and some."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker at a glance."""

    worker_id: str
    capacity: int | None
    """Rollouts that it runs at once; None until it has said so."""
    labels: dict[str, str]
    leases: int
    """Leases that it holds."""
    seen_s: float
    """Seconds since it was last heard of."""


@dataclass(slots=True)
class _Worker:
    seen: float
    """When it was last heard of, on the table's clock."""
    capacity: int | None = None
    labels: dict[str, str] = field(default_factory=dict[str, str])


class WorkerTable:
    """The workers that were heard of lately.

    `clock` gives seconds and must never go back.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def seen(self, worker_id: str, *, capacity: int | None = None, labels: Mapping[str, str] | None = None) -> None:
        """A worker gave a sign of life, and said what it can run; None: as it said before."""
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(seen=0.0)
        worker.seen = self._clock()
        if capacity is not None:
            worker.capacity = capacity
        if labels is not None:
            worker.labels = dict(labels)

    def forget(self, worker_id: str) -> None:
        """A worker has said that it ends, or is gone. An unknown one is passed over."""
        self._workers.pop(worker_id, None)

    def forget_silent(self, *, holders: Container[str]) -> list[str]:
        """Forget the workers that were silent for `SILENT_S`, except those that hold leases. Returns them."""
        limit = self._clock() - SILENT_S
        silent = [name for name, worker in self._workers.items() if worker.seen <= limit and name not in holders]
        for worker_id in silent:
            del self._workers[worker_id]
        return silent

    def missing(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels that the worker which comes closest lacks: none when a worker has them all."""
        lacking = (
            {name: value for name, value in labels.items() if worker.labels.get(name) != value}
            for worker in self._workers.values()
        )
        return min(lacking, key=len, default=dict(labels))

    def rows(self, leases: Mapping[str, int]) -> list[WorkerRow]:
        """Every worker in the order of arrival. `leases`: how many each holds."""
        now = self._clock()
        return [
            WorkerRow(
                worker_id=worker_id,
                capacity=worker.capacity,
                labels=dict(worker.labels),
                leases=leases.get(worker_id, 0),
                seen_s=now - worker.seen,
            )
            for worker_id, worker in self._workers.items()
        ]
