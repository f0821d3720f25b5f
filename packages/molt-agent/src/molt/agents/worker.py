"""The worker: pulls leases, runs them, heartbeats, reports.

      +---------------- free slots ----------------+
      v                                            |
    pull ---- leases ----> one task a lease ---- result ----> server
      |                            ^
    server                         +---- lost ---- heartbeats (all held leases in one request, from a thread)

Every wait has a limit: a poll and a report that of the control API, a rollout its lease's, the drain `drain_s`, the
return of leases `RETURN_LIMIT_S`. Every answer of the server can say that the run is over; then nobody waits for what
still runs, and it is given back at once.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from molt.agents.control import ControlApi
from molt.agents.errors import AuthenticationError, FencedError, ServerError, ServerUnavailableError
from molt.agents.heartbeats import Heartbeats
from molt.agents.protocol import HeartbeatReply, Lease, LeaseRequest, ReleaseRequest, ResultReport
from molt.agents.rollout import CANCEL_GRACE_S, close_runner, run_lease
from molt.agents.runner import AgentRunner

POLL_WAIT_S = 20.0
"""How long the server may hold a request for leases."""
EMPTY_POLL_PAUSE_S = 0.1
"""Between polls, when a server answers at once that it has nothing."""
RETURN_LIMIT_S = CANCEL_GRACE_S + 1.0
"""How long giving leases back may take, and the agents' clean-up meanwhile."""
PARENT_CHECK_S = 1.0

log = logging.getLogger(__name__)


class _Held(msgspec.Struct):
    """A lease that this worker holds."""

    lease: Lease
    task: asyncio.Task[None]
    reporting: bool = False
    """The agent is done; only the report is under way."""


