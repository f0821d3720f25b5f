"""The vLLM engine with a stand-in for vLLM itself: what it asks of it, and what it makes of the answers."""

import asyncio
import enum
import pickle
import sys
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from molt.train.config import EngineConfig
from molt.train.engine.protocol import EngineChunk, EngineRequest, EngineSampling, Grammar
from molt.train.engine.vllm import VllmEngine, VllmSetup
from molt.train.errors import EngineDeadError, EngineError, EngineOverloadedError, EngineRequestError
from molt.train.records.refit import Interrupted


class Kind(enum.Enum):
    DELTA = 1
    FINAL_ONLY = 2


class DeadError(Exception):
    """vLLM's own."""


class VllmError(Exception):
    """The root of vLLM's own."""


class ClientError(VllmError):
    """vLLM's own of requests at fault."""

    def __init__(self, message, *, parameter=None):
        super().__init__(message)
        self.parameter = parameter

    def __str__(self):
        return f"{self.args[0]} (parameter={self.parameter}, value={'x' * 10000})"


def has_unsupported(schema):
    return "uniqueItems" in schema


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """Modules with the few names that the engine imports: the real ones take ten seconds."""
    contents = {
        "vllm": {"SamplingParams": SimpleNamespace, "TokensPrompt": dict},
        "vllm.exceptions": {"VLLMClientError": ClientError, "VLLMError": VllmError},
        "vllm.sampling_params": {"RequestOutputKind": Kind, "StructuredOutputsParams": dict},
        "vllm.v1.structured_output.backend_xgrammar": {"has_xgrammar_unsupported_json_features": has_unsupported},
        "vllm.v1.engine.exceptions": {"EngineDeadError": DeadError},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferInitRequest": SimpleNamespace,
            "WeightTransferUpdateRequest": SimpleNamespace,
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def output(token_ids, *, spans=(), finish=None, stop=None, logprobs=True, cached=None):
    steps = [{token: SimpleNamespace(logprob=-0.5 - i)} for i, token in enumerate(token_ids)]
    completion = SimpleNamespace(
        token_ids=token_ids,
        logprobs=steps if logprobs else None,
        weight_versions=[SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans] or None,
        finish_reason=finish,
        stop_reason=stop,
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached, finished=finish is not None)


class Queue:
    """Stands for RequestOutputCollector: the first output is there at once, the others are waited for."""

    def __init__(self, request_id, outputs, fault):
        self.request_id = f"{request_id}-internal"
        self.closed = False
        self._outputs, self._fault, self._waits = list(outputs), fault, False

    def get_nowait(self):
        self._waits = not self._waits
        return self._outputs.pop(0) if self._waits and self._outputs else None

    async def get(self):
        await asyncio.sleep(0)
        if self._outputs:
            return self._outputs.pop(0)
        if self._fault:
            raise self._fault
        return await asyncio.Event().wait()  # for ever

    def close(self):
        self.closed = True


class Processor:
    """Stands for vLLM's OutputProcessor: the requests that are not finished, by their internal id."""

    def __init__(self):
        self.request_states = {}

    def has_unfinished_requests(self):
        return bool(self.request_states)


class Llm:
    """Stands for AsyncLLM: gives the outputs that the test has laid out, or fails."""

    def __init__(self):
        self.outputs, self.fault, self.errored = [], None, False
        self.calls, self.log, self.queues = [], [], []
        self.takes = asyncio.Event()
        self.takes.set()
        self.fails_in = None
        self.version, self.told = "3", None
        self.output_processor = Processor()

    async def add_request(self, request_id, prompt, params):
        self.calls.append((prompt, params, request_id))
        await self.takes.wait()
        self.queues.append(Queue(request_id, self.outputs, self.fault))
        return self.queues[-1]

    async def abort(self, request_id, *, internal=False):
        self.log.append(("abort", request_id, internal))

    async def collective_rpc(self, method, args=()):
        self._step(method, *args)
        return [{"w": "digest"}] if method == "refit_digests" else [True]

    async def update_weight_version(self, version):
        self._step("version", version)
        self.version = version

    async def get_weight_version(self):
        return self.told or self.version

    def _step(self, *call):
        self.log.append(call)
        if call[0] == self.fails_in:
            raise RuntimeError("injected")

    async def pause_generation(self, **options):
        self._step("pause", options)

    async def start_weight_update(self):
        self._step("start")

    async def update_weights(self, request):
        self._step("update", request.update_info)

    async def finish_weight_update(self):
        self._step("finish")

    async def resume_generation(self):
        self._step("resume")

    def shutdown(self):
        self.log.append(("shutdown",))


@pytest.fixture
def llm():
    return Llm()


@pytest.fixture
def engine(llm):
    engine = VllmEngine(VllmSetup(model_path="m", engine=EngineConfig(), seed=0, gpus=0, transfer="gloo", version=3))
    engine._llm = llm  # what `start` would have loaded
    return engine


async def refit(engine, version):
    await engine.start_weight_update()
    await engine.update_weights({"names": ["w"]})
    await engine.finish_weight_update()
    await engine.weight_digests()
    return await engine.serve(version)


def request(**sampling):
    return EngineRequest(
        request_id="r", prompt_token_ids=[1, 2], sampling=EngineSampling(**{"max_tokens": 7, **sampling})
    )


async def test_every_sampling_field_is_passed_on(engine, llm):
    llm.outputs = [output([5], finish="stop")]
    sampling = {
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 11,
        "logit_bias": {5: 2.0},
    }
    await engine.generate(request(**sampling, stop=("END",)))
    ((_, params, request_id),) = llm.calls
    assert {name: getattr(params, name) for name in sampling} == sampling
    assert (params.stop, params.detokenize) == (["END"], True)
    assert params.logprobs == 0, "the log-prob of the sampled token alone"
    assert request_id == "r"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("json_object", "", {"json_object": True}),
        ("json_schema", '{"type":"object"}', {"json": '{"type":"object"}'}),
        ("regex", "a+", {"regex": "a+"}),
        ("choice", '["yes","no"]', {"choice": ["yes", "no"]}),
        ("grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ("structural_tag", '{"format":{}}', {"structural_tag": '{"format":{}}'}),
    ],
)
async def test_a_grammar_is_passed_on_as_vllm_takes_it(engine, llm, kind, text, expected):
    llm.outputs = [output([5], finish="stop")]
    await engine.generate(request(grammar=Grammar(kind=kind, text=text)))
    await engine.generate(request())
    assert [params.structured_outputs for _, params, _ in llm.calls] == [expected, None]


