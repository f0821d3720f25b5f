"""Where every process of a run is at: stacks of threads and asyncio tasks, of this process and of those it started.

A process that listens has a file in a folder of the run, and writes the stacks of its threads to it on SIGUSR1, from
the signal's handler, so that it answers also where it hangs in native code. Its file is how it is found: only a process
that has the file open is sent the signal, which would end any other.
"""

import asyncio
import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

_POLL_S = 0.05


def listen(folder: Path, name: str) -> None:
    """Answer `ask` from now on, as `name`. Another name that the process had is given up."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}@{socket.gethostname()}.{os.getpid()}"
    file = path.open("a")  # for the life of the process: the handler writes to its descriptor
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def ask(folder: Path, *, timeout_s: float) -> dict[str, str]:
    """The stacks of the processes on this machine that listen in `folder`, by their names and process ids.

    One that does not answer in time has a line that says so; those of other machines are left out.
    """
    before = {path: size for path, size in _listeners(folder).items() if _signal(path)}
    waiting, found = dict(before), dict[str, str]()
    end = time.monotonic() + timeout_s
    while waiting and time.monotonic() < end:
        time.sleep(_POLL_S)
        for path, last_size in list(waiting.items()):
            size = waiting[path] = path.stat().st_size
            if before[path] < size == last_size:  # the handler writes in small pieces: now it has ended
                found[path.name] = path.read_bytes()[before[path] :].decode(errors="replace")
                del waiting[path]
    return found | {path.name: f"did not answer within {timeout_s:g} s\n" for path in waiting}


def forget(folder: Path) -> None:
    """Remove the files of processes that were never asked."""
    for path in _files(folder):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def own_stacks() -> str:
    """The stacks of this process: the tasks of the running event loop, if there is one, and all threads."""
    out = io.StringIO()
    with contextlib.suppress(RuntimeError):
        for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
            task.print_stack(file=out)
            out.write("\n")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        out.write(f"Thread {names.get(ident, ident)}\n")
        traceback.print_stack(frame, file=out)
        out.write("\n")
    return out.getvalue()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _listeners(folder: Path) -> dict[Path, int]:
    """The files of processes that run on this machine, with their sizes."""
    return {path: path.stat().st_size for path in _files(folder) if _holder(path) is not None}


def _holder(path: Path) -> int | None:
    """The process that listens under this file; None when it is gone, or on another machine."""
    host, _, pid = path.name.rpartition("@")[2].rpartition(".")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if descriptor.samefile(path):
                return int(pid)
    return None


def _signal(path: Path) -> bool:
    pid = _holder(path)
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return False
    return True
