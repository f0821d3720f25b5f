"""Engines as Ray actors, with a stand-in for Ray: faults in the engine's own terms, deaths, and how many of them."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from molt.train.cluster import engines as module
from molt.train.cluster.engines import EngineFleet, RayEngine
from molt.train.config import EngineConfig
from molt.train.engine.protocol import EngineChunk, EngineRequest, EngineSampling
from molt.train.engine.vllm import VllmSetup
from molt.train.errors import EngineDeadError, EngineError, EngineOverloadedError, RunError, StallError

SETUP = VllmSetup(
    model_path="m", engine=EngineConfig(num_engines=2, max_restarts=2), seed=40, gpus=0, transfer="gloo", version=0
)
REQUEST = EngineRequest(request_id="r", prompt_token_ids=[1], sampling=EngineSampling(max_tokens=1))
CHUNK = EngineChunk(token_ids=[1], logprobs=[-0.5], versions=[0], finish_reason="stop")


def of_ray(cause):
    """The fault of a method, as the caller of a Ray actor gets it."""
    return RayTaskError("method", "traceback", cause).as_instanceof_cause()


class Handle:
    """A Ray actor: each method answers with what it is set to, raises it, or never answers."""

    def __init__(self, setup, options, pid):
        self.setup, self.options, self.is_killed = setup, options, False
        self.asked = []
        self.answers = {"start": pid, "generate": CHUNK, "stream": [CHUNK, CHUNK], "check_health": 0, "abort": None}

    def __getattr__(self, name):
        return SimpleNamespace(
            remote=lambda *args: self._call(name, *args),
            options=lambda **_: SimpleNamespace(remote=lambda *a: self._stream()),
        )

    async def _call(self, name, *args):
        self.asked.append((name, *args))
        answer = self.answers[name]
        if isinstance(answer, BaseException):
            raise answer
        if answer is NEVER:
            await asyncio.Event().wait()
        return answer

    async def _stream(self):
        for answer in self.answers["stream"]:
            if isinstance(answer, BaseException):
                raise answer
            reference = asyncio.get_running_loop().create_future()
            reference.set_result(answer)
            yield reference


NEVER = object()


@pytest.fixture(autouse=True)
def handles(monkeypatch):
    """Every actor that was made, in order."""
    made = []

    def remote(cls):
        def make(options):
            return SimpleNamespace(remote=lambda setup: made.append(Handle(setup, options, len(made))) or made[-1])

        return SimpleNamespace(options=lambda **options: make(options))

    monkeypatch.setattr(module.ray, "remote", remote)
    monkeypatch.setattr(module.ray, "kill", lambda handle: setattr(handle, "is_killed", True))
    return made


@pytest.fixture
def engine():
    return RayEngine(SETUP)


@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        (RayActorError(), EngineDeadError, "request r: the engine's process is gone"),
        (of_ray(EngineDeadError("core gone")), EngineDeadError, "core gone"),
        (of_ray(EngineOverloadedError("full")), EngineOverloadedError, "full"),
        (of_ray(KeyError("x")), EngineError, "request r: KeyError"),
    ],
)
async def test_faults_of_an_actor_are_told_in_the_engines_own_terms(engine, fault, expected, message):
    engine.actor.answers |= {"generate": fault, "stream": [CHUNK, fault]}
    with pytest.raises(expected, match=message) as caught:
        await engine.generate(REQUEST)
    assert type(caught.value) is expected

    async def read():
        return [chunk async for chunk in engine.stream(REQUEST)]

    with pytest.raises(expected, match=message):
        await read()


async def test_answers_are_passed_on(engine):
    assert await engine.generate(REQUEST) == CHUNK
    assert [chunk async for chunk in engine.stream(REQUEST)] == [CHUNK, CHUNK]


async def test_a_generation_of_a_dead_engine_needs_no_abort(engine):
    engine.actor.answers["abort"] = RayActorError()
    (fault,) = await asyncio.gather(engine.abort("r"), return_exceptions=True)
    assert (fault, engine.actor.asked) == (None, [("abort", "r")])


@pytest.mark.parametrize("answer", [RayActorError(), of_ray(EngineDeadError("core gone")), NEVER])
async def test_an_engine_that_is_gone_or_silent_is_not_healthy(engine, monkeypatch, answer):
    monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 0.01)
    await engine.check_health()
    engine.actor.answers["check_health"] = answer
    with pytest.raises(EngineDeadError):
        await engine.check_health()


@pytest.mark.parametrize(("answer", "expected"), [(of_ray(OSError("no such model")), RunError), (NEVER, StallError)])
async def test_an_engine_that_does_not_start_ends_the_run(engine, monkeypatch, answer, expected):
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.01)
    engine.actor.answers["start"] = answer
    with pytest.raises(expected, match="did not start"):
        await engine.start()


def test_engines_on_a_cpu_share_its_cores(handles):
    RayEngine(SETUP)
    assert handles[0].options["num_gpus"] == 0
    assert handles[0].options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"


def test_an_engine_on_cuda_has_a_gpu_a_worker():
    setup = VllmSetup(
        model_path="m", engine=EngineConfig(tensor_parallel_size=2), seed=0, gpus=2, transfer="nccl", version=0
    )
    assert RayEngine(setup).actor.options["num_gpus"] == 2


@pytest.fixture
def events():
    return []


@pytest.fixture
def fleet(events):
    return EngineFleet(SETUP, on_change=lambda kind, detail: events.append((kind, detail)))


async def test_engines_sample_by_seeds_of_their_own(fleet, handles, events):
    await fleet.start()
    assert [handle.setup.seed for handle in handles] == [40, 41]
    assert events == [("engine_started", {"engine": 0, "pid": 0}), ("engine_started", {"engine": 1, "pid": 1})]
    assert fleet.actors == handles


async def test_an_engine_at_fault_says_why(fleet, handles):
    assert await fleet.fault(1) is None
    handles[1].answers["check_health"] = of_ray(EngineDeadError("a refit failed at its start"))
    assert "a refit failed at its start" in await fleet.fault(1)
    assert await fleet.fault(0) is None


async def test_a_dead_engine_is_replaced_under_its_number(fleet, handles, events):
    fleet.stop(1, "gone")
    await fleet.restart(1)
    assert events == [
        ("engine_died", {"engine": 1, "reason": "gone", "restarts_left": 2}),
        ("engine_restarted", {"engine": 1, "pid": 2}),
    ]
    assert [handle.is_killed for handle in handles] == [False, True, False]
    assert fleet.actors == [handles[0], handles[2]]
    assert handles[2].setup == handles[1].setup


async def test_one_that_does_not_start_costs_a_restart_too(events):
    made = []

    def make(setup):
        engine = RayEngine(setup)
        if len(made) == 2:
            engine.actor.answers["start"] = RayActorError()
        made.append(engine)
        return engine

    fleet = EngineFleet(SETUP, on_change=lambda kind, detail: events.append((kind, detail)), make=make)
    fleet.stop(0, "gone")
    await fleet.restart(0)
    assert [(kind, detail.get("restarts_left")) for kind, detail in events] == [
        ("engine_died", 2),
        ("engine_died", 1),
        ("engine_restarted", None),
    ]
    assert made[2].actor.is_killed
    assert fleet.engines[0] is made[3]


async def test_more_deaths_than_restarts_end_the_run(fleet, events):
    await fleet.restart(0)
    await fleet.restart(1)
    with pytest.raises(RunError, match=r"engine 0 died and engine\.max_restarts = 2 is spent"):
        await fleet.restart(0)
    fleet.stop(0, "gone")
    assert events[-1] == ("engine_died", {"engine": 0, "reason": "gone", "restarts_left": 0})


def test_all_engines_end_with_the_run(fleet, handles):
    fleet.kill()
    assert all(handle.is_killed for handle in handles)
