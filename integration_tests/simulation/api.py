"""The worker's side of the control API, which writes down what the server acknowledged, and at times misbehaves."""

import asyncio
import os
import time
from dataclasses import dataclass
from functools import partial

import msgspec

from integration_tests.simulation.scenario import behaviour_of
from molt.agents.control import ControlApi
from molt.agents.errors import FencedError
from molt.agents.protocol import (
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What agents and workers of the simulation are given."""

    seed: int
    acknowledged: str
    """The file that acknowledgements are written to."""


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """What the server said to a report."""

    lease_id: str
    attempt: int
    outcome: str
    reward: float | None
    accepted: bool
    reason: str | None


@dataclass
class Fate:
    """What has befallen a worker, all of its threads."""

    cut_off_until: float = 0.0
    """On the monotonic clock: it sends neither heartbeats nor reports before."""
    is_dead: bool = False
    """It never sends anything again."""


class RecordingApi(ControlApi):
    """Writes down each answer to a report, and reports some results twice. What `fate` keeps from the server waits."""

    def __init__(
        self, server: str, *, token: str, give_up_s: float, settings: Settings, fate: Fate | None = None
    ) -> None:
        super().__init__(server, token=token, give_up_s=give_up_s)
        self._again = partial(RecordingApi, server, token=token, give_up_s=give_up_s, settings=settings)
        self._settings = settings
        self.fate = fate or Fate()

    def twin(self) -> "RecordingApi":
        return self._again(fate=self.fate)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        await self._pass()
        return await super().lease(request)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        if self.fate.is_dead or time.monotonic() < self.fate.cut_off_until:
            return HeartbeatReply(lost=())
        return await super().heartbeat(request)

    async def report(self, lease_id: str, report: ResultReport) -> ResultReply:
        await self._pass()
        reply = await self._report(lease_id, report)
        rollout_id = lease_id.rpartition("-")[0]
        if behaviour_of(self._settings.seed, "", rollout_id, report.attempt).reports_twice:
            await self._report(lease_id, report)
        return reply

    async def release(self, lease_id: str, request: ReleaseRequest) -> ResultReply:
        await self._pass()
        return await super().release(lease_id, request)

    async def _report(self, lease_id: str, report: ResultReport) -> ResultReply:
        try:
            reply = await super().report(lease_id, report)
        except FencedError as error:
            reply = ResultReply(accepted=False, reason=str(error))
        line = Acknowledgement(
            lease_id=lease_id,
            attempt=report.attempt,
            outcome=report.outcome,
            reward=report.reward,
            accepted=reply.accepted,
            reason=reply.reason,
        )
        # One write, appended: several processes share the file.
        file = os.open(self._settings.acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, msgspec.json.encode(line) + b"\n")
        os.close(file)
        return reply

    async def _pass(self) -> None:
        if self.fate.is_dead:
            await asyncio.Event().wait()
        await asyncio.sleep(max(0.0, self.fate.cut_off_until - time.monotonic()))
