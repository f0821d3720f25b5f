"""Workers: a crowd of coroutines in this process, and real processes that signals can hit."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from integration_tests.simulation.agent import AGENT, SETTINGS, AgentRunner, Settings
from integration_tests.simulation.api import RecordingApi
from integration_tests.simulation.scenario import TOKEN, Scenario
from molt.agents import heartbeats, worker
from molt.agents.errors import MoltAgentError

GIVE_UP_S = 60.0
# Making one takes longer than a rollout's calls, and every worker makes two.
httpx.create_ssl_context = functools.cache(httpx.create_ssl_context)
# Each worker has a thread that watches its loop; here they all watch one.
heartbeats.PING_S = 10.0
# Those that are cancelled at the end give their leases back to nobody.
worker.RETURN_LIMIT_S = 0.5


class Crowd:
    """Coroutine workers, one rollout each at a time.

    One that is killed never says anything again, and another takes its place.
    """

    def __init__(self, scenario: Scenario, *, server: str, acknowledged: Path) -> None:
        self._scenario, self._server, self._acknowledged = scenario, server, acknowledged
        self._apis: dict[int, RecordingApi] = {}
        self._dead: list[asyncio.Task[None]] = []
        self._is_ending = False
        self.num_killed = 0

    async def run(self) -> None:
        """Work until the server says that the run is over, or until cancelled."""
        slots = [asyncio.create_task(self._slot(number)) for number in range(self._scenario.num_coroutines)]
        try:
            await asyncio.gather(*slots)
        finally:
            for task in (*slots, *self._dead):
                task.cancel()
            await asyncio.gather(*slots, *self._dead, return_exceptions=True)

    def cut_off(self, number: int, seconds: float) -> None:
        """Let a worker neither beat nor report for so long."""
        if api := self._apis.get(number):
            api.fate.cut_off_until = time.monotonic() + seconds

    async def _slot(self, number: int) -> None:
        while True:
            killed = asyncio.Event()
            settings = Settings(seed=self._scenario.seed, acknowledged=str(self._acknowledged))
            api = RecordingApi(self._server, token=TOKEN, give_up_s=GIVE_UP_S, settings=settings)
            own = worker.Worker(AgentRunner(settings, kill=killed.set), api, concurrency=1, drain_s=0.0)
            self._apis[number] = api
            work = asyncio.create_task(own.run())
            death = asyncio.create_task(killed.wait())
            try:
                await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                death.cancel()
                if not work.done():
                    api.fate.is_dead = True
                    work.cancel()
            if killed.is_set():
                self.num_killed += 1
                self._dead.append(work)
                continue
            with contextlib.suppress(MoltAgentError):
                await work
                return


class Processes:
    """Worker processes, started anew when they die."""

    def __init__(self, scenario: Scenario, *, server: str, acknowledged: Path, logs: Path) -> None:
        self._scenario, self._server, self._logs = scenario, server, logs
        self._settings = Settings(seed=scenario.seed, acknowledged=str(acknowledged))
        self._running: list[subprocess.Popen[bytes] | None] = [None] * scenario.num_processes
        self._stopped_until: dict[int, float] = {}
        """By pid."""
        self.num_started = 0

    def tend(self) -> None:
        """Start those that are gone, and let those go on whose time as stopped is over. To be called often."""
        for number, process in enumerate(self._running):
            if process is None or process.poll() is not None:
                self._running[number] = self._start(number)
        for pid, until in list(self._stopped_until.items()):
            if time.monotonic() >= until:
                del self._stopped_until[pid]
                _signal(pid, signal.SIGCONT)

    def kill(self, number: int) -> None:
        """Kill -9."""
        if process := self._running[number]:
            self._stopped_until.pop(process.pid, None)
            process.kill()

    def stop(self, number: int, seconds: float) -> None:
        """Stop a process where it is, for so long."""
        if process := self._running[number]:
            _signal(process.pid, signal.SIGSTOP)
            self._stopped_until[process.pid] = time.monotonic() + seconds

    def end(self) -> None:
        """Kill them all."""
        for process in filter(None, self._running):
            process.kill()
            process.wait(10)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        self.num_started += 1
        environment = {**os.environ, "MOLT_TOKEN": TOKEN, SETTINGS: json.dumps(_as_dict(self._settings))}
        options = ["--server", self._server, "--concurrency", "4", "--drain-s", "1"]
        options += ["--server-timeout", str(GIVE_UP_S), "--exit-with-parent", str(os.getpid())]
        with (self._logs / f"worker-{number}.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "molt.agents", "work", AGENT, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )


def _as_dict(settings: Settings) -> dict[str, Any]:
    return {"seed": settings.seed, "acknowledged": settings.acknowledged}


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
