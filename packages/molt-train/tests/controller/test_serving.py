"""Serving: only engines that hold exactly the version being served get requests, through deaths and failed refits."""

import asyncio

import pytest

from molt.train.controller import serving as serving_module
from molt.train.controller.serving import Serving
from molt.train.engine.protocol import EngineChunk, EngineRequest, EngineSampling
from molt.train.engine.router import Router
from molt.train.errors import ActorError, EngineDeadError, RunError, StallError

LIMIT_S = 5.0
"""Of waits that take a few turns of the event loop, so that one without an end fails where it waits."""


class Engine:
    """Answers with its name as the one token's version."""

    def __init__(self, name):
        self.name = name

    async def generate(self, request):
        await asyncio.sleep(0)
        return EngineChunk(token_ids=[1], logprobs=[0.0], versions=[self.name], finish_reason="stop")


class Fleet:
    """Two engines; a replaced one gets the number 10 higher."""

    def __init__(self, log, *, restarts=5):
        self.engines = [Engine(0), Engine(1)]
        self.gone = []
        self._log, self._restarts = log, restarts

    @property
    def actors(self):
        return [engine.name for engine in self.engines]

    async def dead(self):
        gone, self.gone = self.gone, []
        return gone

    async def replace(self, indices):
        self._log.append(("replace", tuple(indices)))
        if self._restarts < len(indices):
            raise RunError("engine.max_restarts is spent")
        self._restarts -= len(indices)
        for index in indices:
            self.engines[index] = Engine(self.engines[index].name + 10)


class Actor:
    """Sends weights. The next refits fail as `faults` says; the one number `held` stays under way until `go_on`."""

    def __init__(self, log):
        self._log = log
        self.faults = []
        self.held = 0
        self.go_on = asyncio.Event()
        self.is_held = asyncio.Event()
        self._num_refits = 0

    async def connect(self, engines, *, workers_per_engine):
        self._log.append(("connect", tuple(engines), workers_per_engine))

    async def refit(self, version):
        self._log.append(("refit", version))
        self._num_refits += 1
        if self._num_refits == self.held:
            self.is_held.set()
            await self.go_on.wait()
        fault = self.faults.pop(0) if self.faults else None
        if fault:
            raise fault


class Bench:
    def __init__(self, **fleet):
        self.log, self.events = [], []
        self.fleet, self.actor, self.router = Fleet(self.log, **fleet), Actor(self.log), Router()
        self.serving = Serving(
            self.fleet,
            self.router,
            self.actor,
            workers_per_engine=2,
            on_event=lambda kind, detail: self.events.append((kind, detail)),
        )
        self._num_requests = 0

    def ask(self):
        """Send a request of a session of its own; the task gives the name of the engine that answered."""
        self._num_requests += 1
        name = f"s{self._num_requests}"
        request = EngineRequest(
            request_id=name, prompt_token_ids=[1], sampling=EngineSampling(max_tokens=1), affinity=(name,)
        )

        async def answer():
            async with asyncio.timeout(LIMIT_S):
                return (await self.router.generate(request)).versions[0]

        return asyncio.create_task(answer())

    async def reach_held_refit(self):
        await settle()
        assert self.actor.is_held.is_set(), f"refit {self.actor.held} is not under way: {self.log}"


@pytest.fixture
async def bench():
    bench = Bench()
    await bench.serving.open(0, send=False)
    return bench


@pytest.fixture
def eager_supervision(monkeypatch):
    monkeypatch.setattr(serving_module, "HEALTH_INTERVAL_S", 0.0)


async def settle():
    """Let every other task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_fresh_run_serves_what_the_engines_have_loaded(bench):
    assert bench.log == [("connect", (0, 1), 2)]
    assert bench.serving.version == 0
    assert await bench.ask() in (0, 1)


async def test_a_resumed_run_sends_the_weights_before_the_first_request_is_served():
    bench = Bench()
    bench.actor.held = 1
    opening = asyncio.create_task(bench.serving.open(7, send=True))
    await bench.reach_held_refit()
    with pytest.raises(EngineDeadError):
        await bench.ask()
    bench.actor.go_on.set()
    await opening
    assert await bench.ask() in (0, 1)
    assert (bench.log, bench.serving.version) == ([("connect", (0, 1), 2), ("refit", 7)], 7)


async def test_a_refit_leaves_the_engines_in_service(bench):
    await bench.serving.refit(1)
    assert (bench.log[1:], bench.serving.version, bench.events) == ([("refit", 1)], 1, [])
    assert await bench.ask() in (0, 1)


@pytest.mark.parametrize("fault", [ActorError("broadcast broke"), StallError("no answer")])
async def test_after_a_failed_refit_no_engine_serves_again_that_was_there(bench, fault):
    bench.actor.faults = [fault]
    await bench.serving.refit(1)
    assert bench.log[1:] == [("refit", 1), ("replace", (0, 1)), ("connect", (10, 11), 2), ("refit", 1)]
    assert bench.events == [("refit_failed", {"version": 1, "error": str(fault)})]
    assert bench.serving.version == 1
    assert {await bench.ask() for _ in range(4)} <= {10, 11}


async def test_no_engine_serves_while_those_of_a_failed_refit_are_replaced(bench):
    bench.actor.faults = [ActorError("broke")]
    bench.actor.held = 2  # that of the new engines
    refit = asyncio.create_task(bench.serving.refit(1))
    await bench.reach_held_refit()
    with pytest.raises(EngineDeadError):
        await bench.ask()
    bench.actor.go_on.set()
    await refit
    assert await bench.ask() in (10, 11)


async def test_a_second_failed_refit_ends_the_run(bench):
    bench.actor.faults = [ActorError("broke"), ActorError("broke again")]
    with pytest.raises(ActorError, match="broke again"):
        await bench.serving.refit(1)


async def test_a_dead_engine_is_replaced_and_refitted_before_it_is_admitted(bench, eager_supervision):
    await bench.serving.refit(3)
    bench.fleet.gone = [1]
    bench.actor.held = 2
    supervision = asyncio.create_task(bench.serving.supervise())
    await bench.reach_held_refit()
    assert bench.log[2:] == [("replace", (1,)), ("connect", (0, 11), 2), ("refit", 3)]
    assert {await request for request in [bench.ask() for _ in range(4)]} == {0}  # the other goes on alone meanwhile
    bench.actor.go_on.set()
    await settle()
    assert {await request for request in [bench.ask() for _ in range(4)]} == {0, 11}
    supervision.cancel()


async def test_an_engine_that_dies_during_a_refit_is_replaced_after_it(bench, eager_supervision):
    bench.actor.held = 1
    refit = asyncio.create_task(bench.serving.refit(1))
    await bench.reach_held_refit()
    bench.fleet.gone = [0]
    supervision = asyncio.create_task(bench.serving.supervise())
    await settle()
    assert bench.log[1:] == [("refit", 1)]
    bench.actor.go_on.set()
    await refit
    await settle()
    assert bench.log[1:] == [("refit", 1), ("replace", (0,)), ("connect", (10, 1), 2), ("refit", 1)]
    supervision.cancel()


async def test_a_death_without_a_restart_left_ends_the_run(eager_supervision):
    bench = Bench(restarts=0)
    await bench.serving.open(0, send=False)
    bench.fleet.gone = [0]
    with pytest.raises(RunError, match=r"engine.max_restarts is spent"):
        async with asyncio.timeout(LIMIT_S):
            await bench.serving.supervise()
