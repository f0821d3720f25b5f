"""How much work is offered to the workers: as much as the staleness bound allows, and no more than is still needed."""

from collections.abc import Sequence

from molt.train.config import Config
from molt.train.pool.pool import Pool
from molt.train.pool.tasks import TaskOrder
from molt.train.records.rollout import Task


class Admission:
    """Opens groups so that none should be older than `train.max_staleness` versions when it is trained.

    A group opened now is trained after those that are open, complete, or held for the window in work. With B groups an
    update, at most (max_staleness + 1) * B of them may be outstanding, so that it is its turn within max_staleness
    updates (the bound of AReaL, arXiv 2505.24298, section 5.1). A group that falls behind the others all the same is
    refused when its window is put together.
    """

    def __init__(self, config: Config, pool: Pool, tasks: Sequence[Task]):
        self._pool = pool
        self._order = TaskOrder(tasks, seed=config.run.seed, shuffle=config.data.shuffle) if tasks else None
        self._group_size = config.rollout.group_size
        self._per_update = config.train.groups_per_update
        self._bound = (config.train.max_staleness + 1) * self._per_update
        self.updates_left = config.train.num_updates
        """Updates not finished yet, the one in work included."""
        self.held = 0
        """Groups taken for the window in work."""
        self.paused = True
        """Nothing is opened: before training, during an evaluation, and where there are no tasks."""

    def __call__(self) -> None:
        """Open what may be opened now."""
        if self.paused or self._order is None:
            return
        wanted = min(self._bound, self.updates_left * self._per_update) - self.held
        while self._pool.num_open + self._pool.num_ready < wanted:
            position = self._pool.next_position
            self._pool.open_group(self._order.at(position), kind="train", size=self._group_size, position=position)
