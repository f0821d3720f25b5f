"""A run says in its ledger how it ended, and can be told to stop before it has begun."""

import asyncio
import contextlib
import os
import signal

import pytest

from molt.train.errors import RunError, RunStoppedError
from molt.train.launch.processes import unless_told
from molt.train.launch.training import _told


def ending_of(error):
    events = []

    def on_event(kind, detail):
        events.append((kind, detail))

    with contextlib.suppress(type(error)), _told(on_event):
        if error is not None:
            raise error
    assert events[0] == ("run_started", {"pid": os.getpid(), "host": os.uname().nodename})
    (ended,) = events[1:]
    assert ended[0] == "run_ended"
    return ended[1]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "finished", ""),
        (RunError("engine 0 died"), "failed", "engine 0 died"),
        (RunStoppedError("stopped by SIGTERM"), "stopped", "stopped by SIGTERM"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt()"),
        (AssertionError(), "failed", "AssertionError()"),
    ],
)
def test_the_end_of_a_run_is_an_event(error, state, reason):
    assert ending_of(error) == {"state": state, "reason": reason}


async def test_a_run_that_is_starting_stops_when_told():
    begun = asyncio.Event()

    async def start():
        begun.set()
        await asyncio.Event().wait()

    starting = asyncio.create_task(unless_told(start()))
    await begun.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(RunStoppedError, match="stopped by SIGTERM"):
        await starting


async def test_what_has_started_is_given_back():
    async def start():
        return "shapes"

    assert await unless_told(start()) == "shapes"
