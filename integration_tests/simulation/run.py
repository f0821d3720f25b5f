"""One simulation from beginning to end: server, proxy, workers, faults; then the folder holds all the evidence."""

import asyncio
import contextlib
import multiprocessing
import random
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from integration_tests.simulation.clock import Clock
from integration_tests.simulation.proxy import run_proxy
from integration_tests.simulation.scenario import Fault, Scenario, config_of, fault_schedule, write_tasks
from integration_tests.simulation.workers import Crowd, Processes
from molt.train.config import Config
from molt.train.engine.scripted_tokenizer import scripted_tokenizer

TICK_S = 0.1
PROGRESS_EVERY_S = 10.0
RESTARTS_LEFT = 3
"""Times that a server may end by itself before the simulation is given up."""


class SimulationError(RuntimeError):
    """The run did not come to its end."""


class Simulation:
    """Runs `scenario` in `folder`."""

    def __init__(self, scenario: Scenario, folder: Path, *, limit_s: float) -> None:
        self._scenario, self._folder, self._limit_s = scenario, folder, limit_s
        # A process that has loaded everything, from which servers are forked: one that was killed is back at once.
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(["integration_tests.simulation.server", "integration_tests.simulation.proxy"])
        self._server: Any = None
        self._num_servers = 0
        self._done = 0
        self._started = time.monotonic()
        self.faults: Counter[str] = Counter()

    async def run(self) -> dict[str, Any]:
        """Returns figures of the run. Raises SimulationError when it does not end by itself within its limit."""
        scenario, folder = self._scenario, self._folder
        write_tasks(scenario, folder / "tasks.jsonl")
        scripted_tokenizer(folder / "model")
        port, sock = _free_port(), socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._config = config_of(scenario, folder, port=port, public_port=sock.getsockname()[1])
        url, acknowledged = self._config.server.public_url, folder / "acknowledged.jsonl"
        proxy: Any = self._fork.Process(
            target=run_proxy, args=(sock, port, scenario.seed, folder / "cuts"), daemon=True
        )
        await asyncio.to_thread(proxy.start)  # waits until everything is loaded
        crowd = Crowd(scenario, server=url, acknowledged=acknowledged)
        processes = Processes(scenario, server=url, acknowledged=acknowledged, logs=folder)
        working = asyncio.create_task(crowd.run())
        try:
            await self._play(crowd, processes)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(working), 2.0)  # what is under way may still end
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            processes.end()
            for process in (proxy, self._server):
                process.kill()
                process.join(10)
            sock.close()
        return {
            "seconds": round(time.monotonic() - self._started, 1),
            "servers": self._num_servers,
            "worker_processes": processes.num_started,
            "coroutine_workers_killed": crowd.num_killed,
            "faults": dict(self.faults),
            "connections_cut": len((folder / "cuts").read_text().splitlines()) if (folder / "cuts").exists() else 0,
        }

    async def _play(self, crowd: Crowd, processes: Processes) -> None:
        """Keep server and workers running, and let the faults happen, until the server ends by itself."""
        faults, clock = fault_schedule(self._scenario), Clock(self._folder / "clock")
        due: list[tuple[float, Fault]] = []
        said = restarts = 0
        self._start_server()
        while True:
            await asyncio.sleep(TICK_S)
            if not self._server.is_alive():
                code = self._server.exitcode
                if code == 0:
                    self._say("the run is over")
                    return
                restarts += code != -9
                if restarts > RESTARTS_LEFT:
                    raise SimulationError(f"the server keeps ending by itself, last with {code}: {self._tail()}")
                self._start_server()
            processes.tend()
            now = time.monotonic()
            self._done = max(self._done, _num_lines(self._folder / "run" / "metrics.jsonl"))
            while faults and faults[0].at <= self._done / self._scenario.num_updates:
                due.append((now + faults[0].delay_s, faults.pop(0)))
            for entry in [entry for entry in due if entry[0] <= now]:
                due.remove(entry)
                self._let_happen(entry[1], crowd, processes, clock)
            if (now - self._started) // PROGRESS_EVERY_S > said:
                said = (now - self._started) // PROGRESS_EVERY_S
                self._say(f"{self._done} of {self._scenario.num_updates} updates, {sum(self.faults.values())} faults")
            if now - self._started > self._limit_s:
                raise SimulationError(f"not over within {self._limit_s:.0f} s: {self._tail()}")

    def _let_happen(self, fault: Fault, crowd: Crowd, processes: Processes, clock: Clock) -> None:
        self.faults[fault.kind] += 1
        match fault.kind:
            case "kill_server":
                self._server.kill()
                self._server.join(10)
                self._start_server()
            case "kill_worker":
                processes.kill(fault.target)
            case "stop_worker":
                processes.stop(fault.target, fault.amount)
            case "cut_off":
                crowd.cut_off(fault.target, fault.amount)
            case "step_clock":
                clock.step(fault.amount)

    def _start_server(self) -> None:
        self._num_servers += 1
        self._server = self._fork.Process(
            target=_serve, args=(self._config, self._folder, self._num_servers), daemon=True
        )
        self._server.start()

    def _tail(self) -> str:
        output = self._folder / "server.out"
        return output.read_text()[-2000:] if output.exists() else "it said nothing"

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", file=sys.stderr, flush=True)  # noqa: T201


def _serve(config: Config, folder: Path, life: int) -> None:
    # Imported where it runs: it brings torch, which the process of the coroutine workers has no use for.
    from integration_tests.simulation.server import serve

    serve(config, folder, life)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _free_port() -> int:
    """A port below those that the system gives out by itself, so that nobody takes it while the server is down."""
    for _ in range(100):
        port = random.randint(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise SimulationError("no free port between 20000 and 30000")
