"""The disk under the ledger: how much room there is, which errors mean that there is none, and when it is synced."""

import contextlib
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from molt.train.errors import LedgerFullError, RunError

ROOM_S = 1.0
"""How long an answer about the room on the disk holds."""
SYNC_S = 1.0
"""How long what was written may wait to be forced to disk."""
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
"""SQLite reports a quota that is used up as a write that failed."""
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def free_bytes(folder: Path) -> int:
    """What an unprivileged process can still write there."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


class DiskRoom:
    """Whether there is room for more, measured at most once in `ROOM_S` seconds.

    Args:
        folder: On the disk in question.
        min_free: Bytes that have to be free.
        measure: Gives the free bytes.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        folder: Path,
        *,
        min_free: int,
        measure: Callable[[Path], int] = free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._min_free, self._measure, self._clock = min_free, measure, clock
        self._has_room = True
        self._until = float("-inf")

    def has_room(self) -> bool:
        """Whether `min_free` bytes were free a moment ago, and no write has failed since."""
        if self._clock() >= self._until:
            self._answer(has_room=self._measure(self.folder) >= self._min_free)
        return self._has_room

    @contextmanager
    def needed(self) -> Iterator[None]:
        """A write. Raises LedgerFullError in place of any error that says that there was no room for it."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if not _is_full(error):
                raise
            # Where a quota is used up the disk looks as free as ever.
            self._answer(has_room=False)
            raise LedgerFullError(f"no room for the ledger in {str(self.folder)!r}: {error}; free some disk") from error

    def _answer(self, *, has_room: bool) -> None:
        self._has_room = has_room
        self._until = self._clock() + ROOM_S


def _is_full(error: sqlite3.Error | OSError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    return getattr(error, "sqlite_errorcode", None) in _FULL_CODES


class SyncThread:
    """Calls `sync` at most `interval_s` seconds after something was written, in a thread of its own.

    Forcing data to disk takes as long as the disk likes, which the event loop must not wait for.
    """

    def __init__(self, sync: Callable[[], None], *, interval_s: float = SYNC_S) -> None:
        self._sync, self._interval_s = sync, interval_s
        self._is_dirty = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    def now(self, sync: Callable[[], None] | None = None) -> None:
        """Call `sync` here, or a part of it. Raises OSError."""
        try:
            (sync or self._sync)()
        except OSError as error:
            # For good: the system forgets what it could not write, and says so once.
            self._failure = error
            raise

    def check(self) -> None:
        """Raises RunError when the disk has ever failed to take what was written: nothing is promised any more."""
        if self._failure is not None:
            raise RunError(f"the ledger cannot be forced to disk: {self._failure}") from self._failure

    def written(self) -> None:
        """Something was written."""
        if self._is_dirty:
            return
        self._is_dirty = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ledger-sync", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End the thread. What was written last is not synced by it any more."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop.wait(self._interval_s):
                return
            # Before the sync: what is written while it runs needs the next one.
            self._is_dirty = False
            with contextlib.suppress(OSError):
                self.now()
