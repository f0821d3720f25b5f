"""How much work is offered to the workers: as much as the staleness bound allows, and no more than is still needed."""

from collections import Counter
from collections.abc import Sequence

from molt.train.config import Config
from molt.train.pool.pool import Pool
from molt.train.pool.rows import GroupRow
from molt.train.pool.tasks import Dataset, TaskOrder
from molt.train.records.rollout import Task


class Admission:
    """Opens groups so that none should be older than `train.max_staleness` versions when it is trained.

    A group opened now is trained after those that are open, complete, or held for the window in work. With B groups an
    update, at most (max_staleness + 1) * B of them may be outstanding, so that it is its turn within max_staleness
    updates (the bound of AReaL, arXiv 2505.24298, section 5.1). A group that falls behind the others all the same is
    refused when its window is put together.
    """

    def __init__(self, config: Config, pool: Pool, sets: Sequence[Dataset]):
        data = config.data
        self._pool = pool
        self._order = TaskOrder(sets, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs) if sets else None
        self._task_ids = frozenset(task.task_id for one in sets for task in one.tasks)
        self._size, self._extra = config.rollout.group_size, config.rollout.oversample
        self._per_update = config.train.groups_per_update
        self._bound = (config.train.max_staleness + 1) * self._per_update
        self._skipped_to = 0
        self.updates_left = config.train.num_updates
        """Updates not finished yet, the one in work included."""
        self.held = 0
        """Groups taken for the window in work."""
        self.paused = True
        """Nothing is opened: before training, during an evaluation, and where there are no tasks."""
        self.is_exhausted = False
        """`data.epochs` are used up: nothing more will be opened."""
        self.dropped: Counter[str] = Counter()
        """`tasks_quarantined`: positions that were passed over, since their tasks kill what attempts them."""

    def __call__(self) -> None:
        """Open what may be opened now."""
        if self.paused or self._order is None:
            return
        wanted = min(self._bound, self.updates_left * self._per_update) - self.held
        while self._pool.num_open + self._pool.num_ready < wanted:
            found = self._next(self._order)
            if found is None:
                return
            position, task = found
            self._open(task, position)

    def reopen(self, group: GroupRow) -> bool:
        """Offer the task of a train group that was dropped anew, at its position. False when it may not be."""
        if group.key is not None or group.position is None or group.task.task_id in self._pool.quarantined:
            return False
        self._open(group.task, group.position)
        return True

    @property
    def is_all_quarantined(self) -> bool:
        """There are tasks, but none that could be offered."""
        return bool(self._task_ids) and self._task_ids <= self._pool.quarantined.keys()

    def _open(self, task: Task, position: int) -> None:
        self._pool.open_group(task, kind="train", size=self._size, position=position, extra=self._extra)

    def _next(self, order: TaskOrder) -> tuple[int, Task] | None:
        """The next position of the data with a task that may be offered; None when there is none."""
        while not self.is_all_quarantined:
            position = max(self._pool.next_position, self._skipped_to)
            task = order.at(position)
            self.is_exhausted = task is None
            if task is None:
                return None
            if task.task_id not in self._pool.quarantined:
                return position, task
            self._skipped_to = position + 1
            self.dropped["tasks_quarantined"] += 1
        return None
