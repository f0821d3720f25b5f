"""ScriptedLeases: the trainer's side of the worker API, for tests of agents and workers."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from molt.agents.control import ControlApi
from molt.agents.protocol import (
    API_PREFIX,
    ErrorDetail,
    ErrorReply,
    HeartbeatReply,
    HeartbeatRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
    SamplingParams,
    SessionCredentials,
)
from molt.agents.testing.loopback import LoopbackServer, Request, Response

WAIT_LIMIT_S = 20.0


class LeaseResult(msgspec.Struct, frozen=True):
    """A report that arrived, and whether it counts."""

    lease: Lease
    report: ResultReport
    accepted: bool


class ScriptedLeases(LoopbackServer):
    """Offers one rollout a task, in order, while entered with `async with`.

    A lease that is released, lost or fenced is offered again with the attempt raised. Once every rollout has a result
    that counts, workers are told that the run is finished.

    Args:
        tasks: Task rows.
        session: Where the rollouts' model calls go, such as `ScriptedModel.session()`.
        sampling_params: Those of every lease.
        timeout_s: The time of every lease, in seconds.
        heartbeat_s: How often workers are asked to heartbeat.
        token: The bearer token that workers must bring.
    """

    def __init__(
        self,
        tasks: Sequence[dict[str, Any]],
        *,
        session: SessionCredentials,
        sampling_params: SamplingParams | None = None,
        timeout_s: float = 10.0,
        heartbeat_s: float = 0.05,
        token: str = "scripted-worker-token",
    ) -> None:
        super().__init__()
        self.token = token
        self.granted: list[Lease] = []
        self.results: list[LeaseResult] = []
        self.released: list[Lease] = []
        self.requests: list[LeaseRequest] = []
        """Those for leases, every try."""
        self.heartbeats: list[HeartbeatRequest] = []
        self.num_requests: Counter[str] = Counter()
        """By route: `leases`, `heartbeat`, `result`, `release`; failed ones too."""
        self.num_polling = 0
        """Requests for leases that are being held now."""
        self._heartbeat_s = heartbeat_s
        self._num_tasks = len(tasks)
        self._finished = False
        self._held: dict[str, Lease] = {}
        self._fenced: set[str] = set()
        self._failures: dict[str, deque[int | None]] = {}
        self._cuts: Counter[str] = Counter()
        self._asked: dict[str, tuple[Lease, ...]] = {}
        """What was granted, by request."""
        self._changed = asyncio.Event()
        self._offers = deque(
            Lease(
                lease_id=f"rollout-{i}.1",
                rollout_id=f"rollout-{i}",
                group_id=f"group-{i}",
                attempt=1,
                task=task,
                session=session,
                sampling_params=sampling_params or SamplingParams(),
                timeout_s=timeout_s,
            )
            for i, task in enumerate(tasks)
        )

    def api(self, *, give_up_s: float = 5.0) -> ControlApi:
        """Make the client that a Worker takes."""
        return ControlApi(self.url, token=self.token, give_up_s=give_up_s)

    def lose(self, lease_id: str) -> None:
        """Take a lease away; its worker learns of it by its next heartbeat."""
        self._offer_again(self._held.pop(lease_id))

    def fence(self, lease_id: str) -> None:
        """Take a lease away without a word to its worker, whose result will be refused."""
        self._fenced.add(lease_id)
        self.lose(lease_id)

    def fail(self, route: str, *, times: int = 1, status: int | None = 503) -> None:
        """Answer the next requests of a route (see `num_requests`) with `status`; None cuts their connections."""
        self._failures.setdefault(route, deque()).extend([status] * times)

    def cut_after(self, route: str, *, times: int = 1) -> None:
        """Do what the next requests of a route ask for, and cut their connections instead of answering."""
        self._cuts[route] += times

    def finish(self) -> None:
        """Tell workers that the run is finished, whatever is still open."""
        self._finished = True
        self._notify()

    async def wait_until(self, condition: Callable[[], bool], *, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait until a condition on this object holds; it is looked at before and after every request.

        Raises:
            TimeoutError: It did not hold within `limit_s` seconds.
        """
        async with asyncio.timeout(limit_s):
            while not condition():
                await self._changed.wait()

    async def handle(self, request: Request) -> Response | None:
        """Answer one request of a worker."""
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _refuse(401, "authentication_error", "wrong token")
        lease_id, _, route = request.path.removeprefix(f"{API_PREFIX}/").removeprefix("leases/").rpartition("/")
        self.num_requests[route] += 1
        self._notify()
        try:
            if failures := self._failures.get(route):
                status = failures.popleft()
                return None if status is None else _refuse(status, "scripted_failure", "scripted failure")
            answer = await self._answer(route, lease_id, request.body)
            if not self._cuts[route]:
                return answer
            self._cuts[route] -= 1
            return None
        finally:
            self._notify()

    async def _answer(self, route: str, lease_id: str, body: bytes) -> Response:
        match route:
            case "leases":
                return await self._grant(msgspec.json.decode(body, type=LeaseRequest))
            case "heartbeat":
                return _json(self._beat(msgspec.json.decode(body, type=HeartbeatRequest)))
            case "result":
                return self._take_result(lease_id, msgspec.json.decode(body, type=ResultReport))
            case "release":
                return self._take_back(lease_id, msgspec.json.decode(body, type=ReleaseRequest))
            case _:
                return _refuse(404, "not_found", f"no route {route!r}")

    async def _grant(self, request: LeaseRequest) -> Response:
        if request.capacity < 1:
            return _refuse(400, "invalid_request", f"capacity is {request.capacity}: ask for 1 or more")
        self.requests.append(request)
        for lease in self._asked.pop(request.request_id, ()):  # the answer did not arrive
            if self._held.pop(lease.lease_id, None):
                self._offer_again(lease)
        self.num_polling += 1
        try:
            await self.wait_until(lambda: bool(self._offers) or self._is_finished(), limit_s=request.wait_s)
        except TimeoutError:
            return _json(LeaseReply(leases=(), heartbeat_s=self._heartbeat_s))
        finally:
            self.num_polling -= 1
        if self._is_finished():
            return _json(LeaseReply(leases=(), heartbeat_s=self._heartbeat_s, finished=True))
        leases = tuple(self._offers.popleft() for _ in range(min(request.capacity, len(self._offers))))
        self.granted += leases
        if request.request_id:
            self._asked[request.request_id] = leases
        self._held |= {lease.lease_id: lease for lease in leases}
        return _json(LeaseReply(leases=leases, heartbeat_s=self._heartbeat_s))

    def _beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self.heartbeats.append(request)
        lost = tuple(i for i in request.lease_ids if i not in self._held and i not in self._fenced)
        return HeartbeatReply(lost=lost, finished=self._is_finished())

    def _take_result(self, lease_id: str, report: ResultReport) -> Response:
        lease = next(lease for lease in self.granted if lease.lease_id == lease_id)
        accepted = self._held.pop(lease_id, None) is not None
        self.results.append(LeaseResult(lease, report, accepted))
        if accepted:
            return _json(ResultReply(accepted=True, finished=self._is_finished()))
        if any(result.accepted and result.lease.lease_id == lease_id for result in self.results):
            return _json(ResultReply(accepted=False, reason="the lease was reported before", repeated=True), status=409)
        return _refuse(409, "fenced", f"lease {lease_id} is not yours")

    def _take_back(self, lease_id: str, request: ReleaseRequest) -> Response:
        lease = self._held.pop(lease_id, None)
        if lease is None or lease.attempt != request.attempt:
            return _refuse(409, "fenced", f"lease {lease_id} is not yours")
        self.released.append(lease)
        self._offer_again(lease)
        return _json(ResultReply(accepted=True))

    def _offer_again(self, lease: Lease) -> None:
        attempt = lease.attempt + 1
        lease_id = f"{lease.rollout_id}.{attempt}"
        self._offers.append(msgspec.structs.replace(lease, attempt=attempt, lease_id=lease_id))
        self._notify()

    def _is_finished(self) -> bool:
        return self._finished or sum(result.accepted for result in self.results) == self._num_tasks

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _json(reply: msgspec.Struct, *, status: int = 200) -> Response:
    return Response(status=status, body=msgspec.json.encode(reply))


def _refuse(status: int, kind: str, message: str) -> Response:
    return Response(status=status, body=msgspec.json.encode(ErrorReply(error=ErrorDetail(type=kind, message=message))))
