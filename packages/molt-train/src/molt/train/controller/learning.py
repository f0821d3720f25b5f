"""Stages 6 to 9 in a row: the groups of a window become one update of the policy."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch

from molt.train.advantage import EstimatorSettings, TokenSignals, compute_advantages, find_estimator
from molt.train.config import AlgorithmConfig, Config, compares_groups
from molt.train.loss import AdaptiveKl, reward_penalty
from molt.train.records.rollout import Group, Outcome, Rollout
from molt.train.records.window import Scores, StepReport, TrainWindow
from molt.train.window import (
    WindowPlan,
    attach,
    build_rows,
    in_row_order,
    lay_out,
    rollout_arrays,
    shape,
    usable,
)

ScoreField = Literal["old", "reference", "teacher", "values"]


class Trainable(Protocol):
    """The trained policy, all ranks of it."""

    async def score(self, window: TrainWindow) -> list[Scores]:
        """What the estimator needs of each row, in the order rank, microbatch, row."""
        ...

    async def train(self, windows: Sequence[TrainWindow], *, kl_coef: float) -> StepReport:
        """One update: an optimizer step for each of `windows`."""
        ...


class Learning:
    """Makes updates by the run's algorithm."""

    def __init__(self, config: Config, actor: Trainable, plan: WindowPlan):
        self._config, self._actor, self._plan = config, actor, plan
        algorithm = config.algorithm
        find_estimator(algorithm.estimator)  # one of the user's own that cannot be loaded stops the run here
        self._compares_groups = compares_groups(algorithm.estimator, group_size=config.rollout.group_size)
        self._settings = EstimatorSettings(
            gamma=algorithm.gamma, lam=algorithm.lam, distillation_coef=algorithm.distillation_coef
        )
        self._kl = AdaptiveKl(coef=algorithm.kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon)

    def progress(self) -> dict[str, Any]:
        """What a checkpoint has to keep of it."""
        return {"kl_coef": self._kl.coef}

    def restore(self, progress: dict[str, Any]) -> None:
        """Go on from `progress`; from the start where it is empty."""
        coef = float(progress.get("kl_coef", self._config.algorithm.kl_coef))
        self._kl = msgspec.structs.replace(self._kl, coef=coef)

    def usable(self, groups: Sequence[Group], counts: Counter[str] | None = None) -> list[Group]:
        """The groups as they are trained, rewards shaped; what may not be is left out, and counted by reason."""
        shaped, touched = shape(groups, self._config.reward)
        result = usable(
            shaped,
            estimator_needs_group=self._compares_groups,
            singleton=self._config.algorithm.singleton,
            outcomes=self._config.pool,
        )
        if counts is not None:
            counts.update({f"shaped_{name}": number for name, number in touched.items()})
            counts.update({f"rollouts_{reason}": number for reason, number in result.dropped.items()})
        return result.kept

    async def update(self, groups: Sequence[Group], *, step: int) -> StepReport:
        """Train on groups that are usable, as update `step`. Raises what the actor raises."""
        steps = build_rows(groups, self._plan)
        scores = None
        if needs_scores(self._config.algorithm):
            windows = lay_out(steps, self._plan, step=step, policy_version=step - 1)
            scores = in_row_order([await self._actor.score(window) for window in windows], steps, self._plan)
        signals = token_signals(self._config.algorithm, scores or [], kl_coef=self._kl.coef)
        rollouts = rollout_arrays(groups)
        advantages_N, returns_N = compute_advantages(
            self._config.algorithm.estimator,
            rollouts.rewards_R,
            rollouts.groups_R,
            rollouts.num_actions_R,
            settings=self._settings,
            signals=signals,
        )
        steps = attach(steps, advantages_N, returns_N=returns_N, scores=scores)
        windows = lay_out(steps, self._plan, step=step, policy_version=step - 1)
        report = await self._actor.train(windows, kl_coef=self._kl.coef)
        return self._adapt(report, scores or [], num_rollouts=len(rollouts.rewards_R))

    def _adapt(self, report: StepReport, scores: Sequence[Scores], *, num_rollouts: int) -> StepReport:
        """Let the KL coefficient follow what the window showed, and report it."""
        algorithm = self._config.algorithm
        if not algorithm.kl_coef:
            return report
        metrics = report.metrics | {"kl_coef": self._kl.coef}
        divergence_N = gap(scores, "old", "reference") if algorithm.kl_placement == "reward" else np.zeros(0)
        if divergence_N.size:
            metrics["kl_mean"] = float(divergence_N.mean())
        if "kl_mean" in metrics:  # else nothing was sampled
            self._kl = self._kl.after(metrics["kl_mean"], num_rollouts=num_rollouts)
        return msgspec.structs.replace(report, metrics=metrics)


def needs_scores(algorithm: AlgorithmConfig) -> bool:
    """Whether the ranks look at a window before its advantages are computed."""
    return algorithm.kl_coef != 0 or algorithm.estimator in ("gae", "distillation")


def token_signals(algorithm: AlgorithmConfig, scores: Sequence[Scores], *, kl_coef: float) -> TokenSignals:
    """What the estimator sees of each action token."""
    in_reward = algorithm.kl_coef != 0 and algorithm.kl_placement == "reward"
    return TokenSignals(
        penalties=_penalties(scores, kl_coef) if in_reward else None,
        values=joined(scores, "values") if algorithm.estimator == "gae" else None,
        teacher_gap=gap(scores, "teacher", "old") if algorithm.estimator == "distillation" else None,
    )


def _penalties(scores: Sequence[Scores], kl_coef: float) -> np.ndarray:
    old_N, reference_N = (torch.from_numpy(joined(scores, field)) for field in ("old", "reference"))
    return reward_penalty(old_N, reference_N, coef=kl_coef).numpy()


def with_own_rewards(kept: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """The rollouts that were kept, with the rewards that their agents gave them instead of the shaped ones."""
    given = {rollout.rollout_id: rollout.outcome for group in groups for rollout in group.rollouts}
    return [
        msgspec.structs.replace(
            group, rollouts=tuple([_with_reward(rollout, given[rollout.rollout_id]) for rollout in group.rollouts])
        )
        for group in kept
    ]


def _with_reward(rollout: Rollout, outcome: Outcome) -> Rollout:
    return rollout if outcome.reward is None else msgspec.structs.replace(rollout, outcome=outcome)


def gap(scores: Sequence[Scores], of: ScoreField, to: ScoreField) -> np.ndarray:
    """One kind of score less another, float64 [N]."""
    return joined(scores, of) - joined(scores, to)


def joined(scores: Sequence[Scores], field: ScoreField) -> np.ndarray:
    """One kind of score of all rows, float64 [N]."""
    parts = [np.asarray(getattr(score, field), np.float64) for score in scores]
    return np.concatenate(parts) if parts else np.zeros(0)
