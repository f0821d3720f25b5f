"""The live view of a run on stderr: a bar on a terminal, one plain line an update elsewhere."""

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

RECENT = 10
"""Updates whose mean duration predicts the time left."""


class ProgressView:
    """Shows reward, throughput, staleness and time left. A context manager; `update` takes the rows of the journal.

    Args:
        num_updates: Updates that the run makes in all.
        console: Where to show it; stderr unless given.
    """

    def __init__(self, num_updates: int, *, console: Console | None = None) -> None:
        self._num_updates = num_updates
        self._console = console or Console(stderr=True)
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._bar = Progress(
            TextColumn("update"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("waiting for rollouts", total=num_updates)

    def __enter__(self) -> "ProgressView":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show one finished update."""
        self._seconds.append(row["timing"]["total"])
        summary = summarise(row, seconds_left=self._seconds_left(row["step"]))
        self._bar.update(self._task, completed=row["step"], description=summary)
        if not self._console.is_terminal:
            line = f"update {row['step']}/{self._num_updates}  {summary}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _seconds_left(self, step: int) -> float:
        return (self._num_updates - step) * sum(self._seconds) / len(self._seconds)


def summarise(row: Mapping[str, Any], *, seconds_left: float) -> str:
    """One line about an update: reward, rollouts and action tokens a second, staleness in versions, time left."""
    seconds = max(row["timing"]["total"], 1e-9)
    return (
        f"reward {row['reward_mean']:.3f}  "
        f"{row['num_rollouts'] / seconds:.1f} rollouts/s  {row['num_action_tokens'] / seconds:.0f} tokens/s  "
        f"staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  "
        f"left {timedelta(seconds=round(seconds_left))}"
    )
