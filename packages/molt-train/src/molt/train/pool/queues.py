"""The two queues of the pool that others wait on: rollouts that wait for workers, and groups that wait to be used."""

import asyncio
import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from molt.train.pool.rows import GroupKind, GroupRow, RolloutRow
from molt.train.records.rollout import Group

Labels = frozenset[tuple[str, str]]
"""Pairs of name and value."""


class Offer(NamedTuple):
    """A member of a group that waits for a worker. Offers sort by age: no two have the same first two fields."""

    seq: int
    """Of the group."""
    member: int
    group_id: str
    rollout_id: str
    labels: Labels
    """What its worker has to have."""


class OfferQueue:
    """Rollouts that wait for workers, those of the oldest groups first, whatever attempt they are at.

    Those that need the same labels are one list, sorted, so that a worker finds its own without looking at others.
    """

    def __init__(self) -> None:
        self._by_labels: dict[Labels, list[Offer]] = {}
        """No list is empty."""
        self._changed = asyncio.Event()
        self._num_wakes = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_labels.values()))

    def count_by_labels(self) -> dict[Labels, int]:
        """How many rollouts wait, by the labels that they need."""
        return {labels: len(offers) for labels, offers in self._by_labels.items()}

    def add(self, group: GroupRow, rows: Iterable[RolloutRow]) -> None:
        """Offer those members of the group that wait."""
        for offer in _offers(group, rows):
            bisect.insort(self._by_labels.setdefault(offer.labels, []), offer)
        self._notify()

    def oldest(self, n: int, labels: Mapping[str, str] | None = None) -> list[Offer]:
        """Up to `n` offers for a worker with these labels. They stay until `remove`."""
        has = frozenset((labels or {}).items())
        queues = [offers for needed, offers in self._by_labels.items() if needed <= has]
        if len(queues) == 1:
            return queues[0][:n]
        return list(itertools.islice(heapq.merge(*queues), n))

    def remove(self, offers: Iterable[Offer]) -> None:
        """These no longer wait."""
        for offer in offers:
            queue = self._by_labels[offer.labels]
            del queue[bisect.bisect_left(queue, offer)]
            if not queue:
                del self._by_labels[offer.labels]

    def withdraw(self, group: GroupRow, rows: Iterable[RolloutRow]) -> None:
        """Those members of the group that wait do so no longer."""
        self.remove(_offers(group, rows))

    async def wait(self, timeout_s: float, labels: Mapping[str, str] | None = None) -> bool:
        """Wait until there is an offer for a worker with these labels, or `wake`.

        False when `timeout_s` seconds passed first.
        """
        woken = self._num_wakes
        try:
            async with asyncio.timeout(timeout_s):
                while not self.oldest(1, labels) and self._num_wakes == woken:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """Let everyone in `wait` look again."""
        self._num_wakes += 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()


class CompleteGroups:
    """Complete groups, until someone takes them: train groups the oldest first, evaluations by their ids."""

    def __init__(self) -> None:
        self._by_kind: dict[GroupKind, dict[str, Group]] = {"train": {}, "eval": {}}
        self._changed = asyncio.Event()

    def count(self, kind: GroupKind) -> int:
        """Groups that wait to be taken."""
        return len(self._by_kind[kind])

    def add(self, kind: GroupKind, group: Group) -> None:
        """A group is complete."""
        self._by_kind[kind][group.group_id] = group
        self._changed.set()
        self._changed.clear()

    def oldest(self, n: int) -> list[str]:
        """The ids of the `n` train groups with the oldest tokens, among equals of those that completed first.

        They are the next to become too old to be trained: what took long to complete must not wait behind what did not.
        Raises ValueError when there are fewer than `n`.
        """
        groups = self._by_kind["train"]
        if n > len(groups):
            raise ValueError(f"{n} groups were asked for, but {len(groups)} are complete")
        return sorted(groups, key=lambda group_id: _age_order(groups[group_id]))[:n]

    def older_than(self, version: int) -> list[str]:
        """The ids of the train groups that hold a token of a policy version before `version`."""
        return [
            group.group_id
            for group in self._by_kind["train"].values()
            if group.oldest_version is not None and group.oldest_version < version
        ]

    def remove(self, kind: GroupKind, group_ids: Sequence[str]) -> list[Group]:
        """Take groups out; those that are not here are passed over."""
        found = (self._by_kind[kind].pop(group_id, None) for group_id in group_ids)
        return [group for group in found if group is not None]

    async def wait_count(self, n: int, timeout_s: float) -> bool:
        """Wait for `n` train groups. False when `timeout_s` seconds passed first."""
        return await self._wait(lambda: len(self._by_kind["train"]) >= n, timeout_s)

    async def wait_evals(self, group_ids: Sequence[str], timeout_s: float) -> bool:
        """Wait for all these evaluation groups. False when `timeout_s` seconds passed first."""
        wanted = frozenset(group_ids)
        return await self._wait(lambda: wanted <= self._by_kind["eval"].keys(), timeout_s)

    async def _wait(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_there():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


def _offers(group: GroupRow, rows: Iterable[RolloutRow]) -> list[Offer]:
    labels = frozenset(group.task.labels.items())
    return [
        Offer(group.seq, row.member, row.group_id, row.rollout_id, labels) for row in rows if row.state == "waiting"
    ]


def _age_order(group: Group) -> float:
    """Its oldest policy version; a group in which nothing was sampled never gets too old."""
    return math.inf if group.oldest_version is None else group.oldest_version