class Worker:
    """Runs leases of one server until that is finished, or until told to stop.

    Args:
        runner: Runs the rollouts; closed at the end.
        api: The server; closed at the end.
        concurrency: Most leases held at once.
        labels: What tasks may ask of a worker.
        drain_s: After `stop`, how long rollouts may take to finish before their leases are given back.
        parent_pid: The process that started this one; when it is gone the worker stops at once.
    """

    def __init__(
        self,
        runner: AgentRunner,
        api: ControlApi,
        *,
        concurrency: int,
        drain_s: float,
        labels: Mapping[str, str] | None = None,
        parent_pid: int | None = None,
    ) -> None:
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.outcomes: Counter[str] = Counter()
        """Results that the server accepted, by outcome."""
        self._runner = runner
        self._api = api
        self._concurrency = concurrency
        self._drain_s = drain_s
        self._labels = dict(labels or {})
        self._parent_pid = parent_pid
        self._held: dict[str, _Held] = {}
        self._heartbeats = Heartbeats(api.twin(), worker_id=self.worker_id, on_reply=self._on_heartbeat)
        self._failure: BaseException | None = None
        self._is_finished = False
        """The server said so: that it goes away is no failure any more."""
        self._slot_freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._rushed = asyncio.Event()

    def stop(self) -> None:
        """Take no more leases; finish those held, or give them back. A second call gives them back at once."""
        if self._stopping.is_set():
            self._rushed.set()
        self._stopping.set()

    async def run(self) -> None:
        """Work until the server is finished or `stop` is called.

        Raises:
            ServerError: The server refused this worker, or was unavailable for too long; see the subclasses.
        """
        pull = self._spawn(self._pull())
        loops = [pull, self._spawn(self._heartbeats.run())]
        if self._parent_pid is not None:
            loops.append(self._spawn(self._watch_parent(self._parent_pid)))
        try:
            await self._stopping.wait()
            pull.cancel()
            await self._drain()
        finally:
            for loop in loops:
                loop.cancel()
            await self._return_leases()
            await asyncio.wait(loops)
            await close_runner(self._runner)
            await self._api.close()
        if self._failure is not None:
            raise self._failure

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        """The first error of any task ends the worker."""
        if task.cancelled() or task.exception() is None:
            return
        if not (self._is_finished and isinstance(task.exception(), ServerUnavailableError)):
            self._failure = self._failure or task.exception()
        self._rushed.set()
        self._stopping.set()

    async def _pull(self) -> None:
        """Takes free slots; gives leases to new tasks; waits for a slot, then for the server."""
        while True:
            while len(self._held) >= self._concurrency:
                self._slot_freed.clear()
                await self._slot_freed.wait()
            free = self._concurrency - len(self._held)
            reply = await self._api.lease(
                LeaseRequest(
                    worker_id=self.worker_id,
                    capacity=free,
                    wait_s=POLL_WAIT_S,
                    labels=self._labels,
                    concurrency=self._concurrency,
                    request_id=secrets.token_hex(8),
                )
            )
            self._heartbeats.every(reply.heartbeat_s)
            for lease in reply.leases:
                self._start(lease)
            if reply.finished:
                self._finish()
                return
            if not reply.leases:
                await asyncio.sleep(EMPTY_POLL_PAUSE_S)

    def _finish(self) -> None:
        if not self._is_finished:
            log.info("the server is finished")
        self._is_finished = True
        self._rushed.set()
        self._stopping.set()

    def _start(self, lease: Lease) -> None:
        self._heartbeats.hold(lease)
        task = self._spawn(self._serve(lease))
        self._held[lease.lease_id] = _Held(lease, task)
        task.add_done_callback(lambda _: self._forget(lease.lease_id))

    def _forget(self, lease_id: str) -> None:
        self._heartbeats.let_go(lease_id)
        del self._held[lease_id]
        self._slot_freed.set()

    async def _serve(self, lease: Lease) -> None:
        """Takes one lease; gives its report to the server; waits for the agent, at most the lease's time."""
        report = await run_lease(self._runner, lease, worker_id=self.worker_id)
        self._held[lease.lease_id].reporting = True
        if report.error is not None:
            log.warning("rollout %s, attempt %d: %s: %s", lease.rollout_id, lease.attempt, report.outcome, report.error)
        await self._report(lease, report)

    async def _report(self, lease: Lease, report: ResultReport) -> None:
        try:
            reply = await self._api.report(lease.lease_id, report)
        except (AuthenticationError, ServerUnavailableError):
            raise
        except FencedError as exc:
            log.info(
                "rollout %s, attempt %d: fenced, its result does not count: %s", lease.rollout_id, lease.attempt, exc
            )
        except ServerError as exc:  # this result is the problem, not the worker; the lease runs out at the server
            log.error("rollout %s, attempt %d: result refused: %s", lease.rollout_id, lease.attempt, exc)  # noqa: TRY400
        else:
            if reply.accepted:
                self.outcomes[report.outcome] += 1
            else:
                log.info("rollout %s, attempt %d: not counted: %s", lease.rollout_id, lease.attempt, reply.reason)
            if reply.finished:
                self._finish()

    def _on_heartbeat(self, reply: HeartbeatReply) -> None:
        """Takes what the server said of the held leases; gives the lost ones a cancellation."""
        for lease_id in reply.lost:
            self._drop(lease_id)
        if reply.finished:
            self._finish()

    def _drop(self, lease_id: str) -> None:
        """Stop running a lost lease. One that is being reported, or was just reported, is left to the server."""
        held = self._held.get(lease_id)
        if held is not None and not held.reporting:
            log.warning("rollout %s, attempt %d: lease lost", held.lease.rollout_id, held.lease.attempt)
            held.task.cancel()

    async def _watch_parent(self, parent_pid: int) -> None:
        while os.getppid() == parent_pid:  # noqa: ASYNC110 - the system sends no event for it
            await asyncio.sleep(PARENT_CHECK_S)
        log.warning("the parent process %d is gone", parent_pid)
        self._rushed.set()
        self._stopping.set()

    async def _drain(self) -> None:
        """Wait for the held leases; at most `drain_s`, and only until rushed."""
        if not self._held or self._rushed.is_set():
            return
        log.info("finishing %d leases, for up to %g s", len(self._held), self._drain_s)
        rush = asyncio.create_task(self._rushed.wait())
        finish = asyncio.create_task(asyncio.wait([held.task for held in self._held.values()]))
        await asyncio.wait({rush, finish}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        rush.cancel()
        finish.cancel()

    async def _return_leases(self) -> None:
        """Cancel what still runs and give its leases back; reports under way may end."""
        if not self._held:
            return
        tasks = [held.task for held in self._held.values()]
        unfinished = [held for held in self._held.values() if not held.reporting]
        for held in unfinished:
            held.task.cancel()
        if unfinished and self._failure is None:
            log.info("giving %d leases back", len(unfinished))
            tasks += [asyncio.create_task(self._release(held.lease)) for held in unfinished]
        _, late = await asyncio.wait(tasks, timeout=RETURN_LIMIT_S)
        if late:
            log.warning("leaving after %g s, with leases or agents that did not end in time", RETURN_LIMIT_S)
        for task in late:
            task.cancel()

    async def _release(self, lease: Lease) -> None:
        try:
            await self._api.release(lease.lease_id, ReleaseRequest(worker_id=self.worker_id, attempt=lease.attempt))
        except FencedError as exc:  # lost meanwhile; or given back, by a try whose answer did not arrive
            log.info("lease of rollout %s is over already: %s", lease.rollout_id, exc)
        except ServerError as exc:
            log.warning("lease of rollout %s not given back, it will run out: %s", lease.rollout_id, exc)
