"""The window of an update: complete groups are taken as they come, and what may not be trained is left out by name.

    complete groups --take--> too old? nothing usable? nothing to compare? --> window, in the order of opening
                                   |
                                   +--> dropped, or its task offered anew; admission opens what takes its place

Consumes: complete groups of the pool, those with the oldest tokens first.
Waits for: `train.groups_per_update` groups that may be trained; a stall guard bounds the wait.
Produces: the groups of one window; they are recorded nowhere yet.
Unblocked by: workers' results.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from molt.train.config import Config
from molt.train.controller.admission import Admission
from molt.train.errors import DataExhausted, RunError
from molt.train.pool.pool import Pool
from molt.train.pool.rows import GroupRow
from molt.train.records.rollout import Group
from molt.train.window import equal_reward

POLL_S = 1.0


class Usable(Protocol):
    """The slice of Learning that says what of a group counts."""

    def usable(self, groups: Sequence[Group]) -> list[Group]:
        """The groups as they are trained, rewards shaped, without what may not be."""
        ...


class Guard(Protocol):
    """Who bounds the waiting."""

    def check(self, waiting_for: str) -> None:
        """Raises StallError when nothing has happened for too long."""
        ...


class Collector:
    """Puts the windows of a run together, one after the other.

    With `train.max_staleness` 0 a window is made of the groups that were opened for it, whatever the order in which
    they completed, since admission opens no others. Above 0 it is made of those with the oldest tokens that are ready.
    """

    def __init__(self, config: Config, pool: Pool, admission: Admission, learning: Usable, stall: Guard) -> None:
        self._config, self._pool, self._admission = config, pool, admission
        self._learning, self._stall = learning, stall
        self._swept_before = 0
        self.dropped: Counter[str] = Counter()
        """Groups by `groups_REASON`, and what else was left out, since somebody last cleared it."""

    async def collect(self, step: int) -> list[Group]:
        """The window of update `step` + 1, sorted by age; `admission.held` counts it from now on.

        Raises:
            DataExhausted: `data.epochs` are used up, and what is left is less than a window. That is dropped.
            RunError: no window can be filled: every task is in quarantine, or more than `train.max_refill` groups
                taught nothing.
            StallError: nothing has happened for too long.
        """
        wanted = self._config.train.groups_per_update
        groups: list[Group] = []
        degenerate: Counter[float] = Counter()
        self._sweep(step)
        while True:
            self._fill(groups, wanted, step=step, degenerate=degenerate)
            self._admission.held = len(groups)
            self._admission()
            self.dropped.update(self._admission.dropped)
            self._admission.dropped.clear()
            if len(groups) == wanted:
                return self._by_age(groups)
            if self._pool.num_ready == 0:
                self._check_end(groups)
                if not await self._pool.wait_groups(1, timeout_s=POLL_S):
                    self._stall.check(f"{wanted - len(groups)} more complete groups")

    def _fill(self, groups: list[Group], wanted: int, *, step: int, degenerate: Counter[float]) -> None:
        """Take what is complete, until `wanted` groups are there."""
        while len(groups) < wanted and self._pool.num_ready:
            (group,) = self._pool.take(1)
            reason = self._refuse(group, step, degenerate)
            if reason is None:
                groups.append(group)
                continue
            row = self._row(group)
            self._pool.drop(group.group_id, reason)
            self._count(row, reason)
            if reason == "degenerate":
                self._check_refill(degenerate)

    def _refuse(self, group: Group, step: int, degenerate: Counter[float]) -> str | None:
        """Why a complete group is not trained on; None when it is."""
        oldest = group.oldest_version
        if oldest is not None and step - oldest > self._config.train.max_staleness:
            return "stale"
        kept = self._learning.usable([group])
        if not kept:
            return "no_usable_rollouts"
        reward = equal_reward(kept[0])
        if reward is not None and self._config.train.drop_degenerate:
            degenerate[reward] += 1
            return "degenerate"
        return None

    def _sweep(self, step: int) -> None:
        """End the groups that no window can take any more, before workers spend more on them."""
        before = step - self._config.train.max_staleness
        if before > self._swept_before:
            self._swept_before = before
            for row in self._pool.discard_stale(before):
                self._count(row, "stale")

    def _count(self, row: GroupRow, reason: str) -> None:
        """A group was dropped; where the configuration says so, its task is offered anew."""
        again = reason == "stale" and self._config.train.on_stale == "release" and self._admission.reopen(row)
        self.dropped[f"groups_{reason}_released" if again else f"groups_{reason}"] += 1

    def _check_refill(self, degenerate: Counter[float]) -> None:
        train, num = self._config.train, degenerate.total()
        if num <= train.max_refill * train.groups_per_update:
            return
        rewards = ", ".join(f"{reward:g} ({count} groups)" for reward, count in degenerate.most_common(5))
        raise RunError(
            f"{num} groups were dropped for one update because all their rollouts had one reward: {rewards}; that is "
            f"more than train.max_refill {train.max_refill:g} times train.groups_per_update {train.groups_per_update}: "
            "give tasks that are neither solved nor hopeless, raise train.max_refill, or set train.drop_degenerate to "
            "false"
        )

    def _check_end(self, groups: Sequence[Group]) -> None:
        """Raises when nothing is under way, and nothing will be."""
        if self._pool.num_open:
            return
        if self._admission.is_all_quarantined:
            raise RunError("every task is in quarantine, its attempts having died; molt-train status has their errors")
        if self._admission.is_exhausted:
            for group in groups:
                self._pool.drop(group.group_id, "end_of_data")
            if groups:
                self.dropped["groups_end_of_data"] += len(groups)
            self._admission.held = 0
            raise DataExhausted(
                f"data.epochs {self._config.data.epochs} are used up; {len(groups)} groups are left, less than a window"
            )

    def _by_age(self, groups: Sequence[Group]) -> list[Group]:
        return sorted(groups, key=lambda group: self._row(group).seq)

    def _row(self, group: Group) -> GroupRow:
        row = self._pool.ledger.group(group.group_id)
        assert row is not None, "a group of the pool is in its ledger"
        return row
