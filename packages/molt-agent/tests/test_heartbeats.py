"""Heartbeats while the agent blocks the worker's event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from molt.agents import AgentRunner, Context, Result
from molt.agents.heartbeats import Heartbeats
from molt.agents.protocol import HeartbeatReply, HeartbeatRequest
from molt.agents.testing import ScriptedLeases, ScriptedModel
from molt.agents.worker import Worker


class Blocks(AgentRunner):
    """Blocks its event loop until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    async def run(self, ctx: Context) -> Result:
        self.let_go.wait(30)
        return Result(1.0)


@pytest.fixture
async def leases(model: ScriptedModel) -> AsyncIterator[ScriptedLeases]:
    async with ScriptedLeases([{}], session=model.session(), heartbeat_s=0.01) as scripted:
        yield scripted


async def in_thread(leases: ScriptedLeases, runner: AgentRunner) -> None:
    """Run a worker in an event loop of its own, so that it can be blocked while its server goes on."""

    async def work() -> None:
        await Worker(runner, leases.api(), concurrency=1, drain_s=1.0).run()

    await asyncio.to_thread(asyncio.run, work())


async def test_a_blocked_event_loop_loses_no_lease(leases: ScriptedLeases):
    runner = Blocks()
    working = asyncio.create_task(in_thread(leases, runner))
    await leases.wait_until(lambda: len(leases.heartbeats) >= 3)
    runner.let_go.set()
    await working
    assert {beat.lease_ids for beat in leases.heartbeats} == {("rollout-0.1",)}
    assert [(r.report.outcome, r.accepted) for r in leases.results] == [("completed", True)]


async def test_who_blocks_the_event_loop_is_pointed_out(
    leases: ScriptedLeases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("molt.agents.heartbeats.LATE_S", 0.01)
    monkeypatch.setattr("molt.agents.heartbeats.PING_S", 0.01)
    runner, said = Blocks(), threading.Event()

    def on_record(record: Any) -> bool:
        if "blocks the event loop" in record.getMessage() and "test_heartbeats.py" in record.getMessage():
            runner.let_go.set()
            said.set()
        return True

    caplog.handler.addFilter(on_record)
    await in_thread(leases, runner)
    assert said.is_set()
    assert f"make its blocking method a plain `def`; {__file__}:" in caplog.text


class Api:
    """Answers heartbeats, and keeps them."""

    def __init__(self) -> None:
        self.beats: list[tuple[str, ...]] = []
        self.closed = False

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self.beats.append(request.lease_ids)
        return HeartbeatReply(lost=())

    async def close(self) -> None:
        self.closed = True


async def test_a_lease_is_not_kept_alive_for_ever(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("molt.agents.heartbeats.OVERDUE_S", 100.0)
    now, api, beat = [0.0], Api(), asyncio.Event()
    heartbeats = Heartbeats(api, worker_id="w", on_reply=lambda _: beat.set(), clock=lambda: now[0])  # type: ignore[arg-type]
    for lease_id, timeout_s in (("short", 10.0), ("long", 1000.0)):
        heartbeats.hold(msgspec.structs.replace(model.lease({}, timeout_s=timeout_s), lease_id=lease_id))
    running = asyncio.create_task(heartbeats.run())
    heartbeats.every(0.0)
    await beat.wait()
    assert api.beats[0] == ("short", "long")
    now[0] = 111.0
    for _ in range(2):  # one may have been under way
        beat.clear()
        await beat.wait()
    assert api.beats[-1] == ("long",)
    running.cancel()
    await asyncio.wait({running})
    assert api.closed


async def test_a_worker_that_never_connected_ends_without_a_thread(model: ScriptedModel):
    heartbeats = Heartbeats(Api(), worker_id="w", on_reply=lambda _: None)  # type: ignore[arg-type]
    running = asyncio.create_task(heartbeats.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
