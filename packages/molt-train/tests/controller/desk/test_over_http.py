# ruff: noqa: TID252 - the folders of tests are no installed package
"""The desk behind the real server."""

import asyncio
import errno
import select
import socket
import sys
from asyncio.subprocess import PIPE

import httpx
import msgspec
import pytest

from molt.agents.control import ControlApi
from molt.agents.errors import FencedError
from molt.agents.protocol import HeartbeatRequest, LeaseRequest, ReleaseRequest
from molt.train.observe.metrics import Metrics
from molt.train.server import HttpServer, bind, create_app

from .reports import ASK, done


async def test_the_real_client_over_the_real_server(make_desk, open_group, call_model, pool, clock):
    sock = bind("127.0.0.1", 0, token="t")
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    desk = make_desk(url)
    server = HttpServer(create_app(desk, no_gateway, Metrics(), token="t"), sock)
    await server.start()
    api = ControlApi(url, token="t", give_up_s=1)
    poll = asyncio.create_task(api.lease(LeaseRequest(worker_id="w", capacity=4, wait_s=30)))
    open_group(3)
    first, second, third = (await poll).leases
    assert first.session.session_url.startswith(f"{url}/s/")
    for lease in (first, second):
        call_model(lease.session.session_id)
    beat = await api.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=(first.lease_id, "gone")))
    assert beat.lost == ("gone",)
    assert (await api.report(first.lease_id, done(1.0))).accepted
    assert (await api.report(first.lease_id, done(2.0))).repeated
    assert (await api.release(third.lease_id, ReleaseRequest(worker_id="w", attempt=1))).accepted
    clock.now += 31.0
    await desk.expire()
    with pytest.raises(FencedError, match="expired"):
        await api.report(second.lease_id, done(3.0))
    async with httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"authorization": "Bearer t"}) as client:
        status = (await client.get("/status")).json()
        assert (status["step"], status["num_open_sessions"]) == (7, 0)
        assert (status["pool"]["num_waiting"], status["pool"]["num_leased"]) == (2, 0)
        recording = (await client.get(f"/sessions/{second.session.session_id}")).json()
        assert (recording["state"], recording["turns"][0]["token_ids"]) == ("closed", [7, 8])
        assert recording["segments"][0]["versions"] == [None, None, 3, 4]
    desk.finish()
    assert (await api.lease(LeaseRequest(worker_id="w", capacity=1))).finished
    await api.close()
    await server.stop()


async def no_gateway(_scope, _receive, _send):
    raise AssertionError("no model call is made here")


@pytest.fixture
async def served(make_desk):
    """A desk and the server in front of it."""
    sock = bind("127.0.0.1", 0, token="t")
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    desk = make_desk(url)
    server = HttpServer(create_app(desk, no_gateway, Metrics(), token="t"), sock)
    await server.start()
    yield desk, server
    await server.stop(grace_s=1)


async def test_a_worker_that_dies_before_it_has_read_its_leases_costs_no_attempt(served, open_group, pool):
    desk, server = served
    open_group(2)
    host, port = server.url.removeprefix("http://").split(":")
    body = msgspec.json.encode(ASK)
    head = f"POST /api/v1/leases HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t\r\ncontent-length: {len(body)}\r\n\r\n"

    def ask_and_die():
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            assert select.select([connection], [], [], 5)[0]

    await asyncio.to_thread(ask_and_die)
    assert await pool.wait_offers(5.0)
    again = (await desk.lease(ASK)).leases
    assert [(lease.rollout_id, lease.attempt) for lease in again] == [("g1.0", 2), ("g1.1", 2)]
    assert [row.failures for row in pool.ledger.rollouts("g1")] == [0, 0]


async def test_a_full_disk_stops_leases_and_loses_no_result(served, open_group, pool, disk, monkeypatch):
    monkeypatch.setattr("molt.train.server.errors.NO_ROOM_S", 0.001)
    monkeypatch.setattr(
        "molt.agents._http._retry_after", lambda response: 0.001 if response.status_code == 503 else None
    )
    _, server = served
    api = ControlApi(server.url, token="t", give_up_s=0.0)
    open_group(2)
    first, _ = (await api.lease(ASK)).leases
    full = FullDisk(pool.ledger)
    disk.free = 0
    asking = asyncio.create_task(api.lease(LeaseRequest(worker_id="w", capacity=1, wait_s=0.0)))
    reporting = asyncio.create_task(api.report(first.lease_id, done(0.5)))
    await full.refused.wait()
    async with httpx.AsyncClient(headers={"authorization": "Bearer t"}) as client:
        response = await client.post(f"{server.url}/api/v1/leases", content=msgspec.json.encode(ASK))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "no room on its disk: no leases are granted" in response.json()["error"]["message"]
    assert not asking.done()
    assert not reporting.done()
    assert list(pool.ledger.results()) == []
    disk.free = 1 << 40
    full.free()
    assert (await reporting).accepted
    assert (await asking).leases == ()
    assert [(r.outcome.reward, r.counted) for r in pool.ledger.results()] == [(0.5, True)]
    await api.close()


class FullDisk:
    """Has every write of a ledger fail, until there is room again."""

    def __init__(self, ledger):
        self.refused = asyncio.Event()
        self._ledger, self._add_result = ledger, ledger.add_result
        ledger.add_result = self._refuse

    def _refuse(self, *_args, **_kwargs):
        self.refused.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    def free(self):
        self._ledger.add_result = self._add_result


HANGS = """
import asyncio
from molt.agents import ChatAgent, ChatAgentRunner

class Hangs(ChatAgent):
    async def run(self, ctx):
        await asyncio.Event().wait()

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Hangs)
"""


async def test_a_worker_without_a_free_slot_ends_well_with_the_run(make_desk, open_group, pool, tmp_path):
    """It asks for nothing, so it hears of the end by its heartbeat; then the server goes away."""
    (tmp_path / "agent.py").write_text(HANGS)
    sock = bind("127.0.0.1", 0, token="t")
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    desk = make_desk(url, heartbeat_s=0.2)
    server = HttpServer(create_app(desk, no_gateway, Metrics(), token="t"), sock)
    await server.start()
    open_group(1)
    command = ["-m", "molt.agents", "work", str(tmp_path / "agent.py"), "--server", url, "--token", "t"]
    worker = await asyncio.create_subprocess_exec(sys.executable, *command, "--concurrency", "1", stderr=PIPE)
    try:
        async with asyncio.timeout(30):
            while not pool.status().num_leased:  # noqa: ASYNC110 - nobody says so
                await asyncio.sleep(0.01)
            await desk.dismiss()
            await desk.close()
            await server.stop(grace_s=1)
            _, stderr = await worker.communicate()
    finally:
        if worker.returncode is None:
            worker.kill()
    assert worker.returncode == 0, stderr.decode()
    assert "the server is finished" in stderr.decode()
    assert [lease.state for lease in pool.ledger.leases()] == ["released"]
