"""Run another program in a rollout, such as the command line of a coding agent, and leave nothing of it behind."""

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from molt.agents.errors import InfrastructureError

TERM_GRACE_S = 2.0
"""How long a program may take to end, with what it started, once it is told to."""
MARK = "MOLT_PROGRAM"
"""Environment variable by which the descendants of a program are known, whatever session they have moved to (Linux)."""
MAX_OUTPUT_BYTES = 1 << 20
"""Most bytes that are read back of stdout, and of stderr: the last ones."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended by itself."""

    returncode: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str


async def run_program(argv: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> Finished:
    """Run `argv` in `folder` until it ends, without input.

    Cancelling (a rollout is cancelled at its deadline) ends the program. However it ends, what it started ends with it.

    Args:
        argv: The program and its arguments. It is looked up beside the worker's Python, then on the `PATH`.
        folder: The working directory.
        env: Its environment, next to that search path as its `PATH`. Nothing else of the worker's own environment is
            passed on: a program that finds a key or a login of its vendor there may prefer it to the session's.

    Raises:
        InfrastructureError: There is no such program.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which(argv[0], path=search)
    if program is None:
        raise InfrastructureError(f"{argv[0]!r} is not installed: neither beside {sys.executable} nor on the PATH")
    mark = secrets.token_hex(16)
    # Files, not pipes: a pipe would be held open by what the program leaves running in the background.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *(program, *argv[1:]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env={"PATH": search, **env, MARK: mark},
            start_new_session=True,  # a process group of its own, which can be told to end as a whole
        )
        try:
            returncode = await process.wait()
        finally:
            await _end(process, mark)
        return Finished(returncode=returncode, stdout=_tail(stdout), stderr=_tail(stderr))


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """End the program if it runs, and whatever is left of what it started."""
    try:
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(TERM_GRACE_S):
                    await process.wait()
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        for _ in range(2):  # the second time for what was forked meanwhile
            _kill_marked(f"{MARK}={mark}".encode())
    await process.wait()


def _kill_marked(mark: bytes) -> None:
    """Coding agents run each command in a session of its own, which no signal to their group reaches."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone, or another user's
            if mark in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _signal_group(group: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signum)


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode("utf-8", "replace")
