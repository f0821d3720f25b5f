"""Refits with generations in flight, on vLLM and the real sender: no token is ever sampled from mixed weights.

Every sampled token's log-prob is recomputed by transformers, from the weights of the version that it is recorded with.
"""

import asyncio
import itertools
import random

import pytest
import pytest_asyncio
import torch

from integration_tests.faulty_refit import Actor, FaultyRayEngine, killing, raising
from integration_tests.test_crashes import engine_core
from molt.train.cluster.engines import EngineFleet
from molt.train.cluster.runtime import ray_runtime
from molt.train.config import EngineConfig
from molt.train.controller.serving import Serving
from molt.train.engine.protocol import EngineRequest, EngineSampling
from molt.train.engine.router import Router
from molt.train.engine.vllm import VllmSetup
from molt.train.errors import EngineDeadError

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-4
NUM_CALLERS = 8
MAX_TOKENS = 250
LIMIT_S = 240.0


class Sample:
    """What one call gave: `versions` is None where it failed after some tokens, whose versions nobody told."""

    def __init__(self, prompt, *, is_streamed=False):
        self.prompt, self.tokens, self.logprobs, self.versions = prompt, [], [], []
        self.is_streamed = is_streamed
        self.num_restarts = 0
        """How often it was asked again, since its engine was gone."""


class Traffic:
    """Callers that ask all the time, one in two as a stream, and ask again where nothing was delivered."""

    def __init__(self, router, vocabulary):
        self._router, self._vocabulary = router, vocabulary
        self._rng = random.Random(0)
        self._numbers = itertools.count()
        self._news = asyncio.Event()
        self.samples = []
        self.running = {}

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(self._call(streamed=i % 2 == 0)) for i in range(NUM_CALLERS)]
        return self

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise result

    async def progress(self, number):
        """Until as many more calls have ended."""
        wanted = len(self.samples) + number
        await self._until(lambda: len(self.samples) >= wanted)

    async def in_flight(self):
        """Until every stream has delivered something; the other calls have had as much time to sample."""
        await self._until(lambda: sum(bool(sample.tokens) for sample in self.running.values()) >= NUM_CALLERS // 2)

    async def _until(self, is_so):
        async with asyncio.timeout(LIMIT_S):
            while not is_so():
                self._news.clear()
                await self._news.wait()

    async def _call(self, *, streamed):
        shared = [self._rng.choice(self._vocabulary) for _ in range(130)]  # more than a block of the prefix cache
        while True:
            prompt = shared + [self._rng.choice(self._vocabulary) for _ in range(self._rng.randint(1, 20))]
            sample = Sample(prompt, is_streamed=streamed)
            name = f"r{next(self._numbers)}"
            self.running[name] = sample
            try:
                await self._ask(name, sample)
            finally:
                del self.running[name]
            self.samples.append(sample)
            self._news.set()

    async def _ask(self, name, sample):
        while True:
            request = engine_request(f"{name}-{sample.num_restarts}", sample.prompt)
            try:
                if sample.is_streamed:
                    async for chunk in self._router.stream(request):
                        take(sample, chunk)
                        self._news.set()
                else:
                    take(sample, await self._router.generate(request))
            except EngineDeadError:
                if sample.tokens:
                    sample.versions = None
                    return
                sample.num_restarts += 1
                await asyncio.sleep(0.05)
            else:
                return


def engine_request(name, prompt, *, max_tokens=MAX_TOKENS):
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=EngineSampling(max_tokens=max_tokens))


def take(sample, chunk):
    sample.tokens += chunk.token_ids
    sample.logprobs += chunk.logprobs
    sample.versions += chunk.versions


