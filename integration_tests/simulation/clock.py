"""The server's time of day, which the simulation sets on and back."""

import mmap
import struct
import time
from pathlib import Path

_OFFSET = struct.Struct("<d")


class Clock:
    """A file with what the time of day is ahead of the machine's, in seconds."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_OFFSET.pack(0.0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _OFFSET.size)

    def step(self, seconds: float) -> None:
        """Set the clock on, or back."""
        self._map[:] = _OFFSET.pack(self.offset() + seconds)

    def offset(self) -> float:
        """How far it is ahead."""
        return _OFFSET.unpack(self._map[:])[0]

    def install(self) -> None:
        """Let `time.time` of this process go by it. The monotonic clock goes on as it did."""
        of_machine = time.time
        time.time = lambda: of_machine() + self.offset()
