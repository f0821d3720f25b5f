import asyncio

import httpx
import pytest
import pytest_asyncio

from molt.agents.protocol import HeartbeatReply, LeaseReply, ResultReply, SessionReply
from molt.train.errors import LedgerFullError
from molt.train.observe.metrics import Metrics
from molt.train.records.recording import Recording
from molt.train.server import ApiError, HttpServer, bind, create_app

TOKEN = "worker-token"


class FakeDesk:
    """Remembers what it was asked, and answers as told."""

    def __init__(self):
        self.forget()

    def forget(self):
        self.calls = []
        self.verdict = ResultReply(accepted=True)
        self.poll = None
        self.poll_started = asyncio.Event()
        self.poll_cancelled = asyncio.Event()
        self.taken_back = asyncio.Event()
        self.is_full = False

    async def lease(self, request):
        self.calls.append(request)
        if self.poll is not None:
            self.poll_started.set()
            try:
                await self.poll.wait()
            except asyncio.CancelledError:
                self.poll_cancelled.set()
                raise
        return LeaseReply(leases=(), heartbeat_s=2.5)

    def take_back(self, reply):
        assert reply == LeaseReply(leases=(), heartbeat_s=2.5)
        self.taken_back.set()

    def heartbeat(self, request):
        self.calls.append(request)
        if self.is_full:
            raise LedgerFullError("no room for the ledger in '/secret/folder'")
        return HeartbeatReply(lost=request.lease_ids[:1])

    async def report(self, lease_id, report):
        self.calls.append((lease_id, report))
        return self.verdict

    async def release(self, lease_id, request):
        self.calls.append((lease_id, request))
        return self.verdict

    def open_session(self, request):
        self.calls.append(request)
        return SessionReply(session_id="s", session_url="u/s/s", base_url="u/s/s/v1", api_key="k", model_name="m")

    async def finish_session(self, session_id, result):
        self.calls.append((session_id, result))
        return self.verdict

    def recording(self, session_id):
        if session_id == "broken":
            raise RuntimeError("a bug, with a secret in its text")
        if session_id != "s":
            raise ApiError(404, f"session {session_id!r} is unknown")
        return Recording(session_id="s", state="open", turns=[], segments=[], counters={"forks": 1})

    def status(self):
        return {"step": 3}


async def gateway(scope, receive, send):
    """Says what it was sent, as the raw ASGI application it stands for would see it."""
    text = f"gateway {scope['method']} {scope['path']}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": text})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    """One server for all tests of a module: starting and stopping one takes uvicorn 0.2 s."""
    desk, metrics = FakeDesk(), Metrics()
    http = HttpServer(create_app(desk, gateway, metrics, token=TOKEN), bind("127.0.0.1", 0, token=TOKEN))
    await http.start()
    yield http, desk, metrics
    await http.stop(grace_s=1)


@pytest.fixture
def server(served):
    return served[0]


@pytest.fixture
def desk(served):
    served[1].forget()
    return served[1]


@pytest.fixture
def metrics(served):
    return served[2]


@pytest_asyncio.fixture(loop_scope="module")
async def anyone(server):
    """A client without a token."""
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def worker(server):
    async with httpx.AsyncClient(
        base_url=f"{server.url}/api/v1", headers={"authorization": f"Bearer {TOKEN}"}, timeout=10
    ) as client:
        yield client
