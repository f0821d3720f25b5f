"""The router: conversations stay with an engine, others go where least is running; the dead and the full are left."""

import asyncio

import msgspec
import pytest

from molt.train.engine import router as router_module
from molt.train.engine.protocol import EngineChunk, EngineRequest, EngineSampling
from molt.train.engine.router import MAX_LEAD, Router
from molt.train.errors import EngineDeadError, EngineError, EngineOverloadedError


def ask(name, affinity=()):
    return EngineRequest(
        request_id=name, prompt_token_ids=[1], sampling=EngineSampling(max_tokens=1), affinity=affinity
    )


CHUNK = EngineChunk(token_ids=[1], logprobs=[-0.5], versions=[0], finish_reason="stop")


class Engine:
    """Answers at once, or when it is told to; fails as its fault says."""

    def __init__(self, *, fault=None, holds=False):
        self.fault = fault
        self.seen, self.aborted = [], []
        self.go_on = asyncio.Event()
        if not holds:
            self.go_on.set()

    async def generate(self, request):
        self.seen.append(request.request_id)
        await self.go_on.wait()
        if self.fault:
            raise self.fault
        return CHUNK

    async def stream(self, request):
        yield await self.generate(request)
        yield CHUNK

    async def abort(self, request_id):
        self.aborted.append(request_id)


def router_over(*engines):
    router = Router()
    for index, engine in enumerate(engines):
        router.admit(index, engine)
    return router


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_session_sticks_to_its_engine_though_another_is_idle():
    busy, idle = Engine(holds=True), Engine(holds=True)
    router = router_over(busy, idle)
    tasks = [asyncio.create_task(router.generate(ask(f"r{i}", affinity=("s",)))) for i in range(5)]
    await settle()
    assert (len(busy.seen), len(idle.seen)) == (5, 0)
    busy.go_on.set()
    await asyncio.gather(*tasks)


async def test_a_new_session_goes_where_least_is_running():
    engines = [Engine(holds=True) for _ in range(3)]
    router = router_over(*engines)
    tasks = [asyncio.create_task(router.generate(ask(f"r{i}", affinity=(f"s{i}",)))) for i in range(7)]
    await settle()
    assert sorted(len(engine.seen) for engine in engines) == [2, 2, 3]
    for engine in engines:
        engine.go_on.set()
    await asyncio.gather(*tasks)
    assert (router.num_running, router.num_finished) == (0, 7)


async def test_finished_requests_no_longer_count_as_load():
    first, second = Engine(), Engine(holds=True)
    router = router_over(first, second)
    tasks = []
    for i in range(3):
        tasks.append(asyncio.create_task(router.generate(ask(f"r{i}", affinity=(f"s{i}",)))))
        await settle()
    assert (len(first.seen), len(second.seen)) == (3, 0)
    await asyncio.gather(*tasks)


async def test_requests_without_a_session_are_spread():
    engines = [Engine(holds=True), Engine(holds=True)]
    router = router_over(*engines)
    tasks = [asyncio.create_task(router.generate(ask(f"r{i}"))) for i in range(4)]
    await settle()
    assert [len(engine.seen) for engine in engines] == [2, 2]
    for engine in engines:
        engine.go_on.set()
    await asyncio.gather(*tasks)


async def test_a_dead_engine_leaves_and_its_sessions_move():
    dead, other = Engine(fault=EngineDeadError("gone")), Engine()
    router = router_over(dead, other)
    with pytest.raises(EngineDeadError):
        await router.generate(ask("r1", affinity=("s",)))
    assert await router.generate(ask("r2", affinity=("s",))) == CHUNK
    assert (dead.seen, other.seen) == (["r1"], ["r2"])
    assert router.num_running == 0


async def test_a_dead_engine_leaves_after_a_stream_too():
    dead, other = Engine(fault=EngineDeadError("gone")), Engine()
    router = router_over(dead, other)
    with pytest.raises(EngineDeadError):
        async for _ in router.stream(ask("r1", affinity=("s",))):
            pass
    assert [chunk async for chunk in router.stream(ask("r2", affinity=("s",)))] == [CHUNK, CHUNK]


async def test_an_engine_that_failed_one_request_stays():
    engine = Engine(fault=EngineError("no room to sample"))
    router = router_over(engine)
    with pytest.raises(EngineError, match="no room"):
        await router.generate(ask("r1"))
    engine.fault = None
    assert await router.generate(ask("r2")) == CHUNK


