"""Tasks that kill whatever attempts them, told apart from outages that would have killed anything."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from molt.train.pool.rows import GroupRow


class _Finish(NamedTuple):
    """A rollout that ended by itself, whatever its outcome, and not for an outage."""

    number: int
    task: tuple[str, str]


class Quarantine:
    """The tasks that are offered no more, by id, with the errors of the attempts that they killed.

    A train task is put here when a rollout of it has lost all its attempts to infrastructure while rollouts of other
    tasks finished: had it been a general outage, they would not have. What finished is remembered since the server
    started; a rollout whose first attempt was lost before that is judged by what finished since.
    """

    def __init__(self, tasks: dict[str, list[str]]) -> None:
        self.tasks: dict[str, Sequence[str]] = {**tasks}
        self._first_loss: dict[str, int] = {}
        """By rollout id: how many rollouts had finished when it lost its first attempt."""
        self._last = _Finish(0, ("", ""))
        self._last_of_other = _Finish(0, ("", ""))
        """The last finish of another task than that of `_last`."""

    def resume(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts have lost attempts before the server started."""
        for rollout_id in rollout_ids:
            self._first_loss[rollout_id] = self._last.number

    def finished(self, group: GroupRow) -> None:
        """A rollout of this group ended by itself."""
        task = (group.kind, group.task.task_id)
        if task != self._last.task:
            self._last_of_other = self._last
        self._last = _Finish(self._last.number + 1, task)

    def lost(self, group: GroupRow, rollout_id: str, *, is_last: bool) -> bool:
        """A rollout lost an attempt to infrastructure, its last one perhaps. True when that condemns its task."""
        first = self._first_loss.setdefault(rollout_id, self._last.number)
        task = (group.kind, group.task.task_id)
        of_others = self._last_of_other if self._last.task == task else self._last
        is_known = group.task.task_id in self.tasks
        return is_last and group.kind == "train" and not is_known and of_others.number > first

    def add(self, task_id: str, errors: Sequence[str]) -> None:
        """No more of this task."""
        self.tasks[task_id] = list(errors)

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts make no further attempts."""
        for rollout_id in rollout_ids:
            self._first_loss.pop(rollout_id, None)