async def test_a_schema_that_xgrammar_would_keep_to_in_part_is_refused_within_a_tag_too(engine, llm):
    tag = '{"format":{"elements":[{"type":"json_schema","json_schema":{"type":"array","uniqueItems":true}}]}}'
    with pytest.raises(EngineRequestError, match="has features that the grammar could not keep to") as caught:
        await engine.generate(request(grammar=Grammar(kind="structural_tag", text=tag)))
    assert (caught.value.field, llm.calls) == ("grammar", [])


async def test_the_likeliest_tokens_come_ranked_and_without_those_that_were_ruled_out(engine, llm):
    step = {7: -0.5, 5: -2.5, 6: -1.5, 9: -1.0, 8: float("-inf")}
    whole = output([5], finish="stop")
    whole.outputs[0].logprobs = [{token: SimpleNamespace(logprob=logprob) for token, logprob in step.items()}]
    llm.outputs = [whole]
    chunk = await engine.generate(msgspec.structs.replace(request(), num_top_logprobs=3))
    assert chunk.logprobs == [-2.5]
    assert chunk.top_logprobs == [[(7, -0.5), (9, -1.0), (6, -1.5)]], "the sampled one is not that likely"
    assert llm.calls[0][1].logprobs == 3
    whole.outputs[0].logprobs = [{token: SimpleNamespace(logprob=step[token]) for token in (5, 8)}]
    llm.outputs = [whole]
    chunk = await engine.generate(msgspec.structs.replace(request(), num_top_logprobs=3))
    assert chunk.top_logprobs == [[(5, -2.5)]], "one that was ruled out is no alternative"
    llm.outputs = [output([5], finish="stop")]
    assert (await engine.generate(request())).top_logprobs == []


