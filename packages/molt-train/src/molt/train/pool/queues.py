"""The two queues of the pool that others wait on: rollouts that wait for workers, and groups that wait to be used."""

import asyncio
import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from molt.train.pool.rows import GroupKind, RolloutRow
from molt.train.records.rollout import Group


class Offer(NamedTuple):
    """A member of a group that waits for a worker. Offers sort by age."""

    seq: int
    """Of the group."""
    member: int
    group_id: str
    rollout_id: str


class OfferQueue:
    """Rollouts that wait for workers, those of the oldest groups first, whatever attempt they are at."""

    def __init__(self) -> None:
        self._offers: list[Offer] = []
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, seq: int, rows: Iterable[RolloutRow]) -> None:
        """Offer those of the group number `seq`'s members that wait."""
        for row in rows:
            if row.state == "waiting":
                bisect.insort(self._offers, Offer(seq, row.member, row.group_id, row.rollout_id))
        self.wake()

    def oldest(self, n: int) -> list[Offer]:
        """Up to `n` offers. They stay until `remove`."""
        return self._offers[:n]

    def remove(self, n: int) -> None:
        """The oldest `n` have been leased."""
        del self._offers[:n]

    async def wait(self, timeout_s: float) -> bool:
        """Wait until something waits for a worker, or `wake`. False when `timeout_s` seconds passed first."""
        if self._offers:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """Let everyone in `wait` look again."""
        self._changed.set()
        self._changed.clear()


class CompleteGroups:
    """Complete groups, until someone takes them: train groups in the order of completion, evaluations by their ids."""

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

    def first(self, n: int) -> list[str]:
        """The ids of the `n` train groups that completed first. Raises ValueError when there are fewer."""
        ids = list(self._by_kind["train"])
        if n > len(ids):
            raise ValueError(f"{n} groups were asked for, but {len(ids)} are complete")
        return ids[:n]

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
