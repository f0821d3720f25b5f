"""What a run waits for at the moment. Every wait has a name, and most have a limit."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One wait."""

    name: str
    """What for."""
    seconds: float
    """How long it has lasted."""
    limit_s: float | None = None
    """How long it may last; None: its owner has no limit of its own, and the stall guard's holds."""

    def __str__(self) -> str:
        limit = "" if self.limit_s is None else f", at most {self.limit_s:.0f} s"
        return f"{self.name}: for {self.seconds:.1f} s{limit}"


class Waits:
    """The waits under way, for whoever has to say why nothing happens.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, float, float | None]] = {}

    @contextmanager
    def on(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        """Wait for `name` in the block, for at most `limit_s`, which is the block's to keep."""
        number = next(self._numbers)
        self._open[number] = (name, self._clock(), limit_s)
        try:
            yield
        finally:
            del self._open[number]

    def now(self) -> list[Wait]:
        """The waits under way, the longest first."""
        now = self._clock()
        return [Wait(name=name, seconds=now - since, limit_s=limit) for name, since, limit in self._open.values()]