async def test_a_generation_that_vllm_gives_up_is_an_error_and_no_reply(engine, llm):
    llm.outputs = [output([5]), output([], logprobs=False, finish="error")]
    with pytest.raises(EngineError, match="request r: the engine gave it up"):
        [_ async for _ in engine.stream(request())]


@pytest.mark.parametrize(
    ("parameter", "grammar", "field"),
    [
        ("logit_bias", None, "logit_bias"),
        ("logprobs", None, "num_top_logprobs"),
        (None, Grammar(kind="regex", text="(("), "grammar"),
        (None, None, None),
    ],
)
async def test_a_request_at_fault_is_told_apart_with_its_field(engine, llm, parameter, grammar, field):
    error = ClientError("Failed to transform it: [13:53:01] /project/cpp/x.cc:83: Not closed.", parameter=parameter)

    async def refuse(request_id, prompt, params):
        raise error

    llm.add_request = refuse
    with pytest.raises(EngineRequestError) as caught:
        await engine.generate(request(grammar=grammar))
    assert (str(caught.value), caught.value.field) == ("Failed to transform it: Not closed.", field)
    error.args = ("x" * 100_000,)
    with pytest.raises(EngineRequestError) as caught:
        await engine.generate(request())
    assert len(str(caught.value)) == 500, "an error must not send the request back"


async def test_an_error_of_a_request_crosses_processes_with_its_field():
    copy = pickle.loads(pickle.dumps(EngineRequestError("no", "grammar")))
    assert (str(copy), copy.field) == ("no", "grammar")


async def test_text_is_made_only_where_a_stop_string_needs_it(engine, llm):
    llm.outputs = [output([5], finish="stop")]
    await engine.generate(request())
    assert llm.calls[0][1].detokenize is False


async def test_a_whole_answer_is_asked_for_whole_and_a_stream_in_pieces(engine, llm):
    llm.outputs = [output([5], finish="stop")]
    await engine.generate(request())
    [_ async for _ in engine.stream(request())]
    assert [params.output_kind for _, params, _ in llm.calls] == [Kind.FINAL_ONLY, Kind.DELTA]


async def test_the_prompts_cache_is_salted_with_the_version_that_is_served(engine, llm):
    llm.outputs = [output([5], finish="stop")]
    await engine.generate(request())
    await refit(engine, 4)
    await engine.generate(request())
    assert [prompt for prompt, _, _ in llm.calls] == [
        {"prompt_token_ids": [1, 2], "cache_salt": "3"},
        {"prompt_token_ids": [1, 2], "cache_salt": "4"},
    ]


async def test_an_answer_has_ids_log_probs_and_the_version_of_every_token(engine, llm):
    llm.outputs = [output([5, 6, 7], spans=[("3", 0, 2), ("4", 2, 3)], finish="stop", cached=2)]
    assert await engine.generate(request()) == EngineChunk(
        token_ids=[5, 6, 7],
        logprobs=[-0.5, -1.5, -2.5],
        versions=[3, 3, 4],
        finish_reason="stop",
        stop_string=None,
        num_cached_tokens=2,
    )


async def test_a_stream_has_the_versions_of_all_its_tokens_in_its_last_chunk(engine, llm):
    llm.outputs = [output([5]), output([6, 7], spans=[("3", 0, 1), ("4", 1, 3)], finish="length")]
    chunks = [chunk async for chunk in engine.stream(request())]
    assert [(chunk.token_ids, chunk.versions, chunk.finish_reason) for chunk in chunks] == [
        ([5], [], None),
        ([6, 7], [3, 4, 4], "length"),
    ]


