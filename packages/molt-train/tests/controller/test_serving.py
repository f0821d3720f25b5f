"""Serving: only engines that hold exactly the version being served get requests, through deaths and failed refits."""

import asyncio
import contextlib

import pytest

from molt.train.controller import serving as serving_module
from molt.train.controller.serving import Serving
from molt.train.engine.protocol import EngineChunk, EngineRequest, EngineSampling
from molt.train.engine.router import Router
from molt.train.errors import ActorDeadError, ActorError, EngineDeadError, RunError, StallError
from molt.train.records.refit import Interrupted, RefitReport

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
    """Two engines; a restarted one gets the name 10 higher. A start of those in `slow` waits for `go_on`."""

    def __init__(self, log, *, restarts=5):
        self.engines = [Engine(0), Engine(1)]
        self.faults = {}
        self.slow, self.go_on = set(), asyncio.Event()
        self.stopped = []
        self._log, self._restarts = log, restarts

    @property
    def actors(self):
        return [engine.name for engine in self.engines]

    async def fault(self, index):
        fault = self.faults.get(index)
        if isinstance(fault, asyncio.Event):  # no answer, until it is set
            self.faults.pop(index)
            await fault.wait()
            return "no answer"
        return fault

    def stop(self, index, reason):
        self.stopped.append((self.engines[index].name, reason))
        self.faults.pop(index, None)

    async def restart(self, index):
        self._log.append(("restart", index))
        if not self._restarts:
            raise RunError("engine.max_restarts is spent")
        self._restarts -= 1
        self.engines[index] = Engine(self.engines[index].name + 10)
        if index in self.slow:
            await self.go_on.wait()


class Actor:
    """Sends weights of `version`. The next refits fail as `faults` says; number `held` waits until `go_on`."""

    def __init__(self, log):
        self._log = log
        self.version = 0
        self.faults, self.connect_faults = [], []
        self.held = 0
        self.go_on = asyncio.Event()
        self.is_held = asyncio.Event()
        self._num_refits = 0

    async def connect(self, engines, *, workers_per_engine):
        assert workers_per_engine == 2
        self._log.append(("connect", *engines))
        if self.connect_faults:
            raise self.connect_faults.pop(0)

    async def refit(self, at_least):
        if self.version < at_least:
            return RefitReport(version=self.version, sent=False)
        self._log.append(("refit", self.version))
        self._num_refits += 1
        if self._num_refits == self.held:
            self.is_held.set()
            await self.go_on.wait()
        fault = self.faults.pop(0) if self.faults else None
        if fault:
            raise fault
        return RefitReport(version=self.version, interrupted=Interrupted(held=2, anew=1))


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

    async def ask(self):
        """A request of a session of its own; gives the name of the engine that answered."""
        self._num_requests += 1
        name = f"s{self._num_requests}"
        request = EngineRequest(
            request_id=name, prompt_token_ids=[1], sampling=EngineSampling(max_tokens=1), affinity=(name,)
        )
        async with asyncio.timeout(LIMIT_S):
            return (await self.router.generate(request)).versions[0]

    async def answering(self):
        """The names of all engines that answer."""
        answers = await asyncio.gather(*(self.ask() for _ in range(4)), return_exceptions=True)
        return {answer for answer in answers if not isinstance(answer, EngineDeadError)}

    async def update(self, version):
        """The actor makes an update, and the engines are to serve it."""
        self.actor.version = version
        await self.serving.refit(version)

    async def reach_held_refit(self):
        await settle()
        assert self.actor.is_held.is_set(), f"refit {self.actor.held} is not under way: {self.log}"

    @contextlib.asynccontextmanager
    async def supervised(self):
        task = asyncio.create_task(self.serving.supervise())
        try:
            await settle()
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def take_log(self):
        taken, self.log[:] = list(self.log), []
        return taken


@pytest.fixture
async def bench():
    bench = Bench()
    await bench.serving.open(0, send=False)
    assert bench.take_log() == [("connect", 0, 1)]
    return bench


@pytest.fixture(autouse=True)
def eager_supervision(monkeypatch):
    monkeypatch.setattr(serving_module, "HEALTH_INTERVAL_S", 0.0)


async def settle():
    """Let every other task run as far as it can."""
    for _ in range(40):
        await asyncio.sleep(0)


async def test_a_fresh_run_serves_what_the_engines_have_loaded(bench):
    assert (bench.serving.version, await bench.answering()) == (0, {0, 1})


async def test_a_resumed_run_sends_the_weights_before_the_first_request_is_served():
    bench = Bench()
    bench.actor.version, bench.actor.held = 7, 1
    opening = asyncio.create_task(bench.serving.open(7, send=True))
    await bench.reach_held_refit()
    assert await bench.answering() == set()
    bench.actor.go_on.set()
    await opening
    assert await bench.answering() == {0, 1}
    assert (bench.take_log(), bench.serving.version) == ([("connect", 0, 1), ("refit", 7)], 7)


