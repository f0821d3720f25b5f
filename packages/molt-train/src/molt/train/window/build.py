"""From groups to a `TrainWindow`: advantages once a rollout, rows to ranks, ranks to microbatches.

Shapes: R rollouts, N action tokens of the window (rollout by rollout, segment by segment, in order).
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from molt.train.records.rollout import Group, Rollout
from molt.train.records.window import Microbatch, Row, TrainWindow
from molt.train.window.assign import assign
from molt.train.window.pack import equalise, pack


class AdvantageFn(Protocol):
    """The estimator, as `molt.train.advantage.compute_advantages` with its name and discount bound."""

    def __call__(self, rewards: np.ndarray, groups: np.ndarray, num_actions: np.ndarray, /) -> np.ndarray:
        """From rewards [R], group numbers [R] and action counts [R] of rollouts to advantages [N] of their tokens."""
        ...


def build_window(
    groups: Sequence[Group],
    *,
    num_steps: int = 1,
    step: int,
    policy_version: int,
    num_ranks: int,
    microbatch_tokens: int,
    advantages: AdvantageFn,
) -> list[TrainWindow]:
    """Lay out the groups of one update as its optimizer steps. Deterministic in its arguments; no row is dropped.

    Args:
        groups: Only rollouts that have a reward, as `usable` leaves them.
        num_steps: Optimizer steps; each gets a contiguous share of the groups, the last ones one group fewer where it
            does not divide.
        step: The update that they make.
        policy_version: The version of the weights before the update.
        num_ranks: Data-parallel ranks, at least 1.
        microbatch_tokens: Most tokens of a microbatch, padding included.
        advantages: Called once, with the rollouts of all groups. A rollout counts once in it, however many segments it
            has.
    """
    rows = iter(_rows(groups, advantages))
    shares = np.array_split(np.arange(len(groups)), num_steps)
    return [
        lay_out(
            list(itertools.islice(rows, sum(_num_rows(groups[i]) for i in share))),
            step=step,
            policy_version=policy_version,
            num_ranks=num_ranks,
            microbatch_tokens=microbatch_tokens,
        )
        for share in shares
    ]


def lay_out(
    rows: Sequence[Row], *, step: int, policy_version: int, num_ranks: int, microbatch_tokens: int
) -> TrainWindow:
    """Rows to ranks by length, and each rank's rows to microbatches, equally many on every rank."""
    packed: list[list[list[int]]] = []
    for indices in assign([row.experience.num_tokens for row in rows], num_ranks):
        microbatches = pack([rows[i].experience.num_tokens for i in indices], budget=microbatch_tokens)
        packed.append([[indices[i] for i in microbatch] for microbatch in microbatches])
    return TrainWindow(
        step=step,
        policy_version=policy_version,
        ranks=tuple(
            tuple(Microbatch(rows=tuple(rows[i] for i in microbatch)) for microbatch in microbatches)
            for microbatches in equalise(packed)
        ),
        num_action_tokens=sum(row.experience.num_actions for row in rows),
    )


def _num_rows(group: Group) -> int:
    return sum(len(rollout.experiences) for rollout in group.rollouts)


def window_stats(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """What a window holds, under the names of `metrics.jsonl`; finite also for a window without rollouts.

    `reward_std` is the population's. `staleness_mean` is over action tokens and `staleness_max` over all of them, in
    policy versions behind `policy_version`. `delivered_fraction` is the mean over rollouts.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    experiences = [experience for rollout in rollouts for experience in rollout.experiences]
    rewards = np.array([_reward(rollout) for rollout in rollouts])
    num_action_tokens = sum(e.num_actions for e in experiences)
    staleness = sum((policy_version - e.mean_version) * e.num_actions for e in experiences)
    return {
        "reward_mean": float(rewards.mean()) if rollouts else 0.0,
        "reward_std": float(rewards.std()) if rollouts else 0.0,
        "num_rollouts": len(rollouts),
        "num_segments": len(experiences),
        "num_action_tokens": num_action_tokens,
        "staleness_mean": staleness / num_action_tokens if num_action_tokens else 0.0,
        "staleness_max": max((policy_version - e.oldest_version for e in experiences), default=0),
        "delivered_fraction": float(np.mean([r.delivered_fraction for r in rollouts])) if rollouts else 1.0,
    }


def _rows(groups: Sequence[Group], advantages: AdvantageFn) -> list[Row]:
    members = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    num_actions = [sum(e.num_actions for e in rollout.experiences) for _, rollout in members]
    advantages_N = advantages(
        np.array([_reward(rollout) for _, rollout in members], dtype=np.float64),
        np.array([index for index, _ in members], dtype=np.int64),
        np.array(num_actions, dtype=np.int64),
    ).astype(np.float32, copy=False)
    if advantages_N.shape != (sum(num_actions),):
        raise ValueError(f"advantages have shape {advantages_N.shape}; the window has {sum(num_actions)} action tokens")
    rows: list[Row] = []
    start = 0
    for experience in (experience for _, rollout in members for experience in rollout.experiences):
        end = start + experience.num_actions
        rows.append(Row(experience=experience, advantages=advantages_N[start:end]))
        start = end
    return rows


def _reward(rollout: Rollout) -> float:
    if rollout.outcome.reward is None:
        raise ValueError(f"rollout {rollout.rollout_id!r} ended {rollout.outcome.kind!r} and has no reward")
    return rollout.outcome.reward