async def test_a_matched_stop_string_is_named_and_an_end_token_is_not(engine, llm):
    llm.outputs = [output([5], finish="stop", stop="END")]
    assert (await engine.generate(request(stop=("END",)))).stop_string == "END"
    llm.outputs = [output([5], finish="stop", stop=151645)]
    assert (await engine.generate(request())).stop_string is None


async def test_a_last_chunk_without_tokens_is_no_fault(engine, llm):
    llm.outputs = [output([], logprobs=False, finish="abort")]
    chunk = await engine.generate(request())
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == ([], [], "abort")


async def test_a_token_without_its_log_prob_is_never_passed_on(engine, llm):
    llm.outputs = [output([5], logprobs=False, finish="stop")]
    with pytest.raises(EngineError):
        await engine.generate(request())


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (DeadError("core is gone"), EngineDeadError),
        (asyncio.QueueFull("full"), EngineOverloadedError),
        (ValueError("prompt too long"), EngineError),
        (RuntimeError("odd"), EngineError),
        (OverflowError("a seed of 100 bits"), EngineError),
        (VllmError("of the server"), EngineError),
        (ClientError("of the client"), EngineRequestError),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_faults_of_vllm_are_told_in_the_engines_own_terms(engine, llm, fault, expected, streamed):
    llm.outputs, llm.fault = [output([5])], fault

    async def ask():
        return [_ async for _ in engine.stream(request())] if streamed else await engine.generate(request())

    with pytest.raises(EngineError) as caught:
        await ask()
    assert type(caught.value) is expected
    assert str(caught.value).startswith("request r: ") or expected is EngineRequestError


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_whose_reader_is_gone_is_aborted(engine, llm, streamed):
    llm.outputs = [output([5])]

    async def read():
        return [_ async for _ in engine.stream(request())] if streamed else await engine.generate(request())

    reading = asyncio.create_task(read())
    for _ in range(5):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert llm.log == [("abort", "r-internal", True)]
    assert llm.queues[0].closed


async def test_an_update_waits_for_requests_that_are_being_handed_over(engine, llm):
    llm.outputs = [output([5], finish="stop")]
    llm.takes.clear()
    early = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0)
    update = asyncio.create_task(engine.start_weight_update())
    for _ in range(5):
        await asyncio.sleep(0)
    assert (llm.calls[0][0]["cache_salt"], llm.log) == ("3", [])  # it would be scheduled after the update otherwise
    llm.takes.set()
    await update
    assert llm.log[0][0] == "pause"
    await early


async def test_requests_that_come_in_while_weights_change_wait_for_the_new_version(engine, llm):
    llm.outputs = [output([5], finish="stop")]
    await engine.start_weight_update()
    waiting = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0)
    assert (llm.calls, waiting.done()) == ([], False)
    await engine.update_weights({"names": ["w"]})
    await engine.finish_weight_update()
    await asyncio.sleep(0)
    assert llm.calls == [], "weights that are ready are not served before they are compared"
    await engine.serve(4)
    await waiting
    assert llm.calls[0][0]["cache_salt"] == "4"
    assert await engine.check_health() == 4


async def test_an_update_pauses_with_what_was_sampled_and_resumes_after_the_version_is_told(engine, llm):
    await engine.start_weight_update()
    await engine.update_weights({"names": ["w"]})
    await engine.finish_weight_update()
    assert await engine.weight_digests() == [{"w": "digest"}]
    await engine.serve(4)
    assert llm.log == [
        ("pause", {"mode": "keep", "clear_cache": False}),
        ("start",),
        ("update", {"names": ["w"]}),
        ("finish",),
        ("refit_digests",),
        ("version", "4"),
        ("resume",),
    ]


