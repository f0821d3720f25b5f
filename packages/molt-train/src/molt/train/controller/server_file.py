"""`server.json` of a run folder: the process that is at work on the run, and where it serves. It holds no secret."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class ServerFile(msgspec.Struct, frozen=True, kw_only=True):
    """The process at work on a run."""

    host: str
    pid: int
    started: str
    """When the process was started, as its kernel counts: another process of the same number has another."""
    url: str = ""
    """Where it serves; empty until it does."""

    def is_alive(self) -> bool | None:
        """Whether the process lives; None for one of another machine."""
        if self.host != socket.gethostname():
            return None
        return _started(self.pid) == self.started


@contextmanager
def server_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Have this process stand in `path` for the time of the block; what it gives is to be called with the URL."""

    def write(url: str) -> None:
        pid = os.getpid()
        found = ServerFile(host=socket.gethostname(), pid=pid, started=_started(pid), url=url)
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(found) + b"\n")
        partial.replace(path)

    write("")
    try:
        yield write
    finally:
        path.unlink(missing_ok=True)


def read_server_file(path: Path) -> ServerFile | None:
    """The process that stands in `path`, which may be dead; None when there is no such file, or it is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerFile)
    except (OSError, msgspec.DecodeError):
        return None


def _started(pid: int) -> str:
    """Field 22 of /proc/PID/stat; empty when the process is gone, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
