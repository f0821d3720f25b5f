"""The files of a ledger under its one writer: transactions over tables and payloads, and when they reach the disk."""

import fcntl
import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from molt.train.config import PoolConfig
from molt.train.errors import ConfigError, LedgerFullError
from molt.train.pool.disk import DiskRoom, SyncThread
from molt.train.pool.payloads import PayloadWriter, sync_folder
from molt.train.pool.reader import LedgerReader, payload_folder
from molt.train.pool.schema import open_for_writing

CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Length of the write-ahead log from which it is moved into the main file."""
CHECKPOINT_S = 1.0
"""Seconds between two tries, where readers or a full disk keep it from being moved."""
BUSY_MS = 5000
"""How long a write waits for a reader that looks through the write-ahead log of a writer that died."""
log = logging.getLogger(__name__)


class LedgerStore(LedgerReader):
    """The one writer of the ledger at `path`, which it makes when there is none.

    Args:
        path: The file. Payload files and lock are beside it.
        settings: When it is forced to disk, and the free space below which `has_room` says no.
        room: In place of the disk's own free space.

    Raises:
        ConfigError: another process writes this ledger, or the file is none.
        LedgerFullError: there is no room for its files.
    """

    def __init__(self, path: Path, settings: PoolConfig, *, room: DiskRoom | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._room = room or DiskRoom(path.parent, min_free=settings.min_free_mb * 1024 * 1024)
        self._is_always_synced = settings.sync == "always"
        self._lock = _lock_for_writing(path)
        try:
            super().__init__(open_for_writing(path), payload_folder(path))
        except ConfigError:
            self._lock.close()
            raise
        with self._room.needed():
            self._payloads = PayloadWriter(payload_folder(path))
            # SQLite locks other files than this one, so closing it releases none of its locks.
            self._wal = os.open(f"{path}-wal", os.O_RDONLY)
            sync_folder(path.parent)
        self._syncing = SyncThread(self._sync_files)
        self._next_checkpoint = 0.0

    def close(self) -> None:
        """Force everything to disk, close the files, and let another process write them. Again it does nothing."""
        if self._lock.closed:
            return
        self._syncing.close()
        try:
            self._checkpoint()
        finally:
            super().close()
            self._payloads.close()
            os.close(self._wal)
            self._lock.close()

    def has_room(self) -> bool:
        """Whether `pool.min_free_mb` are free on the disk, so that more may be begun. Holds for a second."""
        return self._room.has_room()

    def sync(self) -> None:
        """Force everything to disk: it survives a loss of power from now on. Raises OSError when the disk fails."""
        self._syncing.now()

    @contextmanager
    def transaction(self, *, synced: bool = False) -> Iterator[None]:
        """All the writes of the block, or none; with `synced`, on disk when it returns.

        Inside of another one it is a part of that.
        """
        if self._db.in_transaction:
            yield
            return
        self._syncing.check()
        synced = synced or self._is_always_synced
        end = self._payloads.end
        with self._room.needed():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                if synced:
                    self._syncing.now(self._payloads.sync)
                self._db.execute("COMMIT")
            except BaseException as error:
                is_open = self._db.in_transaction
                if is_open:
                    self._db.execute("ROLLBACK")
                # An interrupt may come when the transaction is committed already, and its payloads are named.
                if is_open or isinstance(error, sqlite3.Error):
                    self._payloads.undo(end)
                raise
        self._committed(synced=synced)

    def execute(self, statement: str, values: tuple[Any, ...]) -> int:
        """One statement, as a transaction where there is none. Returns the id of the row that it inserted last."""
        with self.transaction():
            return self._db.execute(statement, values).lastrowid or 0

    def synced_recording(self) -> int:
        """The last recording that is known to be on disk."""
        (value,) = self._db.execute("SELECT value FROM meta WHERE key = 'synced_recording'").fetchone() or ("0",)
        return int(value)

    def mark_synced(self) -> None:
        """In a transaction that is synced: all recordings up to now are on disk with it."""
        self._db.execute(
            "INSERT OR REPLACE INTO meta SELECT 'synced_recording', coalesce(max(recording_id), 0) FROM recordings"
        )

    def _committed(self, *, synced: bool) -> None:
        if synced:
            self._syncing.now()
        else:
            self._syncing.written()
        if os.fstat(self._wal).st_size >= CHECKPOINT_BYTES and time.monotonic() >= self._next_checkpoint:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Move the write-ahead log into the main file. What the log names is on disk before the main file names it."""
        # Until it is done: the transaction in it must not make another.
        self._next_checkpoint = math.inf
        try:
            with self.transaction(synced=True):
                self.mark_synced()
            # Without waiting: what somebody still reads of the log stays for the next time.
            self._db.execute("PRAGMA busy_timeout = 0")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except (LedgerFullError, sqlite3.OperationalError) as error:
            log.warning("the write-ahead log of the ledger stays as it is: %s", error)
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
            self._next_checkpoint = time.monotonic() + CHECKPOINT_S

    def _sync_files(self) -> None:
        # In this order: a reference that is on disk refers to bytes that are.
        self._payloads.sync()
        os.fdatasync(self._wal)


def _lock_for_writing(path: Path) -> IO[str]:
    # A file of its own: SQLite's locks on the ledger are released when any descriptor of that file is closed.
    lock = path.with_name(path.name + ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"run folder {str(path.parent)!r} is in use by another process; stop it, or give another run.dir"
        ) from None
    return lock
