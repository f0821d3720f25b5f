"""The training loop. Rollouts stay in flight all the time: this loop takes complete groups and gives new weights.

      tasks --Admission--> open groups --leases--> workers --model calls--> engines
                               |  results                                     ^
                               v                                              | refit: version v + 1
                        complete groups --window--> advantages, loss, update --+

Consumes: complete groups of the pool, in the order in which they completed.
Waits for: `train.groups_per_update` groups that are young enough; the actor; the engines.
Produces: one policy version an update, one row of `metrics.jsonl`, checkpoints.
Unblocked by: workers' results; a stall guard bounds the wait.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from molt.train.config import Config
from molt.train.controller.admission import Admission
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.evaluation import Evaluation, info_means
from molt.train.controller.learning import Learning, with_own_rewards
from molt.train.controller.serving import Serving
from molt.train.controller.stall import StallGuard
from molt.train.observe.journal import Journal
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Group
from molt.train.records.window import StepReport
from molt.train.window import window_stats

log = logging.getLogger(__name__)


class Actor(Protocol):
    """The state of the trained policy, on all ranks of it."""

    async def save(self, folder: Path, *, step: int, progress: dict[str, Any]) -> None:
        """Write a checkpoint of the state after update `step`, and of what the loop itself has to keep."""
        ...

    async def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """Resume from a checkpoint; returns its step and the loop's progress."""
        ...


class Memory(Protocol):
    """Who compares what was planned with what is held."""

    async def after_window(self) -> None:
        """A window was trained."""
        ...


@dataclass(frozen=True)
class Parts:
    """What the loop works with."""

    pool: Pool
    actor: Actor
    learning: Learning
    serving: Serving
    admission: Admission
    checkpoints: Checkpoints
    journal: Journal
    stall: StallGuard
    evaluation: Evaluation | None
    memory: Memory
    on_update: Sequence[Callable[[dict[str, Any]], None]]
    """Each is called with every row of the journal."""


@dataclass
class _Timing:
    """Seconds of one update, by what they were spent on."""

    started: float = field(default_factory=time.monotonic)
    spent: dict[str, float] = field(default_factory=dict)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.spent[name] = now - self.started - sum(self.spent.values())


class TrainingLoop:
    """Makes `train.num_updates` updates, from wherever the run folder stands."""

    def __init__(self, config: Config, parts: Parts):
        self._config, self._parts = config, parts
        self._dropped: Counter[str] = Counter()
        self._timing = _Timing()
        self.step = 0

    async def resume(self) -> None:
        """Load the newest checkpoint, and open the engines on its version."""
        latest = self._parts.checkpoints.latest()
        if latest is not None:
            self.step, progress = await self._parts.actor.load(latest[1])
            self._parts.learning.restore(progress)
            log.info("resumed from the checkpoint of update %d", self.step)
        self._parts.journal.truncate_after(self.step)
        await self._parts.serving.open(self.step, send=self.step > 0)

    async def run(self) -> None:
        """Train to the end. Windows that were recorded after the checkpoint are trained again, as they were."""
        parts, last = self._parts, self._config.train.num_updates
        self._timing = _Timing()
        if self.step == 0:
            await self._evaluate()
        for window in parts.pool.ledger.rewind(self.step):
            log.info("training the recorded window of update %d again", window.step)
            await self._update(parts.pool.recorded_groups(window.group_ids))
        parts.admission.paused = False
        while self.step < last:
            parts.admission.updates_left = last - self.step
            parts.admission()
            groups = await self._collect()
            parts.pool.ledger.record_window(self.step + 1, self.step, [group.group_id for group in groups])
            self._timing.lap("wait_rollouts")
            await self._update(groups)
        parts.admission.updates_left = 0
        await self._evaluate()

    async def _collect(self) -> list[Group]:
        """Take groups until the window is full; what may not be trained is dropped under a named reason."""
        pool, admission, wanted = self._parts.pool, self._parts.admission, self._config.train.groups_per_update
        groups: list[Group] = []
        while len(groups) < wanted:
            while not await pool.wait_groups(1, timeout_s=1.0):
                self._parts.stall.check(f"{wanted - len(groups)} more complete groups")
            for group in pool.take(min(pool.num_ready, wanted - len(groups))):
                reason = self._refuse(group)
                if reason is None:
                    groups.append(group)
                else:
                    pool.drop(group.group_id, reason)
                    self._dropped[f"groups_{reason}"] += 1
            admission.held = len(groups)
            admission()
        return groups

    def _refuse(self, group: Group) -> str | None:
        """Why a complete group is not trained on; None when it is."""
        oldest = group.oldest_version
        if oldest is not None and self.step - oldest > self._config.train.max_staleness:
            return "stale"
        kept = self._parts.learning.usable([group])
        return None if kept else "no_usable_rollouts"

    async def _update(self, groups: list[Group]) -> None:
        parts, config = self._parts, self._config
        kept = parts.learning.usable(groups, self._dropped)
        report = await parts.learning.update(kept, step=self.step + 1)
        self._timing.lap("train")
        await parts.memory.after_window()
        await parts.serving.refit(report.step)
        self._timing.lap("refit")
        self.step = report.step
        parts.admission.held = 0
        parts.admission.updates_left = config.train.num_updates - self.step
        parts.admission()
        self._report(
            with_own_rewards(kept, groups), report
        )  # before the checkpoint, so that every checkpointed update has its row
        await self._checkpoint()
        every = config.eval.every
        if every and self.step % every == 0:
            await self._evaluate()

    async def _checkpoint(self) -> None:
        every, last = self._config.train.checkpoint_every, self._config.train.num_updates
        if self.step == last or (every and self.step % every == 0):
            folder, progress = self._parts.checkpoints.begin(self.step), self._parts.learning.progress()
            await self._parts.actor.save(folder, step=self.step, progress=progress)
            self._parts.checkpoints.commit(self.step)
            self._timing.lap("checkpoint")

    async def _evaluate(self) -> None:
        if self._parts.evaluation is None or self._parts.evaluation.is_done(self.step):
            return
        admission = self._parts.admission
        paused, admission.paused = admission.paused, True
        row = await self._parts.evaluation(step=self.step, policy_version=self._parts.serving.version)
        admission.paused = paused
        self._timing = _Timing()
        log.info("evaluation after update %d: reward %.3f", self.step, row["reward_mean"])

    def _report(self, groups: list[Group], report: StepReport) -> None:
        spent, self._timing = self._timing.spent, _Timing()
        row = {
            "step": report.step,
            "policy_version": report.step - 1,
            **window_stats(groups, report.step - 1),
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "logprob_gap_mean": report.logprob_gap_mean,
            "logprob_gap_max": report.logprob_gap_max,
            **report.metrics,
            "prefix_hit_rate": self._parts.serving.take_prefix_hit_rate(),
            "info_mean": info_means([rollout for group in groups for rollout in group.rollouts]),
            "dropped": dict(self._dropped),
            "timing": {"wait_rollouts": 0.0, **spent, "total": sum(spent.values())},
        }
        self._dropped.clear()
        self._parts.journal.append(row)
        for observe in self._parts.on_update:
            observe(row)
