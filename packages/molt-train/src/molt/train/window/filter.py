"""Which rollouts of the finished groups may teach, and why the others may not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from molt.train.config import PoolConfig
from molt.train.records.rollout import Group, Rollout


@dataclass(frozen=True)
class FilterResult:
    """Groups with only usable rollouts, and how many rollouts were dropped for each reason."""

    kept: list[Group]
    dropped: dict[str, int]
    """Rollouts by reason: `infrastructure`, `failed`, `timeout`, `truncated`, `group_too_small`."""


def usable(
    groups: Sequence[Group],
    *,
    estimator_needs_group: bool,
    outcomes: PoolConfig,
    singleton: Literal["drop", "keep"] = "drop",
) -> FilterResult:
    """Keep the rollouts that have a reward; every kept rollout has one.

    `outcomes` says which outcomes count; `failed` and `timeout` then count as reward 0. An `infrastructure` outcome
    says nothing about the policy and never counts. A rollout without action tokens stays: it belongs to its group's
    baseline though it trains nothing. A group left with one rollout is dropped where the estimator compares the
    rollouts of a group, unless `singleton` says to keep it; its advantage is then 0.
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        rollouts: list[Rollout] = []
        for rollout in group.rollouts:
            counted = _counted(rollout, outcomes)
            if counted is None:
                dropped[rollout.outcome.kind] += 1
            else:
                rollouts.append(counted)
        if estimator_needs_group and singleton == "drop" and len(rollouts) == 1:
            dropped["group_too_small"] += 1
        elif rollouts:
            kept.append(msgspec.structs.replace(group, rollouts=tuple(rollouts)))
    return FilterResult(kept=kept, dropped=dict(dropped))


def equal_reward(group: Group) -> float | None:
    """The one reward of all rollouts of a group; None where they differ, or there are fewer than two.

    A comparison of such rollouts teaches nothing: all their advantages are 0. The group is one that `usable` kept, with
    the rewards as they are shaped.
    """
    first, *others = [rollout.outcome.reward for rollout in group.rollouts]
    return first if others and all(reward == first for reward in others) else None


def _counted(rollout: Rollout, outcomes: PoolConfig) -> Rollout | None:
    """The rollout as it counts, None where it does not."""
    if not outcomes.counts(rollout.outcome.kind):
        return None
    if rollout.outcome.kind in {"failed", "timeout"}:
        outcome = msgspec.structs.replace(rollout.outcome, reward=0.0)
        return msgspec.structs.replace(rollout, outcome=outcome)
    return rollout