async def test_a_refit_leaves_the_engines_in_service_and_counts_what_it_interrupted(bench):
    await bench.update(1)
    assert (bench.take_log(), bench.serving.version, bench.events) == ([("refit", 1)], 1, [])
    assert await bench.answering() == {0, 1}
    await bench.update(2)
    assert bench.serving.take_interrupted() == Interrupted(held=4, anew=2)
    assert bench.serving.take_interrupted() == Interrupted()


async def test_weights_of_another_version_than_was_to_be_sent_are_an_error(bench):
    with pytest.raises(ActorError, match="holds version 0, and was to send version 1"):
        await bench.serving.refit(1)
    assert (bench.serving.version, await bench.answering()) == (0, {0, 1})


# A refit that fails.


@pytest.mark.parametrize("fault", [ActorError("broadcast broke"), StallError("no answer")])
async def test_after_a_failed_refit_no_engine_serves_again_that_was_there(bench, fault):
    bench.actor.faults = [fault]
    await bench.update(1)
    assert bench.take_log() == [("refit", 1), ("restart", 0), ("restart", 1), ("connect", 10, 11), ("refit", 1)]
    assert bench.events == [("refit_failed", {"at_least": 1, "engines": [0, 1], "error": str(fault)})]
    assert bench.fleet.stopped == [(0, "a refit failed"), (1, "a refit failed")]
    assert (bench.serving.version, await bench.answering()) == (1, {10, 11})


async def test_the_version_is_not_advanced_and_none_serves_until_new_engines_hold_it(bench):
    bench.actor.faults = [ActorError("broke")]
    bench.actor.held = 2  # that of the new engines
    refit = asyncio.create_task(bench.update(1))
    await bench.reach_held_refit()
    assert (bench.serving.version, await bench.answering()) == (0, set())
    bench.actor.go_on.set()
    await refit
    assert (bench.serving.version, await bench.answering()) == (1, {10, 11})


async def test_refits_that_fail_again_and_again_end_with_the_restarts():
    bench = Bench(restarts=4)
    await bench.serving.open(0, send=False)
    bench.actor.faults = [ActorError("broke")] * 9
    with pytest.raises(RunError, match="max_restarts is spent"):
        await bench.update(1)
    assert len(bench.events) == 3


async def test_an_actor_that_dies_in_a_refit_is_its_callers_affair_and_the_engines_are_ended(bench):
    bench.actor.faults = [ActorDeadError("rank 0 died")]
    with pytest.raises(ActorDeadError):
        await bench.update(1)
    assert (bench.serving.version, bench.serving.offered, await bench.answering()) == (0, 1, set())
    assert [name for name, _ in bench.fleet.stopped] == [0, 1]
    async with bench.supervised():
        await settle()
        assert bench.take_log()[1:3] == [("restart", 0), ("restart", 1)]
        async with bench.serving.detached():
            bench.actor.version = 1
        await bench.serving.reconnect()
        await bench.serving.refit(1)
        assert (bench.serving.version, await bench.answering()) == (1, {10, 11})


async def test_an_actor_that_cannot_even_connect_leaves_the_engines_as_they_are(bench):
    async with bench.serving.detached():
        assert await bench.answering() == {0, 1}
    bench.actor.connect_faults = [ActorDeadError("gone")]
    with pytest.raises(ActorDeadError):
        await bench.serving.reconnect()
    assert (await bench.answering(), bench.fleet.stopped) == ({0, 1}, [])


# An actor that was started anew.


async def test_engines_serve_on_while_the_actor_is_away_and_are_sent_nothing_when_it_is_back(bench):
    await bench.update(3)
    bench.take_log()
    async with bench.serving.detached():
        assert await bench.answering() == {0, 1}
    await bench.serving.reconnect()
    assert (bench.take_log(), await bench.answering()) == ([("connect", 0, 1)], {0, 1})
    await bench.serving.refit(3)
    assert bench.take_log() == [("refit", 3)], "they hold what the former actor called version 3"


async def test_no_weights_cross_while_the_actor_is_away(bench):
    bench.actor.version = 1
    async with bench.serving.detached():
        refit = asyncio.create_task(bench.serving.refit(1))
        await settle()
        assert bench.take_log() == []
    await refit
    assert bench.take_log() == [("connect", 0, 1), ("refit", 1)]


async def test_an_engine_that_died_meanwhile_gets_no_older_version_than_the_others_serve(bench):
    await bench.update(3)
    async with bench.serving.detached():
        bench.actor.version = 1  # what its checkpoint had
    await bench.serving.reconnect()
    bench.take_log()
    async with bench.supervised():
        bench.fleet.faults[1] = "gone"
        await settle()
        assert bench.take_log() == [("restart", 1), ("connect", 0, 11)]
        assert (bench.serving.version, await bench.answering()) == (3, {0})
        await bench.update(4)
        assert await bench.answering() == {0, 11}


# Engines that die.


async def test_a_dead_engine_is_replaced_and_refitted_before_it_is_admitted(bench):
    await bench.update(3)
    bench.take_log()
    async with bench.supervised():
        bench.fleet.faults[1] = "the engine's process is gone"
        bench.actor.held = 2
        await bench.reach_held_refit()
        assert bench.take_log() == [("restart", 1), ("connect", 0, 11), ("refit", 3)]
        assert bench.fleet.stopped == [(1, "the engine's process is gone")]
        assert await bench.answering() == {0}, "the other goes on alone meanwhile"
        bench.actor.go_on.set()
        await settle()
        assert await bench.answering() == {0, 11}