class Running:
    """A generation that vLLM has, with `sampled` behind it; `tell` lets its reader see more."""

    def __init__(self, engine, llm, name, *, sampled=(), streamed=True):
        llm.outputs = []
        self._llm, self.name, self.chunks = llm, name, []
        self._task = asyncio.create_task(self._read(engine, streamed))
        self._is_sampled = bool(sampled)
        self._sampled = sampled

    async def _read(self, engine, streamed):
        asked = msgspec.structs.replace(request(), request_id=self.name)
        if streamed:
            async for chunk in engine.stream(asked):
                self.chunks.append(chunk)
        else:
            self.chunks.append(await engine.generate(asked))

    async def begin(self):
        await settle()
        queue = self.queue
        self._llm.output_processor.request_states[queue.request_id] = SimpleNamespace(
            is_prefilling=not self._is_sampled
        )
        if self._sampled:
            queue.put(output(list(self._sampled)))
            await settle()

    @property
    def queue(self):
        return next(q for q in reversed(self._llm.queues) if q.request_id == f"{self.name}-internal")

    async def finish(self, *tokens, finish="stop", versions=("3",)):
        self._llm.output_processor.request_states.pop(self.queue.request_id, None)
        spans = [(version, i, i + 1) for i, version in enumerate(versions)]
        self.queue.put(output(list(tokens), spans=spans, finish=finish))
        await settle()

    async def end(self):
        async with asyncio.timeout(5):
            await self._task
        return [token for chunk in self.chunks for token in chunk.token_ids]


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def with_settings(engine, **settings):
    engine._settings = EngineConfig(**settings)
    return engine


@pytest.fixture
def live_queues(monkeypatch):
    """Queues that take what the test puts into them."""

    class Live(asyncio.Queue):
        def __init__(self, request_id, outputs, fault):
            super().__init__()
            self.request_id, self.closed = f"{request_id}-internal", False

        def get_nowait(self):
            return None if self.empty() else self._give(super().get_nowait())

        async def get(self):
            return self._give(await super().get())

        def _give(self, item):
            if isinstance(item, Exception):
                raise item
            return item

        def put(self, item):
            self.put_nowait(item)

        def close(self):
            self.closed = True

    monkeypatch.setitem(globals(), "Queue", Live)


async def test_a_generation_is_held_and_goes_on_with_what_it_sampled(engine, llm, live_queues):
    running = Running(engine, llm, "r", sampled=[5])
    await running.begin()
    interrupted = await refit(engine, 4)
    await running.finish(6, versions=("3", "4"))
    assert (await running.end(), interrupted) == ([5, 6], Interrupted(held=1))
    assert len(llm.calls) == 1
    assert running.chunks[-1].versions == [3, 4]


async def test_a_prompt_that_nothing_was_sampled_of_begins_anew_under_the_new_salt(engine, llm, live_queues):
    """It may have been scheduled by nobody: salted with the old version, it would find the old keys and values."""
    running = Running(engine, llm, "r", streamed=False)
    await running.begin()
    starting = asyncio.create_task(engine.start_weight_update())
    await settle()
    assert ("abort", ["r-internal"], True) in llm.log
    assert llm.log.index(("abort", ["r-internal"], True)) < llm.log.index(("start",))
    await running.finish(finish="abort", versions=())
    await starting
    await engine.finish_weight_update()
    assert len(llm.calls) == 1, "not before the new weights are served"
    assert await engine.serve(4) == Interrupted(anew=1)
    await settle()
    await running.finish(7, versions=("4",))
    assert await running.end() == [7]
    assert [prompt["cache_salt"] for prompt, _, _ in llm.calls] == ["3", "4"]


