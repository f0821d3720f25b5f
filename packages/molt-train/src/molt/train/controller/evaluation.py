"""Evaluation: held-out tasks, rolled out by the same workers on one policy version, never trained on."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from molt.train.controller.stall import StallGuard
from molt.train.observe.journal import Journal, read_journal
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Rollout, Task


class Evaluation:
    """Runs every task `num_samples` times and writes one row to `evaluations.jsonl`."""

    def __init__(self, pool: Pool, tasks: Sequence[Task], *, num_samples: int, journal: Journal, stall: StallGuard):
        self._pool, self._tasks, self._num_samples = pool, tasks, num_samples
        self._journal, self._stall = journal, stall

    def is_done(self, step: int) -> bool:
        """Whether the policy after update `step` has been evaluated, by an earlier process perhaps."""
        return any(row["step"] == step for row in read_journal(self._journal.path))

    async def __call__(self, *, step: int, policy_version: int) -> dict[str, Any]:
        """Evaluate; the caller sees to it that the version stays the same meanwhile."""
        ids = [self._pool.open_group(task, kind="eval", size=self._num_samples, position=None) for task in self._tasks]
        while not await self._pool.wait_eval(ids, timeout_s=1.0):
            self._stall.check("evaluation rollouts")
        rollouts = [rollout for group in self._pool.take_eval(ids) for rollout in group.rollouts]
        row = {"step": step, "policy_version": policy_version, **summarise(rollouts)}
        self._journal.append(row)
        return row


def summarise(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Mean score over the rollouts that say something about the policy, and the means of what agents reported.

    `infrastructure` outcomes say nothing and count nowhere; failed and timed-out rollouts score 0.
    """
    counted = [rollout.outcome for rollout in rollouts if rollout.outcome.kind != "infrastructure"]
    scores = [o.score if o.score is not None else (o.reward or 0.0) for o in counted]
    return {
        "reward_mean": sum(scores) / len(scores) if scores else 0.0,
        "num_rollouts": len(scores),
        "outcomes": dict(Counter(rollout.outcome.kind for rollout in rollouts)),
        "info_mean": info_means(rollouts),
    }


def info_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of every number that agents gave in `Result.info`, over the rollouts that gave it."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for key, value in rollout.outcome.info.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, []).append(float(value))
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}