async def test_a_refit_goes_to_the_others_while_a_new_engine_starts(bench):
    async with bench.supervised():
        bench.fleet.slow = {1}
        bench.fleet.faults[1] = "gone"
        await settle()
        async with asyncio.timeout(LIMIT_S):
            await bench.update(1)
        assert bench.take_log() == [("restart", 1), ("connect", 0), ("refit", 1)]
        assert (bench.serving.version, await bench.answering()) == (1, {0})
        bench.fleet.go_on.set()
        await settle()
        assert bench.take_log() == [("connect", 0, 11), ("refit", 1)]
        assert await bench.answering() == {0, 11}


async def test_weights_that_the_actor_has_made_meanwhile_are_served_as_what_they_are(bench):
    """A new engine is sent what the actor holds by then: an update may have ended since the engine died."""
    async with bench.supervised():
        bench.fleet.slow = {1}
        bench.fleet.faults[1] = "gone"
        await settle()
        bench.actor.version = 1
        bench.fleet.go_on.set()
        await settle()
        assert (bench.serving.version, await bench.answering()) == (1, {0, 11})
        bench.take_log()
        await bench.serving.refit(1)
        assert bench.take_log() == [], "all have it already"


async def test_an_engine_that_dies_in_a_refit_is_ended_so_that_the_refit_fails(bench):
    bench.actor.held = 1
    async with bench.supervised():
        refit = asyncio.create_task(bench.update(1))
        await bench.reach_held_refit()
        bench.fleet.faults[0] = "it hangs"
        await settle()
        assert bench.fleet.stopped == [(0, "it hangs")]
        bench.actor.faults = [ActorError("connection reset")]
        bench.actor.go_on.set()
        await refit
        assert (bench.serving.version, await bench.answering()) == (1, {10, 11})


async def test_an_engine_that_was_replaced_during_a_refit_is_not_taken_for_the_one_that_took_part(bench):
    bench.actor.held = 1
    async with bench.supervised():
        refit = asyncio.create_task(bench.update(1))
        await bench.reach_held_refit()
        bench.fleet.faults[0] = "gone"
        await settle()
        assert bench.fleet.engines[0].name == 10
        bench.actor.held = 2
        bench.actor.is_held.clear()
        bench.actor.go_on.set()  # the refit succeeds, as far as the actor can tell
        bench.actor.go_on = asyncio.Event()
        await refit
        await bench.reach_held_refit()
        assert await bench.answering() == {1}
        bench.actor.go_on.set()
        await settle()
        assert await bench.answering() == {10, 1}


async def test_a_late_finding_about_an_engine_does_not_end_the_one_in_its_place(bench):
    silence = bench.fleet.faults[1] = asyncio.Event()
    async with bench.supervised():
        bench.actor.faults = [ActorError("broke")]
        await bench.update(1)
        silence.set()
        await settle()
        assert (bench.fleet.stopped[2:], await bench.answering()) == ([], {10, 11})


async def test_one_that_is_gone_when_the_group_forms_is_left_out_of_it(bench):
    async with bench.serving.detached():
        pass
    bench.actor.connect_faults = [ActorError("rendezvous failed")]
    bench.fleet.faults[1] = "gone"
    await bench.update(1)
    assert bench.take_log() == [("connect", 0, 1), ("connect", 0), ("refit", 1)]
    assert await bench.answering() == {0}


async def test_when_all_are_gone_a_refit_waits_for_new_ones(bench):
    async with bench.supervised():
        bench.fleet.slow = {0, 1}
        bench.fleet.faults |= {0: "gone", 1: "gone"}
        await settle()
        refit = asyncio.create_task(bench.update(1))
        await settle()
        assert not refit.done()
        bench.fleet.go_on.set()
        await refit
        assert (bench.serving.version, await bench.answering()) == (1, {10, 11})


async def test_a_second_death_does_not_wait_for_the_first_engine_to_be_back(bench):
    async with bench.supervised():
        bench.fleet.slow = {0}
        bench.fleet.faults[0] = "gone"
        await settle()
        bench.fleet.faults[1] = "gone"
        await settle()
        assert bench.take_log() == [("restart", 0), ("restart", 1), ("connect", 11), ("refit", 0)]
        assert await bench.answering() == {11}
        bench.fleet.go_on.set()
        await settle()
        assert (bench.take_log(), await bench.answering()) == ([("connect", 10, 11), ("refit", 0)], {10, 11})


async def test_a_death_without_a_restart_left_ends_the_run():
    bench = Bench(restarts=0)
    await bench.serving.open(0, send=False)
    bench.fleet.faults[0] = "gone"
    with pytest.raises(RunError, match=r"engine.max_restarts is spent"):
        async with asyncio.timeout(LIMIT_S):
            await bench.serving.supervise()