async def test_while_no_engine_is_up_requests_fail_at_once_and_are_no_progress():
    router = router_over(Engine())
    router.remove(0)
    router.remove(5)  # unknown numbers are ignored
    async with asyncio.timeout(5):
        with pytest.raises(EngineDeadError, match="r1: no engine is up"):
            await router.generate(ask("r1"))
        with pytest.raises(EngineDeadError, match="r2: no engine is up"):
            await anext(router.stream(ask("r2")))
    assert (router.num_running, router.num_finished) == (0, 0)
    router.admit(0, Engine())
    assert await router.generate(ask("r3")) == CHUNK


async def test_a_request_of_an_old_engine_does_not_take_out_the_one_restarted_under_its_number():
    old, new = Engine(fault=EngineDeadError("gone"), holds=True), Engine()
    router = router_over(old)
    late = asyncio.create_task(router.generate(ask("r1", affinity=("s",))))
    await settle()
    router.remove(0)
    router.admit(0, new)
    old.go_on.set()
    with pytest.raises(EngineDeadError):
        await late
    assert await router.generate(ask("r2", affinity=("s",))) == CHUNK
    assert new.seen == ["r2"]


async def test_an_abort_reaches_the_engine_that_runs_the_request():
    engines = [Engine(holds=True), Engine(holds=True)]
    router = router_over(*engines)
    tasks = [asyncio.create_task(router.generate(ask(name))) for name in ("a", "b")]
    await settle()
    await router.abort("b")
    await router.abort("never heard of")
    (runs_b,) = [engine for engine in engines if "b" in engine.seen]
    assert [engine.aborted for engine in engines] == [["b"] if engine is runs_b else [] for engine in engines]
    for task in tasks:
        task.cancel()


async def test_a_stream_that_its_reader_leaves_is_no_load_any_more():
    engine = Engine()
    router = router_over(engine)
    stream = router.stream(ask("r1"))
    await anext(stream)
    assert router.num_running == 1
    await stream.aclose()
    assert (router.num_running, router.num_finished) == (0, 1)


async def test_of_many_sessions_those_that_asked_last_keep_their_places(monkeypatch):
    monkeypatch.setattr(router_module, "MAX_PLACES", 2)
    first, second = Engine(), Engine()
    router = router_over(first, second)
    first.go_on.clear()
    tasks = [asyncio.create_task(router.generate(ask("r0", affinity=("busy",))))]
    await settle()
    for i in range(3):  # each goes where less is running, and "busy" asks again before it could be forgotten
        tasks.append(asyncio.create_task(router.generate(ask(f"other{i}", affinity=(f"s{i}",)))))
        await settle()
        tasks.append(asyncio.create_task(router.generate(ask(f"r{i + 1}", affinity=("busy",)))))
        await settle()
    assert first.seen == ["r0", "r1", "r2", "r3"]
    first.go_on.set()
    await asyncio.gather(*tasks)


async def test_sessions_that_have_not_asked_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr(router_module, "MAX_PLACES", 2)
    first, second = Engine(holds=True), Engine(holds=True)
    router = router_over(first, second)
    tasks = [asyncio.create_task(router.generate(ask("r0", affinity=("old",))))]
    await settle()
    tasks += [asyncio.create_task(router.generate(ask(f"r{i}", affinity=(f"new{i}",)))) for i in (1, 2, 3)]
    await settle()
    assert ("r0" in first.seen, len(first.seen), len(second.seen)) == (True, 2, 2)
    second.go_on.set()
    await settle()
    tasks.append(asyncio.create_task(router.generate(ask("r4", affinity=("old",)))))
    await settle()
    assert "r4" in second.seen, "its place is forgotten, so it goes where least is running"
    first.go_on.set()
    await asyncio.gather(*tasks)


# Without affinity every turn of a long conversation computes its whole prefix again: PrimeIntellect-ai/prime-rl#2822,
# verl-project/verl#6383, PrimeIntellect-ai/verifiers PR#1680.


class CachingEngine(Engine):
    """Says how much of a prompt the prompts before it began with, as a prefix cache would."""

    def __init__(self):
        super().__init__()
        self.prompts = []

    async def generate(self, request):
        await super().generate(request)
        prompt = request.prompt_token_ids
        cached = max((len(old) for old in self.prompts if prompt[: len(old)] == old), default=0)
        self.prompts.append(prompt)
        return msgspec.structs.replace(CHUNK, num_cached_tokens=cached)


async def converse(router, turns=5, sessions=8):
    """Sessions that grow side by side, each turn by ten tokens of its own."""
    for turn in range(1, turns + 1):
        for session in range(sessions):
            prompt = [1000 * session + i for i in range(10 * turn)]
            request = msgspec.structs.replace(ask(f"{session}.{turn}", (f"s{session}",)), prompt_token_ids=prompt)
            await router.generate(request)


