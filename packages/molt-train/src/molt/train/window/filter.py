"""Which rollouts of the finished groups may teach, and why the others may not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from molt.train.records.rollout import Group, Rollout

OnFailed = Literal["drop", "zero_reward"]


@dataclass(frozen=True)
class FilterResult:
    """Groups with only usable rollouts, and how many rollouts were dropped for each reason."""

    kept: list[Group]
    dropped: dict[str, int]
    """Rollouts by reason: `infrastructure`, `failed`, `timeout`, `group_too_small`."""


def usable(
    groups: Sequence[Group],
    *,
    estimator_needs_group: bool,
    on_failed: OnFailed,
    singleton: Literal["drop", "keep"] = "drop",
) -> FilterResult:
    """Keep the rollouts that have a reward; every kept rollout has one.

    An `infrastructure` outcome says nothing about the policy and never counts. `failed` and `timeout` are dropped, or
    count as reward 0. A rollout without action tokens stays: it belongs to its group's baseline though it trains
    nothing. A group left with one rollout is dropped where the estimator compares the rollouts of a group, unless
    `singleton` says to keep it; its advantage is then 0.
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        rollouts: list[Rollout] = []
        for rollout in group.rollouts:
            counted = _counted(rollout, on_failed)
            if counted is None:
                dropped[rollout.outcome.kind] += 1
            else:
                rollouts.append(counted)
        if estimator_needs_group and singleton == "drop" and len(rollouts) == 1:
            dropped["group_too_small"] += 1
        elif rollouts:
            kept.append(msgspec.structs.replace(group, rollouts=tuple(rollouts)))
    return FilterResult(kept=kept, dropped=dict(dropped))


def _counted(rollout: Rollout, on_failed: OnFailed) -> Rollout | None:
    """The rollout as it counts, None where it does not."""
    kind = rollout.outcome.kind
    if kind == "infrastructure":
        return None
    if kind in {"failed", "timeout"}:
        if on_failed == "drop":
            return None
        outcome = msgspec.structs.replace(rollout.outcome, reward=0.0)
        return msgspec.structs.replace(rollout, outcome=outcome)
    return rollout
