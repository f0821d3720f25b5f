"""The last update of a run as Prometheus metrics: what `metrics.jsonl` keeps of all of them."""

from collections.abc import Mapping
from typing import Any

from molt.train.observe.metrics import Metrics

_GAUGES = {
    "reward_mean": "Mean reward of the last window",
    "loss": "Loss of the last update",
    "grad_norm": "Gradient norm of the last update, before clipping",
    "logprob_gap_max": "Largest difference of recorded and recomputed log-probs in the last window",
    "prefix_hit_rate": "Prompt tokens that engines had in their prefix caches during the last update, as a fraction",
    "staleness_mean": "Mean staleness of the last window's action tokens, in policy versions",
    "staleness_max": "Largest staleness in the last window, in policy versions",
}


class UpdateMetrics:
    """Sets the gauges of the last update, and counts rollouts, tokens and seconds over all of them."""

    def __init__(self, metrics: Metrics) -> None:
        self._version = metrics.gauge("policy_version", "Policy version that the engines serve")
        self._gauges = {key: metrics.gauge(f"update_{key}", about) for key, about in _GAUGES.items()}
        self._rollouts = metrics.counter("trained_rollouts", "Rollouts that windows were made of")
        self._tokens = metrics.counter("trained_tokens", "Action tokens trained on")
        self._seconds = metrics.counter(
            "update_seconds", "Seconds of updates, by what they were spent on", labels=("part",)
        )

    def update(self, row: Mapping[str, Any]) -> None:
        """Take one row of `metrics.jsonl`."""
        self._version.set(row["step"])
        for key, gauge in self._gauges.items():
            gauge.set(row[key])
        self._rollouts.inc(row["num_rollouts"])
        self._tokens.inc(row["num_action_tokens"])
        for part, seconds in row["timing"].items():
            if part != "total":
                self._seconds.labels(part=part).inc(seconds)
