"""Training again from a recorded run: its windows in their order, without engines and without workers.

Everything that an update depends on is in the ledger: which groups its window had, in which order, what was sampled in
them, and how each rollout ended. With the run's own configuration the updates are the run's own.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from molt.train.config import Config
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.eval_metrics import info_means
from molt.train.controller.learning import Learning, with_own_rewards
from molt.train.observe.journal import Journal
from molt.train.pool.groups import ExperiencesOf, restore_group
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import RolloutRow, WindowRow
from molt.train.records.rollout import Group, Outcome
from molt.train.records.window import StepReport
from molt.train.trajectory import TrainingRules, build_trajectory
from molt.train.window import window_stats


class Savable(Protocol):
    """The state of the trained policy, on all ranks of it."""

    async def save(self, folder: Path, *, step: int, progress: dict[str, Any]) -> None:
        """Write a checkpoint of the state after update `step`."""
        ...


class RecordedWindows:
    """What a run trained on, read from its ledger, one window in memory at a time.

    Args:
        reader: Of the ledger, which a run may be writing.
        experiences_of: Makes the experiences of recorded segments.
        grades: Outcomes that stand for the recorded ones, by rollout id; other rollouts keep theirs.
        rules: What of the recordings is trained; None: what was when they were made.
    """

    def __init__(
        self,
        reader: LedgerReader,
        *,
        experiences_of: ExperiencesOf,
        grades: Mapping[str, Outcome],
        rules: TrainingRules | None,
    ):
        self._reader, self._experiences_of = reader, experiences_of
        self._grades, self._rules = grades, rules

    def groups(self, window: WindowRow) -> list[Group]:
        """The groups of a window, in its order."""
        return [self._group(group_id) for group_id in window.group_ids]

    def _group(self, group_id: str) -> Group:
        row = self._reader.group(group_id)
        if row is None:
            raise ValueError(f"a window names group {group_id!r}, which the ledger does not have")
        return restore_group(row, list(self._members(group_id)), self._experiences_of).to_group()

    def _members(self, group_id: str) -> Iterator[RolloutRow]:
        for row in self._reader.each_rollout(group_id):
            if row.outcome is not None and row.rollout_id in self._grades:
                row = msgspec.structs.replace(row, outcome=self._grades[row.rollout_id])
            recording = row.recording
            if recording is not None and self._rules is not None:
                segments = build_trajectory(recording.session_id, recording.turns, self._rules).segments
                row = msgspec.structs.replace(row, recording=msgspec.structs.replace(recording, segments=segments))
            yield row


class Replay:
    """Makes the updates of recorded windows and writes a journal and checkpoints, as the training loop does."""

    def __init__(
        self,
        config: Config,
        recorded: RecordedWindows,
        *,
        actor: Savable,
        learning: Learning,
        checkpoints: Checkpoints,
        journal: Journal,
    ):
        self._config, self._recorded = config, recorded
        self._actor, self._learning = actor, learning
        self._checkpoints, self._journal = checkpoints, journal

    async def run(self, windows: Sequence[WindowRow]) -> None:
        """Train on `windows`, the first of which is that of update 1. Raises what the actor raises."""
        for window in windows:
            started, dropped = time.monotonic(), Counter[str]()
            groups = self._recorded.groups(window)
            kept = self._learning.usable(groups, dropped)
            report = await self._learning.update(kept, step=window.step)
            row = _row(report, with_own_rewards(kept, groups), window)
            self._journal.append(row | {"dropped": dict(dropped), "timing": {"total": time.monotonic() - started}})
            await self._checkpoint(window.step, is_last=window is windows[-1])

    async def _checkpoint(self, step: int, *, is_last: bool) -> None:
        every = self._config.train.checkpoint_every
        if is_last or (every and step % every == 0):
            folder = self._checkpoints.begin(step)
            await self._actor.save(folder, step=step, progress=self._learning.progress())
            self._checkpoints.commit(step)


def _row(report: StepReport, groups: Sequence[Group], window: WindowRow) -> dict[str, Any]:
    return {
        "step": report.step,
        "policy_version": window.policy_version,
        **window_stats(groups, window.policy_version),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "logprob_gap_mean": report.logprob_gap_mean,
        "logprob_gap_max": report.logprob_gap_max,
        **report.metrics,
        "info_mean": info_means([rollout for group in groups for rollout in group.rollouts]),
    }
