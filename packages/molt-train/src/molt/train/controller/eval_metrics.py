"""What an evaluation says: means, pass@k and avg@k over held-out rows, of one data set and of all together.

A rollout counts once, however many segments it has. `infrastructure` outcomes say nothing about the policy: they count
nowhere and are reported as missing. Failed and timed-out rollouts score 0 and have not passed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec

from molt.train.config import EvalConfig
from molt.train.records.rollout import Outcome, Rollout


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of an evaluation."""

    task_id: str
    """Of the row that it answers."""
    outcome: Outcome
    dataset: str = ""
    num_action_tokens: int = 0
    """Sampled tokens of the turns that were delivered and that the agent went on from."""
    oldest_version: int | None = None
    newest_version: int | None = None
    """Of the policy versions that sampled its tokens; None where nothing was sampled."""


def summarise(samples: Sequence[Sample], settings: EvalConfig) -> dict[str, Any]:
    """The metrics of `samples` together and, where rows have the name of a data set, by data set under `datasets`."""
    names = sorted({sample.dataset for sample in samples if sample.dataset})
    row = _metrics(samples, settings)
    if names:
        row["datasets"] = {name: _metrics([s for s in samples if s.dataset == name], settings) for name in names}
    return row


def _metrics(samples: Sequence[Sample], settings: EvalConfig) -> dict[str, Any]:
    """See docs/evaluation.md for every name. A mean over nothing is None, but `reward_mean`, which is 0."""
    counted = [sample for sample in samples if sample.outcome.kind != "infrastructure"]
    by_task: dict[str, list[Sample]] = {}
    for sample in counted:
        by_task.setdefault(sample.task_id, []).append(sample)
    means = [fmean(score_of(sample.outcome) for sample in row) for row in by_task.values()]
    passes = [(len(row), sum(has_passed(s.outcome, settings.threshold) for s in row)) for row in by_task.values()]
    at_k = {f"pass@{k}": _mean(pass_at_k(n, c, k) for n, c in passes if n >= k) for k in powers(settings.samples)}
    return {
        "reward_mean": _mean(score_of(sample.outcome) for sample in counted) or 0.0,
        f"avg@{settings.samples}": _mean(means),
        "standard_error": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        **at_k,
        "num_tasks": len({sample.task_id for sample in samples}),
        "num_rollouts": len(counted),
        "num_missing": len(samples) - len(counted),
        "outcomes": dict(Counter(sample.outcome.kind for sample in samples)),
        "num_action_tokens_mean": _mean(sample.num_action_tokens for sample in counted),
        **_version_span(samples),
        "info_mean": info_means(samples),
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the chance that one of `k` rollouts passes, from `n` of which `c` did.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1), as a product, which neither overflows
    nor cancels. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} passed rollouts among {n} is not defined")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`."""
    return [1 << exponent for exponent in range(samples.bit_length())]


def score_of(outcome: Outcome) -> float:
    """The score, else the reward, else 0."""
    if outcome.kind in ("failed", "timeout"):
        return 0.0
    return outcome.score if outcome.score is not None else (outcome.reward or 0.0)


def has_passed(outcome: Outcome, threshold: float) -> bool:
    """Whether a rollout counts as solved: it came to a result, and its score is at least `threshold`."""
    return outcome.kind in ("completed", "truncated") and score_of(outcome) >= threshold


def info_means(rollouts: Iterable[Sample | Rollout]) -> dict[str, float]:
    """The mean of every number that agents gave in `Result.info`, over the rollouts that gave it."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for key, value in rollout.outcome.info.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, []).append(float(value))
    return {key: fmean(numbers) for key, numbers in values.items()}


def _version_span(samples: Sequence[Sample]) -> dict[str, int | None]:
    def bound(pick: Callable[[list[int]], int], versions: Iterable[int | None]) -> int | None:
        known = [version for version in versions if version is not None]
        return pick(known) if known else None

    return {
        "oldest_version": bound(min, (sample.oldest_version for sample in samples)),
        "newest_version": bound(max, (sample.newest_version for sample in samples)),
    }


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None
