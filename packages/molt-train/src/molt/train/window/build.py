"""From groups to `TrainWindow`s, in two phases.

Rows are laid out before they have advantages, since the ranks may have to compute what these are made of, and again
once they have them.

    build_rows -> lay_out -> (ranks score) -> in_row_order -> (advantages) -> attach -> lay_out

The layout depends on the lengths of the rows only, so both are the same.

Shapes: R rollouts of the window; N action tokens of the window, rollout by rollout, segment by segment, in order.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from molt.train.records.rollout import Group, Rollout
from molt.train.records.window import Microbatch, Row, Scores, TrainWindow
from molt.train.window.aggregate import rollout_weights
from molt.train.window.assign import assign, row_cost
from molt.train.window.pack import equalise, pack
from molt.train.window.plan import WindowPlan


@dataclass(frozen=True)
class RolloutArrays:
    """What estimators ask of a window's rollouts. A rollout counts once, however many segments it has."""

    rewards_R: np.ndarray
    """float64 [R]"""
    groups_R: np.ndarray
    """int64 [R]: equal where two rollouts answer the same prompt"""
    num_actions_R: np.ndarray
    """int64 [R]: action tokens over all segments of the rollout; may be 0"""


def rollout_arrays(groups: Sequence[Group]) -> RolloutArrays:
    """The rollouts of `groups` in order. Raises ValueError naming one without a reward; `usable` leaves none."""
    members = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    return RolloutArrays(
        rewards_R=np.array([_reward(rollout) for _, rollout in members], dtype=np.float64),
        groups_R=np.array([index for index, _ in members], dtype=np.int64),
        num_actions_R=np.array([_num_actions(rollout) for _, rollout in members], dtype=np.int64),
    )


def build_rows(groups: Sequence[Group], plan: WindowPlan) -> list[list[Row]]:
    """The rows of each optimizer step of the window, advantages 0 for now; all together they are in the order of N.

    A step gets a contiguous share of the groups, the last ones one group fewer where it does not divide. Its rows are
    weighed by its own counts, see `rollout_weights`; rollouts are numbered through the window. No row is dropped.
    """
    steps: list[list[Row]] = []
    num_before = 0
    for share in np.array_split(np.arange(len(groups)), plan.num_steps):
        own = [groups[i] for i in share]
        steps.append(_step_rows(own, plan, num_before=num_before))
        num_before += sum(len(group.rollouts) for group in own)
    return steps


def lay_out(steps: Sequence[Sequence[Row]], plan: WindowPlan, *, step: int, policy_version: int) -> list[TrainWindow]:
    """Each step's rows on ranks and in microbatches, equally many on every rank. Deterministic; no row is dropped.

    Args:
        steps: The rows of each optimizer step of the update.
        plan: Ranks, budget and layout.
        step: The update that they make.
        policy_version: The version of the weights before the update.
    """
    num_rollouts = max((row.rollout + 1 for rows in steps for row in rows), default=0)
    return [
        TrainWindow(
            step=step,
            policy_version=policy_version,
            ranks=tuple(
                tuple(Microbatch(rows=tuple(rows[i] for i in microbatch)) for microbatch in microbatches)
                for microbatches in _layout(rows, plan)
            ),
            num_action_tokens=sum(row.experience.num_actions for row in rows),
            num_rollouts=num_rollouts,
        )
        for rows in steps
    ]


def in_row_order(scores: Sequence[Sequence[Scores]], steps: Sequence[Sequence[Row]], plan: WindowPlan) -> list[Scores]:
    """What the ranks gave for each window of `lay_out(steps, plan, ...)`, in the order of the rows of all steps.

    Args:
        scores: For each window one a row: rank by rank, microbatch by microbatch, row by row.
        steps: What was laid out.
        plan: How it was.
    """
    ordered: list[Scores] = []
    for given, rows in zip(scores, steps, strict=True):
        laid_out = [i for microbatches in _layout(rows, plan) for microbatch in microbatches for i in microbatch]
        ordered += [score for _, score in sorted(zip(laid_out, given, strict=True), key=lambda pair: pair[0])]
    return ordered


def attach(
    steps: Sequence[Sequence[Row]],
    advantages_N: np.ndarray,
    *,
    returns_N: np.ndarray | None = None,
    scores: Sequence[Scores] | None = None,
) -> list[list[Row]]:
    """The rows with what the window's estimator and ranks gave them.

    Args:
        steps: The rows of every step, as `build_rows` gave them.
        advantages_N: [N].
        returns_N: [N], what the critic is to predict; None without one.
        scores: One for each row of all steps, in order, of which `reference` and `values` are kept; None without any.

    Raises:
        ValueError: An array is not as long as the window has action tokens.
    """
    rows = [row for step in steps for row in step]
    advantages = _slices(advantages_N, rows, "advantages")
    returns = itertools.repeat(None) if returns_N is None else _slices(returns_N, rows, "returns")
    given = scores if scores is not None else [Scores()] * len(rows)
    attached = (
        msgspec.structs.replace(
            row, advantages=next(advantages), returns=next(returns), reference=score.reference, values=score.values
        )
        for row, score in zip(rows, given, strict=True)
    )
    return [list(itertools.islice(attached, len(step))) for step in steps]


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


def _step_rows(groups: Sequence[Group], plan: WindowPlan, *, num_before: int) -> list[Row]:
    members = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    weights_R = rollout_weights(
        [_num_actions(rollout) for _, rollout in members],
        [index for index, _ in members],
        aggregation=plan.aggregation,
        length=plan.aggregation_length,
    )
    return [
        Row(
            experience=experience,
            rollout=num_before + number,
            weight=float(weights_R[number]),
            advantages=np.zeros(experience.num_actions, np.float32),
        )
        for number, (_, rollout) in enumerate(members)
        for experience in rollout.experiences
    ]


def _layout(rows: Sequence[Row], plan: WindowPlan) -> list[list[list[int]]]:
    """Indices of `rows`: rank by rank, microbatch by microbatch."""
    num_tokens = [row.experience.num_tokens for row in rows]
    costs = [row_cost(tokens, hidden_size=plan.hidden_size) for tokens in num_tokens]
    ranks: list[list[list[int]]] = []
    for indices in assign(costs, plan.num_ranks):
        microbatches = pack([num_tokens[i] for i in indices], budget=plan.microbatch_tokens, layout=plan.layout)
        own = [[indices[i] for i in microbatch] for microbatch in microbatches]
        # Ranks wait for each other in every microbatch: all run their expensive ones together.
        ranks.append(sorted(own, key=lambda microbatch: -sum(costs[i] for i in microbatch)))
    return equalise(ranks)


def _slices(values_N: np.ndarray, rows: Sequence[Row], name: str) -> Iterator[np.ndarray]:
    """The part of each row, float32."""
    ends = list(itertools.accumulate(row.experience.num_actions for row in rows))
    num_tokens = ends[-1] if ends else 0
    if values_N.shape != (num_tokens,):
        raise ValueError(f"{name} have shape {values_N.shape}; the window has {num_tokens} action tokens")
    return iter(np.split(values_N.astype(np.float32, copy=False), ends[:-1]))


def _num_actions(rollout: Rollout) -> int:
    return sum(experience.num_actions for experience in rollout.experiences)


def _reward(rollout: Rollout) -> float:
    if rollout.outcome.reward is None:
        raise ValueError(f"rollout {rollout.rollout_id!r} ended {rollout.outcome.kind!r} and has no reward")
    return rollout.outcome.reward
