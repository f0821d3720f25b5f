"""The worker's side of the control API: the calls of `protocol.py`."""

from typing import TypeVar

from molt.agents._http import REPEATED, JsonClient
from molt.agents.errors import FencedError
from molt.agents.protocol import (
    API_PREFIX,
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
)

T = TypeVar("T")
REPLY_LIMIT_S = 10.0
"""Longest silence of the server, beyond what a long poll asks for."""
BUSY_LIMIT_S = 3600.0
"""How long a server that answers, but asks to wait, is obeyed: a full disk takes somebody to make room."""


class ControlApi:
    """Calls one server.

    Each method raises ServerError, see its subclasses; each is tried again while the server is unavailable, for up to
    `give_up_s` seconds. One object serves one event loop.
    """

    def __init__(self, server: str, *, token: str, give_up_s: float) -> None:
        self._prefix = server.rstrip("/") + API_PREFIX
        self._token = token
        self._give_up_s = give_up_s
        self._http = JsonClient(busy_limit_s=BUSY_LIMIT_S)

    def twin(self) -> "ControlApi":
        """Make another client of the same server, for another event loop."""
        return ControlApi(self._prefix.removesuffix(API_PREFIX), token=self._token, give_up_s=self._give_up_s)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for leases; waits up to `request.wait_s` for the first."""
        return await self._post("/leases", request, LeaseReply, timeout_s=request.wait_s + REPLY_LIMIT_S)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Keep leases, and learn which are lost."""
        return await self._post("/heartbeat", request, HeartbeatReply)

    async def report(self, lease_id: str, report: ResultReport) -> ResultReply:
        """Report how an attempt ended. A lease has one report, so one that was accepted before is this one.

        Raises:
            FencedError: The attempt is over; the report is kept, and does not count.
        """
        try:
            return await self._post(f"/leases/{lease_id}/result", report, ResultReply)
        except FencedError as exc:
            if exc.code != REPEATED:
                raise
            return ResultReply(accepted=True, repeated=True)

    async def release(self, lease_id: str, request: ReleaseRequest) -> ResultReply:
        """Give a lease back unrun."""
        return await self._post(f"/leases/{lease_id}/release", request, ResultReply)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _post(self, path: str, body: object, reply: type[T], *, timeout_s: float = REPLY_LIMIT_S) -> T:
        url = self._prefix + path
        return await self._http.post(
            url, body, reply, api_key=self._token, timeout_s=timeout_s, give_up_s=self._give_up_s
        )
