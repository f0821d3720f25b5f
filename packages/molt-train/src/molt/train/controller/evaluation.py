"""Evaluation: held-out tasks, rolled out by the same workers, never trained on.

    tasks --> eval groups --> workers, with the sampling of [eval] --> one row of `evaluations.jsonl`

Pinned, the caller keeps the policy as it is while it awaits the evaluation. Otherwise one is started, training goes on,
and `poll` gives its row when the last rollout is in.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from molt.train.config import EvalConfig
from molt.train.controller.eval_metrics import Sample, summarise
from molt.train.controller.stall import StallGuard
from molt.train.observe.journal import Journal, read_journal
from molt.train.pool.pool import Pool
from molt.train.records.recording import Recording
from molt.train.records.rollout import Group, Task

log = logging.getLogger(__name__)


class _Running(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation under way."""

    step: int
    policy_version: int
    group_ids: list[str]


class Evaluation:
    """Runs every task `settings.samples` times and writes one row to `evaluations.jsonl`."""

    def __init__(
        self, pool: Pool, tasks: Sequence[Task], *, settings: EvalConfig, journal: Journal, stall: StallGuard
    ) -> None:
        self._pool, self._tasks, self._settings = pool, tasks, settings
        self._journal, self._stall = journal, stall
        self._running: _Running | None = None
        self._num_skipped = 0

    def is_done(self, step: int) -> bool:
        """Whether the policy after update `step` has been evaluated, by an earlier process perhaps."""
        return any(row["step"] == step for row in read_journal(self._journal.path))

    def best_step(self) -> int | None:
        """The update with the best evaluation so far, see `best_step`."""
        return best_step(read_journal(self._journal.path))

    async def __call__(self, *, step: int, policy_version: int) -> dict[str, Any]:
        """Evaluate; the caller sees to it that the version stays the same meanwhile. Returns the row.

        One that was started before is finished first. Raises StallError when the workers make no progress.
        """
        await self.finish()
        self.start(step=step, policy_version=policy_version)
        row = await self.finish()
        assert row is not None, "what was started above ends with a row"
        return row

    def start(self, *, step: int, policy_version: int) -> bool:
        """Offer the tasks to the workers, and go on. False, and counted, when the last evaluation has not ended."""
        if self._running is not None:
            self._num_skipped += 1
            return False
        size = self._settings.samples
        ids = [self._pool.open_group(task, kind="eval", size=size, position=None) for task in self._tasks]
        self._running = _Running(step=step, policy_version=policy_version, group_ids=ids)
        return True

    async def poll(self) -> dict[str, Any] | None:
        """The row of the evaluation that was started, once its last rollout is in; None before, and without one."""
        running = self._running
        if running is None or not await self._pool.wait_eval(running.group_ids, timeout_s=0.0):
            return None
        return await self._write(running)

    async def finish(self) -> dict[str, Any] | None:
        """Wait for the evaluation that was started; None without one. Raises StallError without progress."""
        running = self._running
        if running is None:
            return None
        while not await self._pool.wait_eval(running.group_ids, timeout_s=1.0):
            self._stall.check("evaluation rollouts")
        return await self._write(running)

    async def _write(self, running: _Running) -> dict[str, Any]:
        groups = self._pool.take_eval(running.group_ids)
        samples: list[Sample] = []
        for task, group in zip(self._tasks, groups, strict=True):
            samples += self._samples_of(task, group)
            await asyncio.sleep(0)  # recordings are long; the gateway's calls go on between two groups
        row = {
            "step": running.step,
            "policy_version": running.policy_version,
            **summarise(samples, self._settings),
            "num_skipped": self._num_skipped,
        }
        self._journal.append(row)
        log.info("evaluation after update %d: reward %.3f", running.step, row["reward_mean"])
        self._running, self._num_skipped = None, 0
        return row

    def _samples_of(self, task: Task, group: Group) -> Iterator[Sample]:
        """The members of a group, with what their sessions recorded; one that was lost may have recorded nothing."""
        rows = self._pool.ledger.each_rollout(group.group_id)
        sampled = {row.rollout_id: _sampled(row.recording) for row in rows}
        for rollout in group.rollouts:
            num_tokens, versions = sampled.get(rollout.rollout_id, (0, set[int]()))
            yield Sample(
                task_id=task.task_id,
                dataset=task.dataset,
                outcome=rollout.outcome,
                num_action_tokens=num_tokens,
                oldest_version=min(versions, default=None),
                newest_version=max(versions, default=None),
            )


def _sampled(recording: Recording | None) -> tuple[int, set[int]]:
    """How many tokens the agent took of the policy, and the versions that sampled them.

    By its turns, not by its segments: those that a forked rollout's segments share count once, and those of a greedy
    evaluation, which nothing trains, count too.
    """
    taken = [turn for turn in recording.turns if turn.status == "delivered" and turn.adopted] if recording else []
    return sum(len(turn.token_ids) for turn in taken), {version for turn in taken for version in turn.versions}


def best_step(rows: Iterable[dict[str, Any]]) -> int | None:
    """The update with the highest `reward_mean` of all evaluated ones, the earliest of equals; None without one.

    Not the policy before the first update, which no checkpoint holds, nor an evaluation in which nothing counted.
    """
    rated = [(row["reward_mean"], -row["step"]) for row in rows if row["step"] > 0 and row["num_rollouts"]]
    return -max(rated)[1] if rated else None
