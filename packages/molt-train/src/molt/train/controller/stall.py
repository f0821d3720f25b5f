"""Every wait of a run has a name and a limit; a run that makes no progress says who waits for whom, and stops.

Progress is of two kinds. What brings an update or an evaluation nearer starts the limit anew. Mere activity (a
generation that ends, an attempt that is reported) only stretches it, as far as the rollouts under way may take with all
their attempts: a sandbox that always fails keeps everyone busy, and must not keep a stuck run alive.
"""

import logging
import time
from collections.abc import Callable, Hashable
from datetime import datetime
from pathlib import Path

import msgspec

from molt.train.errors import StallError
from molt.train.observe.stacks import ask, own_stacks
from molt.train.observe.waits import Waits

WORKER_LIMIT_S = 3600.0
STACKS_TIMEOUT_S = 10.0
"""How long a report waits for the stacks of other processes."""

log = logging.getLogger(__name__)


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at to tell whether anything happens: whatever changes either value."""

    progress: Hashable
    """Rollouts that count, updates, evaluations."""
    activity: Hashable
    """Generations and attempts that ended, to what end ever."""


class StallGuard:
    """Compares `signs` between checks. Nobody else has to call anything: whoever waits checks while it waits.

    Args:
        limit_s: Seconds without progress and activity after which the run is stuck.
        signs: What to compare.
        any_worker: Until one has shown up the limit is an hour, since somebody may be about to start one.
        patience_s: Seconds without progress that activity can fill, beyond `limit_s`.
        report: Called once when the run is stuck, with what it waits for; returns where it wrote more.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        signs: Callable[[], Signs],
        any_worker: Callable[[], bool],
        patience_s: float = 0.0,
        report: Callable[[str], str] | None = None,
    ):
        self._limit_s, self._patience_s = limit_s, patience_s
        self._signs, self._any_worker, self._report = signs, any_worker, report
        self._last: Signs | None = None
        self._progressed = self._active = time.monotonic()

    def check(self, waiting_for: str) -> None:
        """Raises StallError when nothing has happened for the limit."""
        signs, now = self._signs(), time.monotonic()
        if self._last is None or signs.progress != self._last.progress:
            self._progressed = self._active = now
        elif signs.activity != self._last.activity:
            self._active = now
        self._last = signs
        limit = self._limit_s if self._any_worker() else max(self._limit_s, WORKER_LIMIT_S)
        idle, fruitless = now - self._active, now - self._progressed
        if idle > limit:
            raise StallError(self._told(f"nothing happened for {idle:.0f} s", waiting_for))
        if fruitless > limit + self._patience_s:
            raise StallError(self._told(f"no progress for {fruitless:.0f} s, though attempts go on,", waiting_for))

    def _told(self, what: str, waiting_for: str) -> str:
        where = self._report(waiting_for) if self._report else ""
        return f"{what} while waiting for {waiting_for}" + (f"; {where}" if where else "")


class StallReport:
    """Writes down who waits for whom, since when, and where every process is at.

    Args:
        logs: Folder of the run's logs; reports are `stall-TIME.txt` in it.
        stacks: Folder in which the run's processes listen.
        waits: What is waited for.
        parts: What everyone is doing, by heading.
    """

    def __init__(self, logs: Path, stacks: Path, *, waits: Waits, parts: Callable[[], dict[str, str]]):
        self._logs, self._stacks, self._waits, self._parts = logs, stacks, waits, parts

    def __call__(self, waiting_for: str) -> str:
        """Write the report, to a file and, but for the stacks, to the log. Says where it is."""
        parts = {"waiting for": waiting_for, "waits": "\n".join(map(str, self._waits.now())) or "none", **self._parts()}
        told = _render(parts)
        log.error("the run is stuck\n%s", told)
        stacks = {"stacks of the server": own_stacks()}
        asked = ask(self._stacks, timeout_s=STACKS_TIMEOUT_S)
        stacks |= {f"stacks of {name}": text for name, text in sorted(asked.items())}
        path = self._logs / f"stall-{datetime.now():%Y%m%d-%H%M%S}.txt"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            path.write_text(told + _render(stacks))
        except OSError as error:  # a full disk may be why the run is stuck
            return f"the report is in the log only: {error.strerror}"
        return f"{path} has the whole report"


def _render(parts: dict[str, str]) -> str:
    return "".join(f"{heading}:\n{_indent(text)}\n" for heading, text in parts.items())


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())
