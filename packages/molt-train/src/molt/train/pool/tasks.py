"""Task rows from JSONL, and the endless, reproducible order in which they are used."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from molt.train.errors import ConfigError
from molt.train.records.rollout import Task


def load_tasks(path: Path) -> list[Task]:
    """Read one task a line; blank lines are skipped.

    A task's id is its row's `task_id`, else its `id`, else the row's number from 0.

    Raises:
        ConfigError: the file is missing or holds no row, a row is no JSON object, or two rows share an id. The message
            names the file and the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"task file {str(path)!r} cannot be read: {error.strerror}") from None
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _decode_row(line, where)
        task_id = _task_id(row, where, default=str(len(tasks)))
        if task_id in line_of:
            raise ConfigError(f"{where}: task id {task_id!r} is already the id of line {line_of[task_id]}")
        line_of[task_id] = number
        tasks.append(Task(task_id=task_id, data=row))
    if not tasks:
        raise ConfigError(f"task file {str(path)!r} has no rows; give at least one JSON object a line")
    return tasks


def _decode_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a task is a JSON object, but this row is {type(row).__name__} {row!r:.40}")
    return row


def _task_id(row: dict[str, Any], where: str, *, default: str) -> str:
    for key in ("task_id", "id"):
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ConfigError(f"{where}: {key} is {value!r:.40}; it must be a string or an integer")
        return str(value)
    return default


class TaskOrder:
    """An endless order of tasks in which one integer, the data position, says everything.

    Each epoch uses every task once. With `shuffle` its order depends on the seed and the epoch's number only, so a run
    that resumes at a position goes on as if it had never stopped.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool) -> None:
        if not tasks:
            raise ValueError("an order needs at least one task")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation: Sequence[int] = range(len(tasks))

    def at(self, position: int) -> Task:
        """The task at `position`, counted from 0 over all epochs."""
        if position < 0:
            raise ValueError(f"position is {position}; it must not be negative")
        epoch, index = divmod(position, len(self._tasks))
        if self._shuffle and epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(len(self._tasks)))
            # A string seed is hashed with SHA-512, so neighbouring seeds and epochs give unrelated orders.
            random.Random(f"{self._seed}/{epoch}").shuffle(self._permutation)
        return self._tasks[self._permutation[index]]