class Bench:
    def __init__(self, folder):
        self.events, self.failures = [], []
        setup = VllmSetup(
            model_path=str(folder),
            engine=EngineConfig(max_model_len=512, kv_cache_mb=64, max_restarts=100),
            seed=0,
            gpus=0,
            transfer="gloo",
            version=0,
        )
        self.router = Router()
        self.actor = Actor(folder)
        self.fleet = EngineFleet(setup, on_change=self.on_event, make=FaultyRayEngine)
        self.serving = Serving(self.fleet, self.router, self.actor, workers_per_engine=1, on_event=self.on_event)
        self._models = {}
        self.vocabulary = list(range(20, self.actor.model.config.vocab_size))

    def on_event(self, kind, detail):
        self.events.append((kind, detail))
        if kind == "refit_failed":
            self.failures.append((detail["error"], self.serving.version))

    @property
    def engine(self):
        return self.fleet.engines[0].actor

    async def configure(self, **settings):
        await self.engine.configure.remote(settings)

    def model(self, version):
        """The model of a version; the last two are kept."""
        if version not in self._models:
            self._models = dict([*self._models.items()][-1:]) | {version: self.actor.at(version)}
        return self._models[version]

    def gap(self, sample, versions=None):
        """The largest difference of recorded and recomputed log-probs, over a sample of one version or of two."""
        versions = versions or sample.versions
        first, last = versions[0], versions[-1]
        cut = versions.count(first)
        assert versions == [first] * cut + [last] * (len(versions) - cut)
        ids = torch.tensor([sample.prompt + sample.tokens])
        # The keys and values of a held generation are those of the weights that computed them.
        end = len(sample.prompt) + cut - 1
        with torch.no_grad():
            old = self.model(first)(ids[:, :end], use_cache=True)
            logits = [old.logits]
            if end < ids.shape[1] - 1:
                logits.append(
                    self.model(sample.versions[-1])(ids[:, end:-1], past_key_values=old.past_key_values).logits
                )
        logprobs = torch.cat(logits, 1).log_softmax(-1)[0, len(sample.prompt) - 1 :]
        found = logprobs.gather(1, ids[0, len(sample.prompt) :, None])[:, 0]
        return (found - torch.tensor(sample.logprobs)).abs().max().item()

    def check(self, samples):
        """Every token is of the version that it is recorded with. Returns the versions of each sample."""
        for sample in samples:
            # One without versions was cut off with its engine, before the new version was served.
            versions = sample.versions or [self.serving.version - 1] * len(sample.tokens)
            assert len(sample.tokens) == len(sample.logprobs) == len(versions) > 0
            assert self.gap(sample, versions) <= TOLERANCE, (versions, sample.tokens)
        return [list(dict.fromkeys(sample.versions or ())) for sample in samples]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(calculator_policy, tmp_path_factory):
    torch.set_num_threads(1)
    with ray_runtime(address="", logs=tmp_path_factory.mktemp("logs")):
        bench = Bench(calculator_policy)
        await bench.fleet.start()
        await bench.serving.open(0, send=False)
        yield bench
        bench.fleet.kill()


async def refit_under_way(bench, *, calls=12):
    """A refit with generations in flight; what ended before, during and after it."""
    async with Traffic(bench.router, bench.vocabulary) as traffic:
        await traffic.in_flight()
        await bench.serving.refit(bench.actor.learn())
        await traffic.progress(calls)
    return traffic.samples


async def test_keep_goes_on_with_what_was_sampled(bench):
    await bench.configure(on_refit="keep")
    versions = bench.check(await refit_under_way(bench))
    new = bench.serving.version
    assert [new - 1, new] in versions, "no generation lived through the refit"
    assert [new] in versions
    assert bench.serving.take_interrupted().held >= NUM_CALLERS // 2
    assert bench.failures == []


async def test_wait_lets_generations_finish_first(bench):
    await bench.configure(on_refit="wait")
    versions = bench.check(await refit_under_way(bench))
    new = bench.serving.version
    assert {tuple(found) for found in versions} == {(new - 1,), (new,)}, "no generation has tokens of two versions"
    interrupted = bench.serving.take_interrupted()
    assert interrupted.held == 0
    assert interrupted.awaited >= NUM_CALLERS // 2


async def test_abort_samples_anew_what_nobody_has_seen_and_keeps_begun_streams(bench):
    await bench.configure(on_refit="abort")
    samples = await refit_under_way(bench)
    bench.check(samples)
    new = bench.serving.version
    spanning = [sample for sample in samples if len(set(sample.versions)) > 1]
    assert all(sample.is_streamed for sample in spanning), "a whole reply has tokens of two versions"
    assert {new} in [set(sample.versions) for sample in samples if not sample.is_streamed]
    assert all(sample.num_restarts == 0 for sample in samples), "its client saw that a generation began anew"
    interrupted = bench.serving.take_interrupted()
    assert interrupted.anew >= NUM_CALLERS // 2 - 1
    assert interrupted.held >= 1


