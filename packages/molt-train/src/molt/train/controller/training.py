"""The training loop. Rollouts stay in flight all the time: this loop takes complete groups and gives new weights.

      tasks --Admission--> open groups --leases--> workers --model calls--> engines
                               |  results                                     ^
                               v                                              | refit: version v + 1
                        complete groups --window--> advantages, loss, update --+

Consumes: complete groups of the pool, those with the oldest tokens first.
Waits for: `train.groups_per_update` groups that are young enough; the actor; the engines.
Produces: one policy version an update, one row of `metrics.jsonl`, checkpoints.
Unblocked by: workers' results; a stall guard bounds the wait.

What is durable when, so that a process may die at any point: the window of an update is in the ledger before the ranks
are given it; its row is in the journal before its checkpoint is renamed to its name. So the windows recorded after the
newest checkpoint are what a process that starts has to train again, of the same groups in the same order.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from molt.train.config import Config
from molt.train.controller.admission import Admission
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.collect import Collector
from molt.train.controller.evaluation import Evaluation
from molt.train.controller.learning import Learning, with_own_rewards
from molt.train.controller.serving import Serving
from molt.train.controller.stall import StallGuard
from molt.train.controller.update_rows import Trained, UpdateRows
from molt.train.errors import ActorDeadError, ActorError, DataExhausted, LedgerFullError, PayloadLostError
from molt.train.observe.journal import Journal
from molt.train.observe.waits import Waits
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Group

HEALTH_INTERVAL_S = 5.0
FULL_INTERVAL_S = 2.0

log = logging.getLogger(__name__)


class Actor(Protocol):
    """The state of the trained policy, on all ranks of it."""

    async def save(self, folder: Path, *, step: int, progress: dict[str, Any]) -> None:
        """Write a checkpoint of the state after update `step`, and of what the loop itself has to keep."""
        ...

    async def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """Resume from a checkpoint; returns its step and the loop's progress."""
        ...

    async def restart(self, cause: ActorError) -> None:
        """Start new ranks on the weights that the run began with. RunError when no restart is left."""
        ...

    async def check_health(self) -> None:
        """Raises ActorDeadError when a rank that is not at work is gone."""
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
    collector: Collector
    checkpoints: Checkpoints
    journal: Journal
    stall: StallGuard
    evaluation: Evaluation | None
    memory: Memory
    on_update: Sequence[Callable[[dict[str, Any]], None]]
    """Each is called with every row of the journal; not with those of updates that are made again."""
    waits: Waits = field(default_factory=Waits)


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
        self._timing = _Timing()
        self._ranks = asyncio.Lock()
        """Held by whoever works with the ranks."""
        self._rows = UpdateRows(
            parts.journal, collector=parts.collector, serving=parts.serving, on_update=parts.on_update
        )
        self.step = 0

    async def resume(self) -> None:
        """Get to where the run folder stands, and open the engines on that version.

        That is the newest checkpoint and the windows recorded after it, which are trained again. The engines are given
        what comes out, so that the versions that they serve never go back.
        """
        self.step = await self._rebuild(None, until=None)
        await self._parts.serving.open(self.step, send=self.step > 0)

    async def run(self) -> None:
        """Train to the end."""
        parts, last = self._parts, self._config.train.num_updates
        self._timing = _Timing()
        await self._after_update(is_last=self.step == last)
        parts.admission.paused = False
        while self.step < last:
            parts.admission.updates_left = last - self.step
            parts.admission()
            try:
                with parts.waits.on(f"the window of update {self.step + 1}"):
                    groups = await parts.collector.collect(self.step)
            except DataExhausted as error:
                log.info("training ends after update %d of %d: %s", self.step, last, error)
                break
            await self._record(groups)
            self._timing.lap("wait_rollouts")
            await self._advance(groups)
            del groups  # with them go the references of their payloads, while the next window fills
        parts.admission.updates_left = 0
        await self._after_update(is_last=True)

    async def watch_actor(self) -> None:
        """Replace ranks that die while nothing is asked of them, until cancelled.

        Raises RunError when no restart is left.
        """
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            async with self._ranks:
                await self._surviving(self._parts.actor.check_health)

    async def _record(self, groups: Sequence[Group]) -> None:
        """The window is in the ledger. While there is no room for it, wait for some."""
        while True:
            try:
                return self._parts.pool.ledger.record_window(
                    self.step + 1, self.step, [group.group_id for group in groups]
                )
            except LedgerFullError as error:
                log.warning("the window of update %d waits for room on the disk: %s", self.step + 1, error)
                await asyncio.sleep(FULL_INTERVAL_S)
                self._parts.stall.check("room on the disk of the run folder")

    async def _advance(self, groups: Sequence[Group]) -> None:
        """One update of recorded groups, whatever becomes of the ranks meanwhile."""
        parts, step = self._parts, self.step + 1
        async with self._ranks:
            await self._surviving(lambda: self._update(groups, step=step))
        parts.admission.held = 0
        parts.admission.updates_left = self._config.train.num_updates - self.step
        parts.admission()
        await self._after_update()

    async def _update(self, groups: Sequence[Group], *, step: int) -> None:
        if self.step >= step:
            return  # the ranks died when the engines had been offered it: it was made again to go on from there
        done = await self._train(groups, step=step)
        self._timing.lap("train")
        await self._parts.memory.after_window()
        with self._parts.waits.on(f"the engines to take the weights of version {step}"):
            await self._parts.serving.refit(step)
        self._timing.lap("refit")
        self.step = step
        self._report(done)

    async def _train(self, groups: Sequence[Group], *, step: int) -> Trained:
        """Train the ranks on groups; those whose payloads are gone from the object store come from the ledger again."""
        learning = self._parts.learning
        try:
            left_out = Counter[str]()
            report = await learning.update(kept := learning.usable(groups, left_out), step=step)
        except PayloadLostError as error:
            log.warning("update %d takes its groups from the ledger again: %s", step, error)
            groups, left_out = self._parts.pool.recorded_groups([group.group_id for group in groups]), Counter[str]()
            report = await learning.update(kept := learning.usable(groups, left_out), step=step)
        return Trained(with_own_rewards(kept, groups), report, left_out)

    def _report(self, done: Trained) -> None:
        spent, self._timing = self._timing.spent, _Timing()
        self._rows.add(done, seconds=spent)

    # When ranks die.

    async def _surviving(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` with the ranks, as often as they die in it."""
        while True:
            try:
                return await work()
            except ActorDeadError as error:
                await self._recover(error)

    async def _recover(self, cause: ActorDeadError) -> None:
        """New ranks take the place of dead ones, with the weights of the version that the engines were last offered.

        The engines go on serving what they have; at the end they are sent the weights again, as the same version.
        """
        serving = self._parts.serving
        while True:
            log.warning("the actor is started anew: %s", cause)
            try:
                async with serving.detached():
                    self.step = await self._rebuild(cause, until=serving.offered)
                await serving.reconnect()
                await serving.refit(serving.offered)
            except ActorDeadError as error:
                cause = error
            else:
                return

    async def _rebuild(self, cause: ActorDeadError | None, *, until: int | None) -> int:
        """Bring ranks from nothing to the last recorded update, or update `until`. Returns its number.

        They are new ones when there is a `cause`. Those that die meanwhile are replaced, too.
        """
        while True:
            try:
                if cause is not None:
                    await self._parts.actor.restart(cause)
                return await self._replay(until=until)
            except ActorDeadError as error:
                cause = error

    async def _replay(self, *, until: int | None) -> int:
        """Load the newest checkpoint, and train the windows recorded after it again, as they were."""
        parts = self._parts
        latest = parts.checkpoints.latest()
        step, progress = await parts.actor.load(latest[1]) if latest else (0, {})
        if latest:
            log.info("resumed from the checkpoint of update %d", step)
        parts.learning.restore(progress)
        self._rows.rewind(step)
        for window in parts.pool.ledger.rewind(step):
            if until is not None and window.step > until:
                break
            log.info("training the recorded window of update %d again", window.step)
            self._timing = _Timing()
            done = await self._train(parts.pool.recorded_groups(window.group_ids), step=window.step)
            self._timing.lap("train")
            self._report(done)
            step = window.step
        return step

    # After an update.

    async def _after_update(self, *, is_last: bool = False) -> None:
        """What is due now that `step` updates were made: a checkpoint, an evaluation, or neither."""
        is_last = is_last or self.step == self._config.train.num_updates
        async with self._ranks:
            await self._surviving(lambda: self._checkpoint(is_last=is_last))
        if self._parts.evaluation is not None:
            await self._evaluate(self._parts.evaluation, is_last=is_last)

    async def _checkpoint(self, *, is_last: bool) -> None:
        every, checkpoints = self._config.train.checkpoint_every, self._parts.checkpoints
        evaluation = self._config.eval
        may_be_best = evaluation.keep_best and self.step % evaluation.every == 0
        is_due = is_last or (every and self.step % every == 0) or may_be_best
        if self.step == 0 or not is_due or self.step in checkpoints.steps():
            return
        folder, progress = checkpoints.begin(self.step), self._parts.learning.progress()
        await self._parts.actor.save(folder, step=self.step, progress=progress)
        self._rows.sync()  # so that every checkpointed update has its row, whatever happens
        checkpoints.commit(self.step)
        self._timing.lap("checkpoint")

    async def _evaluate(self, evaluation: Evaluation, *, is_last: bool) -> None:
        """Evaluate if that is due. Unless `eval.pinned`, training goes on meanwhile, but for the last one."""
        every, version = self._config.eval.every, self._parts.serving.version
        is_due = is_last or self.step == 0 or (every and self.step % every == 0)
        await (evaluation.finish() if is_last else evaluation.poll())
        if is_due and not evaluation.is_done(self.step):
            if self._config.eval.pinned or is_last:
                admission = self._parts.admission
                paused, admission.paused = admission.paused, True
                with self._parts.waits.on(f"the evaluation after update {self.step}"):
                    await evaluation(step=self.step, policy_version=version)
                admission.paused = paused
                self._timing = _Timing()
            else:
                evaluation.start(step=self.step, policy_version=version)
        if self._config.eval.keep_best:
            self._keep_best(evaluation.best_step())

    def _keep_best(self, step: int | None) -> None:
        """Mark the best checkpoint: every update with an evaluation has one, since it may turn out to be the best."""
        checkpoints = self._parts.checkpoints
        if step is not None and step != checkpoints.best and step in checkpoints.steps():
            checkpoints.mark_best(step)
