"""The worker against a scripted trainer, in one event loop."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from molt.agents import (
    AgentRunner,
    AuthenticationError,
    ChatAgent,
    ChatAgentRunner,
    Context,
    Result,
    ServerError,
    ServerUnavailableError,
)
from molt.agents.testing import ScriptedLeases, ScriptedModel
from molt.agents.worker import Worker


class Echo(ChatAgent):
    async def run(self, ctx: Context) -> Result:
        return Result(ctx.data["reward"])


class Held(AgentRunner):
    """Runs rollouts that end when they are let go; counts what happens to them."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[Context] = asyncio.Queue()
        self.let_go = asyncio.Event()
        self.cancelled: list[str] = []
        self.running = 0
        self.most_running = 0
        self.closed = False

    async def run(self, ctx: Context) -> Result:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.started.put_nowait(ctx)
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(f"{ctx.rollout_id}.{ctx.attempt}")
            raise
        finally:
            self.running -= 1
        return Result(1.0)

    async def close(self) -> None:
        self.closed = True


def rows(num: int) -> list[dict[str, Any]]:
    return [{"reward": float(i)} for i in range(num)]


def make_worker(leases: ScriptedLeases, runner: AgentRunner | None = None, **options: Any) -> Worker:
    settings = {"concurrency": 4, "drain_s": 10.0, **options}
    return Worker(runner or ChatAgentRunner(Echo), leases.api(), **settings)


@pytest.fixture
async def leases(model: ScriptedModel, request: pytest.FixtureRequest) -> AsyncIterator[ScriptedLeases]:
    async with ScriptedLeases(rows(getattr(request, "param", 1)), session=model.session()) as scripted:
        yield scripted


def outcomes(leases: ScriptedLeases) -> list[tuple[str, int, str, bool]]:
    return sorted((r.lease.rollout_id, r.report.attempt, r.report.outcome, r.accepted) for r in leases.results)


@pytest.mark.parametrize("leases", [20], indirect=True)
async def test_every_task_is_run_and_reported_once_until_the_run_is_finished(leases: ScriptedLeases):
    worker = make_worker(leases)
    await worker.run()
    assert sorted(r.report.reward or 0.0 for r in leases.results) == [float(i) for i in range(20)]
    assert all(r.accepted and r.report.worker_id == worker.worker_id for r in leases.results)
    assert worker.outcomes == {"completed": 20}
    assert leases.num_requests["result"] == 20


@pytest.mark.parametrize("leases", [10], indirect=True)
async def test_it_holds_no_more_leases_than_its_concurrency(leases: ScriptedLeases):
    runner = Held()
    running = asyncio.create_task(make_worker(leases, runner, concurrency=3).run())
    for _ in range(3):
        await runner.started.get()
    assert len(leases.granted) == 3
    assert leases.num_requests["leases"] == 1
    runner.let_go.set()
    await running
    assert runner.most_running == 3
    assert len(leases.results) == 10


async def test_it_says_what_it_has_with_every_request_for_leases(leases: ScriptedLeases):
    worker = make_worker(leases, concurrency=3, labels={"arch": "arm64"})
    await worker.run()
    first, *later = leases.requests
    assert (first.worker_id, first.capacity, first.concurrency) == (worker.worker_id, 3, 3)
    assert [request.labels for request in leases.requests] == [{"arch": "arm64"}] * len(leases.requests)
    assert first.request_id not in {request.request_id for request in later}


