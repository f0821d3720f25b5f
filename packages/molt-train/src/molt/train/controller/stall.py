"""Every wait of a run has a name and a limit; a run that makes no progress says who waits for whom, and stops."""

import time
from collections.abc import Callable
from typing import Any

from molt.train.errors import StallError

WORKER_LIMIT_S = 3600.0


class StallGuard:
    """Compares `signature` between checks: whatever changes it is progress.

    `report` tells what everyone is doing, for the message. Until `any_worker` has shown up the limit is an hour, since
    somebody may be about to start one.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        signature: Callable[[], Any],
        report: Callable[[], str],
        any_worker: Callable[[], bool],
    ):
        self._limit_s = limit_s
        self._signature, self._report, self._any_worker = signature, report, any_worker
        self._last: Any = None
        self._since = time.monotonic()

    def check(self, waiting_for: str) -> None:
        """Raises StallError when nothing has changed for the limit."""
        now = self._signature()
        if now != self._last:
            self._last, self._since = now, time.monotonic()
            return
        limit = self._limit_s if self._any_worker() else max(self._limit_s, WORKER_LIMIT_S)
        stalled = time.monotonic() - self._since
        if stalled > limit:
            raise StallError(f"no progress for {stalled:.0f} s while waiting for {waiting_for}: {self._report()}")
