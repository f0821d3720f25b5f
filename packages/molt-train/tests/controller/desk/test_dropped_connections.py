"""A real worker and the real server, with connections that break all the time in between."""

import asyncio
import contextlib
import random

import pytest

from molt.agents import AgentRunner, Result
from molt.agents.control import ControlApi
from molt.agents.worker import Worker
from molt.train.observe.metrics import Metrics
from molt.train.server import HttpServer, bind, create_app


class Cutter:
    """Passes bytes on between clients and a server; cuts a connection instead, now and then."""

    def __init__(self, port, seed):
        self._port, self._random = port, random.Random(seed)
        self.cuts = {"request": 0, "answer": 0}
        self._tasks = set()

    async def start(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        passing = [
            asyncio.create_task(self._pass_on(reader, up_writer, "request", 0.1)),
            asyncio.create_task(self._pass_on(up_reader, writer, "answer", 0.3)),
        ]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in passing:
                task.cancel()
            for end in (writer, up_writer):
                end.transport.abort()
            await asyncio.gather(*passing, return_exceptions=True)

    async def _pass_on(self, reader, writer, kind, share):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if self._random.random() < share:
                    self.cuts[kind] += 1
                    return
                writer.write(data)


class Counts(AgentRunner):
    """Remembers which attempts it ran."""

    def __init__(self):
        self.ran = []

    async def run(self, ctx):
        self.ran.append((ctx.rollout_id, ctx.attempt))
        await asyncio.sleep(0)
        return Result(1.0)


async def no_gateway(_scope, _receive, _send):
    raise AssertionError("no model call is made here")


@pytest.mark.parametrize("seed", range(3))
async def test_every_rollout_counts_once_and_no_attempt_is_spent(make_desk, open_group, pool, monkeypatch, seed):
    monkeypatch.setattr("molt.agents._http.BACKOFF_END_S", 0.01)
    sock = bind("127.0.0.1", 0, token="t")
    desk = make_desk(heartbeat_s=0.02)
    server = HttpServer(create_app(desk, no_gateway, Metrics(), token="t"), sock)
    await server.start()
    cutter = Cutter(sock.getsockname()[1], seed)
    url, runner = await cutter.start(), Counts()
    groups = [open_group(4) for _ in range(15)]
    worker = Worker(runner, ControlApi(url, token="t", give_up_s=30.0), concurrency=4, drain_s=1.0)
    working = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        assert await pool.wait_groups(len(groups), 60.0)
        desk.finish()
        await working
    await cutter.stop()
    await server.stop(grace_s=1)

    assert min(cutter.cuts.values()) > 5, "or nothing was shown"
    rollouts = [row for group in groups for row in pool.ledger.rollouts(group)]
    assert {(row.state, row.failures) for row in rollouts} == {("finished", 0)}
    counted = [result.rollout_id for result in pool.ledger.results() if result.counted]
    assert sorted(counted) == sorted(row.rollout_id for row in rollouts)
    assert sorted({rollout_id for rollout_id, _ in runner.ran}) == sorted(counted)
    assert pool.status().num_leased == 0
    assert worker.outcomes == {"completed": 60}, "each was acknowledged in the end"
    assert pool.counters["leases_taken_back"] > 0
