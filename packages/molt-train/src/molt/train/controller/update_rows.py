"""The rows of `metrics.jsonl`, one an update. Updates that are made again, after a death, replace their rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from molt.train.controller.collect import Collector
from molt.train.controller.eval_metrics import info_means
from molt.train.controller.serving import Serving
from molt.train.observe.journal import Journal, read_journal
from molt.train.records.rollout import Group
from molt.train.records.window import StepReport
from molt.train.window import window_stats

_SEEN_ONCE = ("prefix_hit_rate", "interrupted", "dropped")
"""What was seen on the way to a window, which its groups do not tell when they are trained again."""


@dataclass(frozen=True)
class Trained:
    """What came of a window."""

    groups: list[Group]
    """What was trained of it, with the rewards that agents gave."""
    report: StepReport
    left_out: Counter[str]


class UpdateRows:
    """Writes the rows.

    Args:
        journal: Where to.
        collector: What it dropped since the last row is in the next one.
        serving: What its engines did, likewise.
        on_update: Each is called with every row; not with those of updates that are made again.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        collector: Collector,
        serving: Serving,
        on_update: Sequence[Callable[[dict[str, Any]], None]],
    ):
        self._journal, self._collector, self._serving = journal, collector, serving
        self._on_update = on_update
        self._replaced: dict[int, dict[str, Any]] = {}
        self._told = 0

    def rewind(self, step: int) -> None:
        """The updates after `step` are to be made again."""
        self._replaced |= {row["step"]: row for row in read_journal(self._journal.path) if row["step"] > step}
        self._journal.truncate_after(step)

    def add(self, done: Trained, *, seconds: dict[str, float]) -> None:
        """Write the row of an update; `seconds` by what they were spent on."""
        report = done.report
        row = {
            "step": report.step,
            "policy_version": report.step - 1,
            **window_stats(done.groups, report.step - 1),
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "logprob_gap_mean": report.logprob_gap_mean,
            "logprob_gap_max": report.logprob_gap_max,
            **report.metrics,
            "info_mean": info_means([rollout for group in done.groups for rollout in group.rollouts]),
            **self._seen(report.step, done.left_out),
            "timing": {"wait_rollouts": 0.0, **seconds, "total": sum(seconds.values())},
        }
        self._journal.append(row)
        if report.step > self._told:
            self._told = report.step
            for tell in self._on_update:
                tell(row)

    def sync(self) -> None:
        """No loss of power takes what was written."""
        self._journal.sync()

    def _seen(self, step: int, left_out: Counter[str]) -> dict[str, Any]:
        if step in self._replaced:
            replaced = self._replaced.pop(step)
            return {name: replaced[name] for name in _SEEN_ONCE}
        dropped = self._collector.dropped
        counts = dict(dropped + left_out)
        dropped.clear()
        return {
            "prefix_hit_rate": self._serving.take_prefix_hit_rate(),
            "interrupted": msgspec.to_builtins(self._serving.take_interrupted()),
            "dropped": counts,
        }
