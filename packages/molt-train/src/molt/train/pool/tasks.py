"""Task rows from JSONL, data sets of them, and the reproducible order in which they are used."""

import random
from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any

import msgspec

from molt.train.config import DatasetConfig
from molt.train.errors import ConfigError
from molt.train.records.rollout import Task

MAX_PERIOD = 100_000
"""Positions after which the turns of data sets repeat; weights count to that part of their sum. It bounds what it takes
to find any position."""


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one file, and their share of the order."""

    tasks: Sequence[Task]
    """In the order of the file; their ids start with `name`."""
    name: str = ""
    """Empty where there is only one set, which nobody had to name."""
    weight: float = 1.0
    """Relative to the other sets'. Without effect on an evaluation."""


def load_datasets(path: str, sets: Sequence[DatasetConfig]) -> list[Dataset]:
    """The data sets of a section: those that `sets` names, else the one of `path`, else none.

    Raises ConfigError as `load_tasks` does.
    """
    if sets:
        return [Dataset(tasks=_named_tasks(one), name=one.name, weight=one.weight) for one in sets]
    return [Dataset(tasks=load_tasks(Path(path)))] if path else []


def _named_tasks(settings: DatasetConfig) -> list[Task]:
    return [
        msgspec.structs.replace(
            task,
            task_id=f"{settings.name}/{task.task_id}",
            dataset=settings.name,
            labels=settings.labels,
        )
        for task in load_tasks(Path(settings.path))
    ]


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
    """A reproducible order of tasks in which one integer, the data position, says everything.

    Sets take turns by their weights, evenly: among the first n positions each has its share of n, give or take less
    than one. Each epoch of a set uses every task of it once. With `shuffle` the order of an epoch depends on the seed,
    the set's name and the epoch's number only, so a run that resumes at a position goes on as if it had never stopped.

    Args:
        sets: At least one, none of them empty.
        seed: The run's.
        shuffle: Whether epochs have an order of their own, or that of the file.
        epochs: How often each task is used, as far as the set that is used up first allows. 0: without end.
    """

    def __init__(self, sets: Sequence[Dataset], *, seed: int, shuffle: bool, epochs: int = 0) -> None:
        if not sets or not all(one.tasks for one in sets):
            raise ValueError("an order needs at least one data set, and each at least one task")
        self._turns = _Turns([one.weight for one in sets])
        self._epochs = [_Epochs(one, seed=seed, shuffle=shuffle) for one in sets]
        self._ends = [epochs * len(one.tasks) for one in sets]

    def at(self, position: int) -> Task | None:
        """The task at `position`, counted from 0 over all epochs; None where the set whose turn it is is used up.

        The data end at the first such position, though other sets may have tasks left.
        """
        if position < 0:
            raise ValueError(f"position is {position}; it must not be negative")
        number, place = self._turns.at(position)
        end = self._ends[number]
        return None if end and place >= end else self._epochs[number].at(place)


class _Epochs:
    """One set's tasks, again and again."""

    def __init__(self, dataset: Dataset, *, seed: int, shuffle: bool) -> None:
        self._tasks = dataset.tasks
        # A string seed is hashed with SHA-512, so neighbouring seeds and epochs give unrelated orders.
        self._seed = f"{seed}/{dataset.name}/" if dataset.name else f"{seed}/"
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation: Sequence[int] = range(len(self._tasks))

    def at(self, place: int) -> Task:
        """The task used after `place` others of the set."""
        epoch, index = divmod(place, len(self._tasks))
        if self._shuffle and epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(len(self._tasks)))
            random.Random(f"{self._seed}{epoch}").shuffle(self._permutation)
        return self._tasks[self._permutation[index]]


class _Turns:
    """Whose turn it is at each position: the chairman assignment (R. Tijdeman, 1980), the most even order there is.

    With K sets, none is ever further from its share than 1 - 1 / (2K - 2) positions. A set may have its next turn once
    it is 1 / (2K - 2) behind its share, must have it before it is 1 minus that behind, and of those that may, the one
    that must soonest has it. Everything repeats after as many positions as the weights, in whole numbers, add up to.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = _whole_numbers(weights)
        self._period = sum(self._weights)
        self._parts = max(2 * len(weights) - 2, 2)
        self._num_turns = [0] * len(weights)
        # Of each position of the first period, as far as they were looked up: the set, and its turns before.
        self._sets = array("H")
        self._places = array("L")

    def at(self, position: int) -> tuple[int, int]:
        """The number of the set, and how many turns it had before."""
        period, index = divmod(position, self._period)
        if index >= len(self._sets):
            self._extend(index + 1)
        number = self._sets[index]
        return number, period * self._weights[number] + self._places[index]

    def _extend(self, length: int) -> None:
        period, parts, turns = self._period, self._parts, self._num_turns
        costs, everyone = [parts * weight for weight in self._weights], range(len(turns))
        # Both in positions from 1, the first rounded up to whole ones: no rounding may forbid a turn that is due.
        may = [-(-(turns[k] * parts + 1) * period // costs[k]) for k in everyone]
        must = [((turns[k] + 1) * parts - 1) * period / costs[k] for k in everyone]
        for now in range(len(self._sets) + 1, length + 1):
            k = min([k for k in everyone if may[k] <= now], key=must.__getitem__)
            self._sets.append(k)
            self._places.append(turns[k])
            turns[k] += 1
            may[k] = -(-(turns[k] * parts + 1) * period // costs[k])
            must[k] = ((turns[k] + 1) * parts - 1) * period / costs[k]


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the same proportions: exactly, where their sum is at most `MAX_PERIOD`, else nearly."""
    fractions = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * common) for fraction in fractions]
    divisor = max(Fraction(gcd(*numbers)), Fraction(sum(numbers), MAX_PERIOD))
    return [max(1, round(number / divisor)) for number in numbers]
