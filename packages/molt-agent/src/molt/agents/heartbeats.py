"""Heartbeats, from a thread of their own: an agent that blocks the worker's event loop loses no lease by it.

    worker's loop                                   thread's loop
      hold, let_go ---- leases (a lock) ---------->   every interval: all held leases in one request
      on_reply     <--- answers -------------------
      turn         <--> every PING_S: are you there?   if not: who blocks, once

A lease is kept alive for its time and `OVERDUE_S` beyond, which the clean-up and the report may take. So a loop that is
blocked for good loses its leases in the end.
"""

import asyncio
import logging
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from molt.agents.calls import call
from molt.agents.control import ControlApi
from molt.agents.protocol import HeartbeatReply, HeartbeatRequest, Lease

OVERDUE_S = 120.0
PING_S = 0.5
LATE_S = 1.0
"""A loop that does not turn for so long is worth a warning."""
MAX_PLACES = 3
"""Calls that the warning names: the agent's own, and the innermost."""
STOP_LIMIT_S = 2.0
"""How long the thread may take to end."""
_OURS, _OF_LOOP = str(Path(__file__).parent), str(Path(asyncio.__file__).parent)

log = logging.getLogger(__name__)


class Heartbeats:
    """Keeps the leases of one worker alive.

    Args:
        api: The server, for the thread alone; closed at the end.
        worker_id: The worker.
        on_reply: Called in the loop of `run` with each answer.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        api: ControlApi,
        *,
        worker_id: str,
        on_reply: Callable[[HeartbeatReply], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._worker_id, self._on_reply, self._clock = api, worker_id, on_reply, clock
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        """When the held leases are overdue, by id, on the monotonic clock."""
        self._interval_s = 0.0
        self._connected = asyncio.Event()
        self._worker_loop: asyncio.AbstractEventLoop | None = None
        self._worker_thread = 0
        self._thread_loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        """Of the thread's loop."""

    def every(self, interval_s: float) -> None:
        """Beat every `interval_s` seconds from now on; the first call begins."""
        self._interval_s = interval_s
        self._connected.set()

    def hold(self, lease: Lease) -> None:
        """Keep a lease alive."""
        with self._lock:
            self._until[lease.lease_id] = self._clock() + lease.timeout_s + OVERDUE_S

    def let_go(self, lease_id: str) -> None:
        """No more."""
        with self._lock:
            del self._until[lease_id]

    async def run(self) -> None:
        """Beat until cancelled.

        Raises:
            ServerError: The server refused the heartbeats, or was unavailable for too long.
        """
        await self._connected.wait()
        self._worker_loop, self._worker_thread = asyncio.get_running_loop(), threading.get_ident()
        thread = asyncio.create_task(call(self._run_thread))
        try:
            await asyncio.shield(thread)
        finally:
            self._stop_thread()
            await asyncio.wait({thread}, timeout=STOP_LIMIT_S)
            if thread.done():
                thread.exception()  # raised above, unless it came while the thread was told to end

    def _run_thread(self) -> None:
        asyncio.run(self._beat_and_watch())

    def _stop_thread(self) -> None:
        with self._lock:
            self._interval_s = -1.0  # for a thread that has not begun
            loop = self._thread_loop
        if loop is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._stopped.set)

    async def _beat_and_watch(self) -> None:
        with self._lock:
            if self._interval_s < 0:
                return
            self._thread_loop = asyncio.get_running_loop()
        tasks = {asyncio.create_task(work()) for work in (self._beat, self._watch_worker, self._stopped.wait)}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._api.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if lease_ids := self._live():
                reply = await self._api.heartbeat(HeartbeatRequest(worker_id=self._worker_id, lease_ids=lease_ids))
                self._in_worker(self._on_reply, reply)

    def _live(self) -> tuple[str, ...]:
        """The leases that are not overdue."""
        now = self._clock()
        with self._lock:
            return tuple(lease_id for lease_id, until in self._until.items() if now < until)

    async def _watch_worker(self) -> None:
        """Say who blocks the worker's loop, while it does."""
        loop = asyncio.get_running_loop()
        while True:
            turned = asyncio.Event()
            asked = self._clock()
            self._in_worker(_call_in, loop, turned.set)
            try:
                async with asyncio.timeout(LATE_S):
                    await turned.wait()
            except TimeoutError:
                where = self._who_blocks()
                if where:
                    log.warning("an agent blocks the event loop: make its blocking method a plain `def`; %s", where)
                await turned.wait()
                if where:
                    log.warning("an agent blocked the event loop for %.1f s", self._clock() - asked)
            await asyncio.sleep(PING_S)

    def _who_blocks(self) -> str:
        """Where the task is that the worker's loop runs; empty where it runs none, and the machine is just busy."""
        frame = sys._current_frames().get(self._worker_thread)  # pyright: ignore[reportPrivateUsage]
        stack = list(traceback.extract_stack(frame)) if frame is not None else list[traceback.FrameSummary]()
        places = [line for line in stack if not line.filename.startswith(_OURS)]
        last_of_loop = max((i for i, line in enumerate(places) if line.filename.startswith(_OF_LOOP)), default=-1)
        task = places[last_of_loop + 1 :]
        if not task or task[0].filename == selectors.__file__:
            return ""
        shown = task if len(task) <= MAX_PLACES else [*task[: MAX_PLACES - 1], task[-1]]
        return ", ".join(f"{line.filename}:{line.lineno} in {line.name}" for line in shown)

    def _in_worker(self, function: Callable[..., None], *args: Any) -> None:
        assert self._worker_loop is not None
        with suppress(RuntimeError):  # the loop has closed
            self._worker_loop.call_soon_threadsafe(function, *args)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the thread has ended
        loop.call_soon_threadsafe(function)
