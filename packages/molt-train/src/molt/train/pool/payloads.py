"""The payload files: what sessions recorded, in append-only files beside the ledger, which names each record.

The files are `payloads/000001.bin` and so on; the next is begun when one has `FILE_BYTES`. Each is a row of records:

    magic "MOLT", CRC-32 of the bytes (u32), their number (u64), all little-endian; then the bytes

A record is written before the transaction that names it is committed. One that no transaction names, because the
process died or the transaction was undone, is passed over by readers and writers alike.
"""

import os
import struct
import threading
import zlib
from pathlib import Path
from typing import NamedTuple

from molt.train.errors import PayloadDamagedError

FILE_BYTES = 256 * 1024 * 1024
"""A file this long is followed by the next."""
MAGIC = b"MOLT"
HEAD = struct.Struct("<4sIQ")


class PayloadPlace(NamedTuple):
    """Where a record is, as the ledger names it."""

    file: int
    """The number in its name."""
    offset: int
    """Of the head."""
    length: int
    """Bytes after the head."""
    crc: int
    """CRC-32 of these bytes."""


def payload_file(folder: Path, number: int) -> Path:
    """The payload file of a number."""
    return folder / f"{number:06d}.bin"


class PayloadWriter:
    """Appends records to the last of the files in `folder`, which it makes. One process at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._number = max((int(path.stem) for path in folder.glob("[0-9]*.bin")), default=1)
        self._lock = threading.Lock()
        """Held to sync, and to go on to the next file."""
        self._file = self._open()
        self._end = os.fstat(self._file).st_size
        self._is_dirty = True
        """What the last writer left may not be on disk either."""

    @property
    def end(self) -> tuple[int, int]:
        """The file that is written now, and its length."""
        return self._number, self._end

    def append(self, data: bytes) -> PayloadPlace:
        """Hand a record to the operating system. Raises OSError, and then nothing was appended."""
        if self._end >= FILE_BYTES:
            self._next_file()
        crc = zlib.crc32(data)
        place = PayloadPlace(self._number, self._end, len(data), crc)
        try:
            self._write(HEAD.pack(MAGIC, crc, len(data)), data)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += HEAD.size + len(data)
        self._is_dirty = True
        return place

    def undo(self, end: tuple[int, int]) -> None:
        """Give back the space after `end`, a former value of it, where that is in the file that is written now."""
        number, length = end
        if number == self._number and length < self._end:
            os.ftruncate(self._file, length)
            self._end = length

    def sync(self) -> None:
        """Force everything appended before the call to disk. May be called in any thread. Raises OSError."""
        with self._lock:
            if self._is_dirty:
                # Before the sync: what is appended while it runs needs the next one.
                self._is_dirty = False
                os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, *parts: bytes) -> None:
        total = sum(map(len, parts))
        written = os.pwritev(self._file, parts, self._end)
        if written < total:
            # A signal, a limit of one call, or the end of the disk, which the next call says.
            rest = memoryview(b"".join(parts))
            while written < total:
                written += os.pwrite(self._file, rest[written:], self._end + written)

    def _next_file(self) -> None:
        self.sync()
        with self._lock:
            self._number += 1
            try:
                file = self._open()
            except OSError:
                self._number -= 1
                raise
            os.close(self._file)
            self._file, self._end = file, 0

    def _open(self) -> int:
        file = os.open(payload_file(self._folder, self._number), os.O_RDWR | os.O_CREAT, 0o644)
        sync_folder(self._folder)
        return file


class PayloadReader:
    """Reads records by their places, also while they are written. Keeps the file it read last open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._file = -1

    def read(self, place: PayloadPlace) -> bytes:
        """The bytes of a record. Raises PayloadDamagedError when they are not what was written."""
        size = HEAD.size + place.length
        try:
            data = os.pread(self._open(place.file), size, place.offset)
        except OSError as error:
            raise self._damaged(place, error.strerror or str(error)) from None
        if len(data) < size:
            raise self._damaged(place, f"it ends after {len(data)} of {size} bytes")
        if HEAD.unpack_from(data) != (MAGIC, place.crc, place.length):
            raise self._damaged(place, "its head is another one")
        body = data[HEAD.size :]
        if zlib.crc32(body) != place.crc:
            raise self._damaged(place, "its checksum is wrong")
        return body

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._number, self._file = 0, -1

    def _open(self, number: int) -> int:
        if number != self._number:
            self.close()
            self._file = os.open(payload_file(self._folder, number), os.O_RDONLY)
            self._number = number
        return self._file

    def _damaged(self, place: PayloadPlace, why: str) -> PayloadDamagedError:
        path = payload_file(self._folder, place.file)
        return PayloadDamagedError(f"payload file {str(path)!r}: the record at offset {place.offset} is damaged: {why}")


def sync_folder(folder: Path) -> None:
    """Force the names of new files in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