async def test_every_try_of_a_request_for_leases_has_one_id(leases: ScriptedLeases, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("molt.agents._http.BACKOFF_START_S", 0.001)
    leases.cut_after("leases")
    await make_worker(leases, concurrency=1).run()
    first, second, *_ = leases.requests
    assert first.request_id == second.request_id
    assert [(r.lease.rollout_id, r.accepted) for r in leases.results] == [("rollout-0", True)]


class OneEnds(Held):
    """The first rollout ends by itself, as soon as it may."""

    def __init__(self) -> None:
        super().__init__()
        self.end_first = asyncio.Event()

    async def run(self, ctx: Context) -> Result:
        if ctx.rollout_id != "rollout-0":
            return await super().run(ctx)
        self.started.put_nowait(ctx)
        await self.end_first.wait()
        return Result(1.0)


@pytest.mark.parametrize(("heartbeat_s", "num_released"), [(0.01, 2), (3600.0, 1)], ids=["heartbeat", "result"])
async def test_the_end_of_the_run_is_learnt_from_any_answer(
    model: ScriptedModel, heartbeat_s: float, num_released: int
):
    """No slot is free, so no lease is asked for: other answers say it, and nobody waits for what still runs."""
    runner = OneEnds()
    async with ScriptedLeases(rows(3), session=model.session(), heartbeat_s=heartbeat_s) as leases:
        running = asyncio.create_task(make_worker(leases, runner, concurrency=2, drain_s=3600.0).run())
        for _ in range(2):
            await runner.started.get()
        leases.finish()
        if num_released == 1:
            runner.end_first.set()
        await running
    assert leases.num_requests["leases"] == 1
    assert len(leases.released) == num_released


async def test_a_server_that_said_that_it_is_finished_may_go_away(model: ScriptedModel):
    runner = Held()
    async with ScriptedLeases(rows(1), session=model.session()) as leases:
        running = asyncio.create_task(Worker(runner, leases.api(give_up_s=0.01), concurrency=1, drain_s=3600.0).run())
        await runner.started.get()
        leases.fail("release", times=1000, status=None)
        leases.finish()
        await running
    assert leases.num_requests["release"] > 0
    assert leases.released == []


async def test_a_result_whose_acknowledgement_was_lost_counts(leases: ScriptedLeases, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("molt.agents._http.BACKOFF_START_S", 0.001)
    leases.cut_after("result")
    worker = make_worker(leases)
    await worker.run()
    assert outcomes(leases) == [("rollout-0", 1, "completed", False), ("rollout-0", 1, "completed", True)]
    assert worker.outcomes == {"completed": 1}


@pytest.mark.parametrize("leases", [3], indirect=True)
async def test_one_heartbeat_names_all_held_leases(leases: ScriptedLeases):
    runner = Held()
    worker = make_worker(leases, runner)
    running = asyncio.create_task(worker.run())
    await leases.wait_until(lambda: len(leases.heartbeats) >= 2)
    for beat in leases.heartbeats:
        assert beat.worker_id == worker.worker_id
        assert sorted(beat.lease_ids) == ["rollout-0.1", "rollout-1.1", "rollout-2.1"]
    runner.let_go.set()
    await running


async def test_a_lost_lease_is_cancelled_and_not_reported(leases: ScriptedLeases):
    runner = Held()
    running = asyncio.create_task(make_worker(leases, runner, concurrency=1).run())
    await runner.started.get()
    leases.lose("rollout-0.1")
    again = await runner.started.get()  # one slot: the first attempt has ended
    assert runner.cancelled == ["rollout-0.1"]
    assert again.attempt == 2
    runner.let_go.set()
    await running
    assert outcomes(leases) == [("rollout-0", 2, "completed", True)]


async def test_a_fenced_result_is_refused_and_the_worker_goes_on(
    leases: ScriptedLeases, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    runner = Held()
    worker = make_worker(leases, runner, concurrency=1)
    running = asyncio.create_task(worker.run())
    await runner.started.get()
    leases.fence("rollout-0.1")
    runner.let_go.set()
    await running
    assert outcomes(leases) == [("rollout-0", 1, "completed", False), ("rollout-0", 2, "completed", True)]
    assert runner.cancelled == []
    assert worker.outcomes == {"completed": 1}
    assert "rollout rollout-0, attempt 1: fenced" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("route", ["leases", "result", "heartbeat"])
async def test_requests_that_fail_are_tried_again(leases: ScriptedLeases, route: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("molt.agents._http.BACKOFF_START_S", 0.001)
    leases.fail(route, times=2, status=503)
    leases.fail(route, times=1, status=None)
    runner = Held()
    running = asyncio.create_task(make_worker(leases, runner).run())
    if route == "heartbeat":
        await leases.wait_until(lambda: bool(leases.heartbeats))
    runner.let_go.set()
    await running
    assert outcomes(leases) == [("rollout-0", 1, "completed", True)]
    assert leases.num_requests[route] >= 4


@pytest.mark.parametrize("leases", [2], indirect=True)
async def test_a_result_that_the_server_refuses_does_not_end_the_worker(
    leases: ScriptedLeases, caplog: pytest.LogCaptureFixture
):
    leases.fail("result", status=413)
    worker = make_worker(leases, concurrency=1)
    running = asyncio.create_task(worker.run())
    await leases.wait_until(lambda: len(leases.results) == 1)
    leases.finish()
    await running
    assert worker.outcomes == {"completed": 1}
    assert "result refused" in caplog.text
    assert "HTTP 413" in caplog.text


async def test_a_server_that_stays_away_ends_the_worker(leases: ScriptedLeases):
    leases.fail("leases", times=1000)
    worker = Worker(ChatAgentRunner(Echo), leases.api(give_up_s=0.05), concurrency=1, drain_s=10.0)
    with pytest.raises(ServerUnavailableError, match=r"no usable answer for 0.05 s: .*/api/v1/leases: HTTP 503"):
        await worker.run()


async def test_a_server_that_goes_away_in_mid_rollout_ends_the_worker_and_its_rollouts(model: ScriptedModel):
    runner = Held()
    async with ScriptedLeases(rows(1), session=model.session()) as leases:
        worker = Worker(runner, leases.api(give_up_s=0.05), concurrency=1, drain_s=10.0)
        running = asyncio.create_task(worker.run())
        await runner.started.get()
    with pytest.raises(ServerUnavailableError):
        await running
    assert runner.cancelled == ["rollout-0.1"]
    assert runner.closed


async def test_a_wrong_token_ends_the_worker(leases: ScriptedLeases):
    worker = make_worker(leases)
    leases.token = "another"
    with pytest.raises(AuthenticationError, match="HTTP 401: wrong token"):
        await worker.run()


async def test_a_server_that_is_no_trainer_ends_the_worker(model: ScriptedModel):
    class NoTrainer(ScriptedLeases):
        async def _answer(self, route, lease_id, body):
            return await super()._answer("unknown", lease_id, body)

    async with NoTrainer(rows(1), session=model.session()) as leases:
        with pytest.raises(ServerError, match="/api/v1/leases: HTTP 404"):
            await make_worker(leases).run()


@pytest.mark.parametrize("leases", [2], indirect=True)
async def test_stopping_takes_no_more_leases_and_finishes_those_held(leases: ScriptedLeases):
    runner = Held()
    worker = make_worker(leases, runner, concurrency=1)
    running = asyncio.create_task(worker.run())
    await runner.started.get()
    worker.stop()
    num_beats = len(leases.heartbeats)
    await leases.wait_until(lambda: len(leases.heartbeats) > num_beats)  # leases are kept alive meanwhile
    runner.let_go.set()
    await running
    assert outcomes(leases) == [("rollout-0", 1, "completed", True)]
    assert leases.released == []
    assert len(leases.granted) == 1


async def test_a_poll_under_way_is_withdrawn_when_stopping(leases: ScriptedLeases):
    runner = Held()
    worker = make_worker(leases, runner, concurrency=2)
    running = asyncio.create_task(worker.run())
    await runner.started.get()
    await leases.wait_until(lambda: leases.num_polling == 1)
    worker.stop()
    await leases.wait_until(lambda: leases.num_polling == 0)
    leases.fence("rollout-0.1")  # which offers another lease
    runner.let_go.set()
    await running
    assert [lease.lease_id for lease in leases.granted] == ["rollout-0.1"]


@pytest.mark.parametrize("leases", [2], indirect=True)
async def test_what_does_not_finish_within_the_drain_is_given_back(leases: ScriptedLeases):
    runner = Held()
    worker = make_worker(leases, runner, drain_s=0.05)
    running = asyncio.create_task(worker.run())
    await runner.started.get()
    await runner.started.get()
    worker.stop()
    await running
    assert sorted(lease.lease_id for lease in leases.released) == ["rollout-0.1", "rollout-1.1"]
    assert sorted(runner.cancelled) == ["rollout-0.1", "rollout-1.1"]
    assert leases.results == []
    assert runner.closed


async def test_a_second_stop_gives_leases_back_at_once(leases: ScriptedLeases):
    runner = Held()
    worker = make_worker(leases, runner, drain_s=3600.0)
    running = asyncio.create_task(worker.run())
    await runner.started.get()
    worker.stop()
    worker.stop()
    await running
    assert [lease.lease_id for lease in leases.released] == ["rollout-0.1"]


async def test_a_report_under_way_is_finished_and_not_released(leases: ScriptedLeases):
    runner = Held()
    runner.let_go.set()
    leases.fail("result", times=2, status=503)
    worker = make_worker(leases, runner, drain_s=0.0)
    running = asyncio.create_task(worker.run())
    await leases.wait_until(lambda: leases.num_requests["result"] == 1)
    worker.stop()
    await running
    assert outcomes(leases) == [("rollout-0", 1, "completed", True)]
    assert leases.released == []


async def test_an_idle_worker_stops_at_once(leases: ScriptedLeases):
    busy_runner = Held()
    busy = asyncio.create_task(make_worker(leases, busy_runner, concurrency=1).run())
    await busy_runner.started.get()
    idle_worker = make_worker(leases)
    idle = asyncio.create_task(idle_worker.run())
    await leases.wait_until(lambda: leases.num_polling == 1)
    idle_worker.stop()
    await asyncio.wait({idle}, timeout=5)  # its poll would take 20 s, a drain 10 s
    assert idle.done()
    assert not busy.done()
    busy_runner.let_go.set()
    await busy


async def test_a_worker_whose_parent_is_gone_gives_its_leases_back(
    leases: ScriptedLeases, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("molt.agents.worker.PARENT_CHECK_S", 0.01)
    parent = os.getppid()
    monkeypatch.setattr("os.getppid", lambda: parent)
    runner = Held()
    running = asyncio.create_task(make_worker(leases, runner, parent_pid=parent).run())
    await runner.started.get()
    monkeypatch.setattr("os.getppid", lambda: 1)
    await running
    assert [lease.lease_id for lease in leases.released] == ["rollout-0.1"]


async def test_a_runner_that_does_not_close_does_not_keep_the_worker(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("molt.agents.rollout.CLOSE_LIMIT_S", 0.05)

    class Hangs(Held):
        async def close(self) -> None:
            await asyncio.Event().wait()

    class Fails(Held):
        async def close(self) -> None:
            raise OSError("already gone")

    for runner in (Hangs(), Fails()):
        runner.let_go.set()
        async with ScriptedLeases(rows(1), session=model.session()) as leases:
            await make_worker(leases, runner).run()
    assert "AgentRunner.close took longer than 0.05 s" in caplog.text
    assert "already gone" in caplog.text


async def test_a_bug_of_the_worker_is_not_swallowed(leases: ScriptedLeases, monkeypatch: pytest.MonkeyPatch):
    async def broken(*args: object, **kwargs: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("molt.agents.worker.run_lease", broken)
    with pytest.raises(AssertionError, match="a bug"):
        await make_worker(leases).run()


async def test_failed_rollouts_are_logged_in_one_line(leases: ScriptedLeases, caplog: pytest.LogCaptureFixture):
    class Fails(AgentRunner):
        async def run(self, ctx: Context) -> Result:
            raise ValueError("two\nlines")

    with caplog.at_level(logging.WARNING):
        await make_worker(leases, Fails()).run()
    assert outcomes(leases) == [("rollout-0", 1, "failed", True)]
    (record,) = caplog.records
    assert record.getMessage().startswith("rollout rollout-0, attempt 1: failed: ValueError: two lines (")