async def test_turns_of_a_session_find_their_prefix_and_the_hit_rate_says_so_prime_rl_2822():
    engines = [CachingEngine() for _ in range(4)]
    router = router_over(*engines)
    assert router.prefix_hit_rate == 0.0
    await converse(router)
    # Of 10 + 20 + ... + 50 tokens of a session, all but the ten new ones of each turn were there.
    assert (router.num_prompt_tokens, router.num_cached_tokens) == (8 * 150, 8 * 100)
    assert router.prefix_hit_rate == 100 / 150
    assert router.num_moved == 0


async def test_the_prompt_of_a_stream_counts_once_by_its_last_chunk():
    class Streaming(Engine):
        async def stream(self, request):
            yield msgspec.structs.replace(CHUNK, finish_reason=None, num_cached_tokens=1)
            yield msgspec.structs.replace(CHUNK, num_cached_tokens=1)

    router = router_over(Streaming())
    assert len([chunk async for chunk in router.stream(ask("r1", ("s",)))]) == 2
    assert (router.num_prompt_tokens, router.num_cached_tokens) == (1, 1)


async def test_a_branch_stays_where_it_ran_when_its_session_is_elsewhere():
    first, second = Engine(), Engine(holds=True)
    router = router_over(first, second)
    await router.generate(ask("r1", ("main", "s")))
    router.remove(0)
    task = asyncio.create_task(router.generate(ask("r2", ("side", "s"))))
    await settle()
    router.admit(0, first)
    await router.generate(ask("r3", ("new", "t")))  # the idle one
    await router.generate(ask("r4", ("new", "s")))
    assert (first.seen, second.seen) == (["r1", "r3", "r4"], ["r2"])
    second.go_on.set()
    await task
    await router.generate(ask("r5", ("side", "s")))
    await router.generate(ask("r6", ("fresh", "s")))  # a new branch goes to its session's engine
    assert second.seen == ["r2", "r5", "r6"]


async def test_samples_of_one_prompt_go_to_one_engine():
    engines = [Engine(holds=True) for _ in range(3)]
    router = router_over(*engines)
    tasks = [asyncio.create_task(router.generate(ask(f"r{i}", (f"turn{i}", "s")))) for i in range(4)]
    await settle()
    assert sorted(len(engine.seen) for engine in engines) == [0, 0, 4]
    for engine in engines:
        engine.go_on.set()
    await asyncio.gather(*tasks)


async def test_a_session_moves_when_its_engine_is_too_far_ahead_of_the_least_loaded():
    busy, idle = Engine(holds=True), Engine()
    router = router_over(busy, idle)
    names = [("branch", "s")] + [(f"b{i}", "s") for i in range(MAX_LEAD)]
    tasks = [asyncio.create_task(router.generate(ask(f"r{i}", name))) for i, name in enumerate(names)]
    await settle()
    assert (len(busy.seen), idle.seen, router.num_moved) == (MAX_LEAD, [f"r{MAX_LEAD}"], 1)
    busy.go_on.set()
    await asyncio.gather(*tasks)
    await router.generate(ask("again", names[-1]))
    await router.generate(ask("session", ("unknown", "s")))
    assert (idle.seen[-1], busy.seen[-1]) == ("again", "session"), "the branch has moved, its session has not"


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_overloaded_engine_passes_the_request_on_once(streamed):
    full, other = Engine(fault=EngineOverloadedError("full")), Engine()
    router = router_over(full, other)

    async def send(name):
        if streamed:
            return [chunk async for chunk in router.stream(ask(name, ("b", "s")))]
        return await router.generate(ask(name, ("b", "s")))

    await send("r1")
    await send("r2")
    assert (full.seen, other.seen) == (["r1"], ["r1", "r2"])
    other.fault = full.fault
    with pytest.raises(EngineOverloadedError):
        await send("r3")
    assert (full.seen, other.seen, router.num_running) == (["r1", "r3"], ["r1", "r2", "r3"], 0)


async def test_an_engine_that_is_overloaded_in_mid_stream_is_not_asked_elsewhere():
    class Half(Engine):
        async def stream(self, request):
            yield msgspec.structs.replace(CHUNK, finish_reason=None)
            raise EngineOverloadedError("full")

    half, other = Half(), Engine()
    router = router_over(half, other)
    with pytest.raises(EngineOverloadedError):
        async for _ in router.stream(ask("r1")):
            pass
    assert other.seen == []


async def test_a_lone_overloaded_engine_says_so():
    with pytest.raises(EngineOverloadedError):
        await router_over(Engine(fault=EngineOverloadedError("full"))).generate(ask("r1"))
