"""The local workers of `molt-train run`: separate processes that import molt-agent and the agent, nothing of ours."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from molt.train.config import AgentConfig
from molt.train.errors import RunError

MAX_RESTARTS = 20
DRAIN_S = 10.0


class LocalWorkers:
    """Starts `agent.num_workers` workers, starts one anew when it dies, and stops them all at the end.

    Args:
        settings: The agent, and how many rollouts at once.
        url: The server's address.
        environment: Of the workers; it carries the token, which must not stand in a command line.
        logs: Folder for `worker-N.log`.
        on_event: Told of starts and deaths.
    """

    def __init__(
        self,
        settings: AgentConfig,
        *,
        url: str,
        environment: Mapping[str, str],
        logs: Path,
        on_event: Callable[[str, dict[str, Any]], None],
    ):
        self._settings, self._url, self._environment = settings, url, environment
        self._logs, self._on_event = logs, on_event
        self._processes: list[asyncio.subprocess.Process] = []
        self._restarts_left = MAX_RESTARTS
        self.ending = False
        """Set before the workers are told that the run is over: from then on one that ends is not started anew."""

    async def supervise(self) -> None:
        """Keep the workers running until they are told to end. Raises RunError when they keep dying."""
        self._logs.mkdir(parents=True, exist_ok=True)
        await asyncio.gather(*(self._keep(index) for index in range(self._settings.num_workers)))

    async def _keep(self, index: int) -> None:
        while True:
            process = await self._start(index)
            code = await process.wait()
            self._processes.remove(process)
            if self.ending:
                return
            self._on_event("worker_died", {"worker": index, "exit_code": code, "restarts_left": self._restarts_left})
            if code == 2 or self._restarts_left == 0:
                raise RunError(f"worker {index} ended with exit code {code}; see {self._log(index)}")
            self._restarts_left -= 1

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        arguments = ["--server", self._url, "--concurrency", str(self._settings.concurrency)]
        arguments += ["--exit-with-parent", str(os.getpid()), "--drain-s", str(DRAIN_S)]
        with self._log(index).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "molt.agents", "work", self._settings.path, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._environment),
            )
        self._processes.append(process)
        self._on_event("worker_started", {"worker": index, "pid": process.pid})
        return process

    def _log(self, index: int) -> Path:
        return self._logs / f"worker-{index}.log"

    async def stop(self) -> None:
        """Wait for the workers, which have been told that the run is over; end those that do not listen."""
        running = list(self._processes)
        for end in (None, asyncio.subprocess.Process.terminate, asyncio.subprocess.Process.kill):
            running = [process for process in running if process.returncode is None]
            for process in running:
                if end is not None:
                    with contextlib.suppress(ProcessLookupError):
                        end(process)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(p.wait() for p in running)), DRAIN_S)
