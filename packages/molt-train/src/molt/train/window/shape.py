"""What a rollout's reward counts as, before groups are compared: clip range, truncated rollouts, overlong penalty."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from molt.train.config import RewardConfig
from molt.train.records.rollout import Group, Rollout


def shape(groups: Sequence[Group], settings: RewardConfig) -> tuple[list[Group], dict[str, int]]:
    """Replace the reward of every rollout that has one; the others (`failed`, `infrastructure`, ...) stay as they are.

    In this order: the agent's reward is clipped, or 0 where the rollout was truncated and `settings.truncated` says so;
    then the overlong penalty is taken off, which the clip therefore cannot hide. The records given are not changed;
    call it once on them, for a penalty taken off twice is another penalty.

    Args:
        groups: As they came from the pool.
        settings: `[reward]`.

    Returns:
        The groups in their order, and the number of rollouts that were `clipped`, `overlong` or `truncated_zero`. A
        reason that touched none is absent.
    """
    counts: Counter[str] = Counter()
    shaped: list[Group] = []
    for group in groups:
        rollouts = tuple([_shaped(rollout, settings, counts) for rollout in group.rollouts])
        shaped.append(msgspec.structs.replace(group, rollouts=rollouts))
    return shaped, dict(counts)


def overlong_penalty(num_actions: int, settings: RewardConfig) -> float:
    """DAPO's length penalty (arXiv:2503.14476): 0 up to length - ramp, 1 beyond length, a line between, never above 1.

    `num_actions` are action tokens: what the policy chose to write, as the response's length is in the paper; the
    prompt and the answers of tools do not count.
    """
    length, ramp = settings.overlong_length, settings.overlong_ramp
    if not length or num_actions <= length - ramp:
        return 0.0
    return min(1.0, (num_actions - (length - ramp)) / ramp) if ramp else 1.0


def _shaped(rollout: Rollout, settings: RewardConfig, counts: Counter[str]) -> Rollout:
    """The rollout as it counts."""
    given = rollout.outcome.reward
    if given is None:
        return rollout
    reward = _clipped(given, settings)
    if rollout.outcome.kind == "truncated" and settings.truncated != "keep":
        counts["truncated_zero"] += 1
        reward = 0.0
    elif reward != given:
        counts["clipped"] += 1
    # Once a rollout, by its longest segment: cutting a rollout up neither adds penalties nor adds lengths.
    penalty = overlong_penalty(max((e.num_actions for e in rollout.experiences), default=0), settings)
    if penalty:
        counts["overlong"] += 1
    outcome = msgspec.structs.replace(rollout.outcome, reward=reward - penalty)
    return msgspec.structs.replace(rollout, outcome=outcome)


def _clipped(reward: float, settings: RewardConfig) -> float:
    if settings.clip_low is not None:
        reward = max(reward, settings.clip_low)
    return reward if settings.clip_high is None else min(reward, settings.clip_high)