async def test_new_prompts_find_no_keys_and_values_of_older_weights_unless_that_is_wanted(bench):
    prompt = [bench.vocabulary[i % len(bench.vocabulary)] for i in range(200)]

    async def ask(name):
        sample = Sample(prompt)
        chunk = await bench.router.generate(engine_request(name, prompt, max_tokens=2))
        take(sample, chunk)
        return sample, chunk.num_cached_tokens

    for keeps in (False, True):
        await bench.configure(on_refit="keep", keep_stale_cache=keeps)
        await ask(f"first-{keeps}")
        sample, cached = await ask(f"warm-{keeps}")
        assert cached == 128
        if not keeps:
            assert bench.gap(sample) <= TOLERANCE
        await bench.serving.refit(bench.actor.learn())
        sample, cached = await ask(f"after-{keeps}")
        assert sample.versions == [bench.serving.version] * 2
        assert cached == (128 if keeps else 0)
        assert (bench.gap(sample) > TOLERANCE) == keeps, "what is kept is stale"


async def test_a_group_that_is_being_formed_does_not_hold_up_generations(bench):
    """The engine joins while its other members, here nobody, are awaited."""
    await bench.configure(on_refit="keep", keep_stale_cache=False)
    async with Traffic(bench.router, bench.vocabulary) as traffic:
        await traffic.in_flight()
        info = {"host": "127.0.0.1", "port": 9, "world_size": 3, "timeout_s": 8.0, "rank_offset": 1}
        joining = asyncio.ensure_future(bench.engine.init_weight_transfer_engine.remote(info))
        await traffic.progress(2 * NUM_CALLERS)
        assert not joining.done(), "the engine had no chance to be held up"
        with pytest.raises(Exception, match=r"(?i)connect|timed out|timeout"):
            await joining
    bench.check(traffic.samples)
    async with bench.serving.detached():  # the engine is in no group now
        pass
    await bench.serving.refit(bench.actor.learn())
    assert bench.failures == []


def in_worker(fault):
    async def inject(bench):
        await bench.engine.arm.remote(fault)

    return inject


def in_control_plane(fault):
    async def inject(bench):
        bench.actor.fault = fault

    return inject


async def sender_fails(bench):
    bench.actor.on_weight[7] = raising("injected: sender")


async def core_is_killed(bench):
    (pid,) = [detail["pid"] for kind, detail in bench.events if kind in ("engine_started", "engine_restarted")][-1:]
    bench.actor.on_weight[7] = killing(engine_core(pid))


async def actor_is_killed(bench):
    (pid,) = [detail["pid"] for kind, detail in bench.events if kind in ("engine_started", "engine_restarted")][-1:]
    bench.actor.on_weight[7] = killing(pid)


FAULTS = {
    "before the start": (in_control_plane("before start_weight_update"), "injected: before start"),
    "after the start": (in_control_plane("after start_weight_update"), "injected: after start"),
    "the sender, half way": (sender_fails, "injected: sender"),
    "the engine's core dies, half way": (core_is_killed, ""),
    "the engine's actor dies, half way": (actor_is_killed, ""),
    "the engine cannot load a weight": (in_worker("load"), "injected: load"),
    "a layer gets no weight": (
        in_worker("skip"),
        "all of their weights (1): model.layers.1.self_attn.qkv_proj",
    ),
    "after the last weight": (in_control_plane("before finish_weight_update"), "injected: before finish"),
    "while the model is put together": (in_worker("finish"), "injected: finish"),
    "a weight arrives damaged": (in_control_plane("corrupt"), "does not hold the weights that were sent: model.layers"),
    "before the version is served": (in_control_plane("before serve"), "injected: before serve"),
    "generation cannot be resumed": (in_worker("resume"), "injected: resume"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_token_is_sampled_from_mixed_weights(bench, fault):
    inject, told = FAULTS[fault]
    await bench.configure(on_refit="keep", keep_stale_cache=False)
    before = bench.serving.version
    bench.failures.clear()
    async with Traffic(bench.router, bench.vocabulary) as traffic:
        await traffic.in_flight()
        await inject(bench)
        await bench.serving.refit(bench.actor.learn())
        await traffic.progress(NUM_CALLERS)
    ((error, version),) = bench.failures
    assert told in error
    assert version == before, "advanced by a refit that failed"
    assert bench.serving.version == before + 1, "a new engine serves the new version"
    versions = {tuple(found) for found in bench.check(traffic.samples)}
    assert versions <= {(), (before,), (before + 1,)}, "a generation was held through a refit that failed"
    assert (before + 1,) in versions
    assert any(sample.num_restarts or sample.versions is None for sample in traffic.samples), "nothing was in flight"