async def test_where_a_stale_cache_is_kept_prompts_have_no_salt_and_stay(engine, llm, live_queues):
    with_settings(engine, keep_stale_cache=True)
    running = Running(engine, llm, "r")
    await running.begin()
    assert await refit(engine, 4) == Interrupted(held=1)
    await running.finish(7, versions=("4",))
    await running.end()
    assert llm.calls[0][0] == {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize("streamed", [True, False])
async def test_abort_samples_anew_what_nobody_has_seen(engine, llm, live_queues, streamed):
    with_settings(engine, on_refit="abort")
    seen, unseen = Running(engine, llm, "seen", sampled=[5]), Running(engine, llm, "unseen", streamed=streamed)
    await seen.begin()
    await unseen.begin()
    llm.output_processor.request_states["unseen-internal"].is_prefilling = False  # it has sampled, and kept it
    starting = asyncio.create_task(engine.start_weight_update())
    await settle()
    assert ("abort", ["unseen-internal"], True) in llm.log
    await unseen.finish(8, 9, finish="abort", versions=("3", "3"))
    await starting
    assert await engine.serve(4) == Interrupted(held=1, anew=1)
    await settle()
    await unseen.finish(7, versions=("4",))
    await seen.finish(6, versions=("3", "4"))
    assert (await unseen.end(), await seen.end()) == ([7], [5, 6])
    assert unseen.chunks[-1].versions == [4]


async def test_wait_lets_generations_finish_and_holds_new_ones(engine, llm, live_queues):
    with_settings(engine, on_refit="wait")
    running = Running(engine, llm, "r", sampled=[5])
    await running.begin()
    starting = asyncio.create_task(engine.start_weight_update())
    await settle()
    late = asyncio.create_task(engine.generate(msgspec.structs.replace(request(), request_id="late")))
    await settle()
    assert (llm.log, len(llm.calls)) == ([], 1)
    await running.finish(6, versions=("3", "3"))
    async with asyncio.timeout(5):
        await starting
    assert await running.end() == [5, 6]
    assert await engine.serve(4) == Interrupted(awaited=1)
    await settle()
    assert llm.calls[1][0]["cache_salt"] == "4"
    late.cancel()


async def test_a_wait_for_generations_ends_with_the_core(engine, llm, live_queues):
    with_settings(engine, on_refit="wait")
    running = Running(engine, llm, "r", sampled=[5])
    await running.begin()
    llm.errored = True
    with pytest.raises(EngineDeadError):
        await engine.start_weight_update()
    running._task.cancel()


async def test_a_call_that_is_aborted_while_weights_change_is_not_handed_over(engine, llm):
    await engine.start_weight_update()
    waiting = asyncio.create_task(engine.generate(request()))
    await settle()
    await engine.abort("r")
    await engine.serve(4)
    chunk = await waiting
    assert (chunk.finish_reason, chunk.token_ids, llm.calls) == ("abort", [], [])


@pytest.mark.parametrize("step", ["pause", "start", "update", "finish", "refit_digests", "version", "resume"])
async def test_after_a_refit_that_failed_at_any_step_nothing_is_sampled(engine, llm, live_queues, step):
    held = Running(engine, llm, "held", sampled=[5])
    await held.begin()
    llm.fails_in = step
    with pytest.raises(RuntimeError, match="injected"):
        await refit(engine, 4)
    with pytest.raises(EngineDeadError, match="a refit failed"):
        await engine.generate(request())
    with pytest.raises(EngineDeadError, match="a refit failed"):
        await held.end()
    with pytest.raises(EngineDeadError, match="a refit failed"):
        await engine.check_health()
    assert len(llm.calls) == 1


async def test_a_version_that_vllm_did_not_take_is_not_served(engine, llm):
    await engine.start_weight_update()
    llm.told = "3"
    with pytest.raises(EngineError, match="vLLM serves version 3 in place of 4"):
        await engine.serve(4)
    assert ("resume",) not in llm.log


async def test_the_core_is_asked_for_its_health_except_while_it_takes_weights(engine, llm, monkeypatch):
    asked = []
    monkeypatch.setattr(llm, "get_weight_version", lambda: asked.append(1) or asyncio.sleep(0))
    assert await engine.check_health() == 3
    assert len(asked) == 1
    await engine.start_weight_update()
    assert await engine.check_health() == 3
    assert len(asked) == 1


async def test_an_engine_whose_core_is_gone_is_not_healthy(engine, llm):
    assert await engine.check_health() == 3
    llm.errored = True
    with pytest.raises(EngineDeadError):
        await engine.check_health()
