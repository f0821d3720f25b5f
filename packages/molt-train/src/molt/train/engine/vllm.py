"""A vLLM engine in this process: the body of an engine's Ray actor."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from molt.train.config import EngineConfig
from molt.train.engine.protocol import EngineChunk, EngineRequest
from molt.train.engine.vllm_request import chunk_of, in_our_terms, sampling_params
from molt.train.errors import EngineDeadError, EngineError
from molt.train.observe.stacks import listen
from molt.train.records.refit import Interrupted

POLL_S = 0.02
"""Between two looks at what vLLM tells nobody."""


class VllmSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is set up."""

    model_path: str
    engine: EngineConfig
    seed: int
    gpus: float
    """GPUs of this engine; 0 on the CPU, a fraction where it shares one."""
    transfer: Literal["gloo", "nccl"]
    """The backend of the weight transfer."""
    version: int
    """Policy version of the weights at `model_path`."""
    stacks: str = ""
    """Folder in which its process listens for who asks for its stacks; empty: it does not."""


class _Call:
    """One generation that was asked for. It may be handed to vLLM more than once, if new weights make it begin anew."""

    def __init__(self, request: EngineRequest):
        self.request = request
        self.queue: Any = None
        """Where vLLM puts what it samples; None while vLLM does not have it."""
        self.is_withdrawn = False
        """What is in the queue is of no use: the generation begins anew."""
        self.has_delivered = False
        """Tokens of it were passed on: it cannot begin anew."""
        self.is_aborted = False

    def drop_queue(self) -> None:
        if self.queue is not None:
            self.queue.close()
        self.queue, self.is_withdrawn = None, False


class VllmEngine:
    """vLLM's `AsyncLLM`, answering with token ids, processed log-probs and the policy version of every token."""

    worker_extension = "molt.train.refit.receivers.WorkerExtension"

    def __init__(self, setup: VllmSetup):
        if setup.stacks:
            listen(Path(setup.stacks), "engine")
        self._setup, self._settings = setup, setup.engine
        self._version = setup.version
        self._calls: dict[_Call, None] = {}  # in the order in which they came
        self._serving = asyncio.Event()
        self._serving.set()
        self._handing_over = 0
        self._all_handed_over = asyncio.Event()
        self._all_handed_over.set()
        self._is_updating = False
        self._interrupted = Interrupted()
        self._fault: str | None = None
        """Why this engine must not serve again."""

    async def start(self) -> int:
        """Load the model; returns this process's id."""
        from vllm import AsyncEngineArgs
        from vllm.config import StructuredOutputsConfig, WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        import molt.train.refit.receivers  # noqa: F401  registers the backends here, too

        settings = self._settings
        device: dict[str, Any] = (
            {"gpu_memory_utilization": settings.gpu_memory_utilization}
            if self._setup.gpus
            else {
                "kv_cache_memory_bytes": settings.kv_cache_mb << 20,
                # vLLM takes a seeded request's draw back after each chunk of its prompt but the last, which generators
                # on the CPU cannot do: the engine would die of it.
                "enable_chunked_prefill": False,
            }
        )
        args = AsyncEngineArgs(
            model=self._setup.model_path,
            dtype=settings.dtype,
            seed=self._setup.seed,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            tensor_parallel_size=settings.tensor_parallel_size,
            enforce_eager=not self._setup.gpus,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from, temperature applied
            generation_config="vllm",  # no sampling default of the checkpoint slips in
            # One engine has one grammar backend, that of its first constrained request: "auto" would let that request
            # decide what later ones may ask for. No reasoning parser: our grammars have the reasoning in them.
            structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
            weight_transfer_config=WeightTransferConfig(backend=f"molt_{self._setup.transfer}"),
            worker_extension_cls=self.worker_extension,
            disable_log_stats=True,
            **device,
        )
        self._llm = AsyncLLM.from_engine_args(args)
        await self._llm.collective_rpc("end_with_parent")
        await self._llm.collective_rpc("refit_inspect", args=(settings.verify_refit,))
        await self._llm.update_weight_version(str(self._version))
        return os.getpid()

    async def generate(self, request: EngineRequest) -> EngineChunk:
        """One whole generation."""
        (whole,) = [output async for output in self._outputs(request, streamed=False)]
        return whole

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """One generation in the engine's own chunks; the versions of all its tokens come with the last."""
        async for chunk in self._outputs(request, streamed=True):
            yield chunk

    async def abort(self, request_id: str) -> None:
        """Stop a generation."""
        for call in self._calls:
            if call.request.request_id == request_id:
                call.is_aborted = True
        await self._llm.abort(request_id)

    async def _outputs(self, request: EngineRequest, *, streamed: bool) -> AsyncGenerator[EngineChunk]:
        call = _Call(request)
        self._calls[call] = None
        try:
            with in_our_terms(request):
                async with aclosing(self._sampled(call, sampling_params(request, streamed=streamed))) as outputs:
                    async for output in outputs:
                        chunk = chunk_of(output, request)
                        call.has_delivered = call.has_delivered or bool(chunk.token_ids)
                        yield chunk
                if call.is_aborted and call.queue is None:
                    yield EngineChunk(token_ids=[], logprobs=[], versions=[], finish_reason="abort")
        except (asyncio.CancelledError, GeneratorExit):
            if call.queue is not None:
                await self._llm.abort(call.queue.request_id, internal=True)
            raise
        finally:
            del self._calls[call]
            call.drop_queue()

    async def _sampled(self, call: _Call, params: Any) -> AsyncGenerator[Any]:
        """VLLM's outputs for a call, the last of them finished; none when it was aborted before vLLM had it."""
        while call.queue is None:
            call.queue = await self._hand_over(call, params)
            while call.queue is not None:
                output = call.queue.get_nowait() or await call.queue.get()
                if not call.is_withdrawn:
                    yield output
                    if output.finished:
                        return
                elif output.finished:
                    call.drop_queue()
            if call.is_aborted:
                return

    async def _hand_over(self, call: _Call, params: Any) -> Any:
        """Give a call to vLLM's scheduler, its prompt salted with the version that will be served when it is scheduled.

        Returns where vLLM will put what it samples, or None when the call was aborted meanwhile. A prompt salted with
        the version on its way out, but scheduled after the update, would find keys and values of the old weights. So
        none is handed over while weights change, and an update waits for those under way.
        """
        from vllm import TokensPrompt

        request = call.request
        while not self._serving.is_set():  # by the time a waiter wakes, the next update may have begun
            await self._serving.wait()
        if self._fault:
            raise EngineDeadError(f"request {request.request_id}: {self._fault}")
        if call.is_aborted:
            return None
        self._handing_over += 1
        self._all_handed_over.clear()
        try:
            prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids)
            if not self._settings.keep_stale_cache:
                prompt["cache_salt"] = str(self._version)
            return await self._llm.add_request(request.request_id, prompt, params)
        finally:
            self._handing_over -= 1
            if not self._handing_over:
                self._all_handed_over.set()

    async def check_health(self) -> int:
        """The version being served. Raises EngineDeadError when the engine behind this actor is gone, or unfit.

        Returns once vLLM's core has answered, except while it takes new weights: then it does nothing else.
        """
        if self._llm.errored:
            raise EngineDeadError("the engine's core process is gone")
        if self._fault:
            raise EngineDeadError(self._fault)
        if not self._is_updating:
            await self._llm.get_weight_version()
        return self._version

    # --- weight transfer: the method names are those that vLLM's trainer half calls --------------------------------

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group. Generations go on meanwhile."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        while not all(await self._llm.collective_rpc("refit_joined")):  # noqa: ASYNC110 - it happens in other processes
            await asyncio.sleep(POLL_S)

    async def start_weight_update(self) -> None:
        """Hold every generation, end it or take it back, as `engine.on_refit` says; make ready for new weights."""
        with self._or_unfit("at its start"):
            self._serving.clear()
            await self._all_handed_over.wait()
            found = len(self._in_vllm())
            if self._settings.on_refit == "wait":
                await self._drain()
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            held = self._in_vllm()
            anew = [call for call in held if self._begins_anew(call)]
            for call in anew:
                call.is_withdrawn = True
            if anew:
                await self._llm.abort([call.queue.request_id for call in anew], internal=True)
            self._interrupted = Interrupted(held=len(held) - len(anew), anew=len(anew), awaited=found - len(held))
            self._is_updating = True
            await self._llm.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive the weights; the trainer sends them meanwhile."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._or_unfit("while weights were sent"):
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self) -> None:
        """Have the new weights ready. Nothing is sampled from them yet."""
        with self._or_unfit("while weights were made ready"):
            await self._llm.finish_weight_update()

    async def weight_digests(self) -> list[dict[str, str]]:
        """Of what each worker holds since the last update, by name of the weight."""
        with self._or_unfit("while weights were compared"):
            return await self._llm.collective_rpc("refit_digests")

    async def serve(self, version: int) -> Interrupted:
        """Announce the new weights as `version`, and let generations go on. Returns what became of those under way."""
        with self._or_unfit("when it was to serve"):
            await self._llm.update_weight_version(str(version))
            if (told := await self._llm.get_weight_version()) != str(version):
                raise EngineError(f"vLLM serves version {told} in place of {version}")
            # Prompts are salted with the version, so that no new one finds the keys and values of older weights.
            self._version = version
            await self._llm.resume_generation()
            self._is_updating = False
            self._serving.set()
            return self._interrupted

    def _in_vllm(self) -> list[_Call]:
        """Calls that vLLM has and has not finished."""
        states = self._llm.output_processor.request_states
        return [call for call in self._calls if call.queue is not None and call.queue.request_id in states]

    def _begins_anew(self, call: _Call) -> bool:
        """Whether a paused call is taken back, to be asked again under the new version.

        One that has sampled nothing is, since its prompt is salted with the old version, unless that is wanted.
        """
        if self._settings.on_refit == "abort" and not call.has_delivered:
            return True
        has_sampled = not self._llm.output_processor.request_states[call.queue.request_id].is_prefilling
        return not has_sampled and not self._settings.keep_stale_cache

    async def _drain(self) -> None:
        """Until vLLM has finished every generation, whether it was read or not."""
        while self._llm.output_processor.has_unfinished_requests():
            if self._llm.errored:
                raise EngineDeadError("the engine's core process is gone")
            await asyncio.sleep(POLL_S)

    @contextmanager
    def _or_unfit(self, when: str) -> Iterator[None]:
        """What fails in the block leaves weights that nobody knows: nothing is sampled from them, and calls fail."""
        try:
            yield
        except BaseException as error:
            self._fault = f"a refit failed {when}: {type(error).__name__}: {error}"
            self._serving.set()  # for those who wait, to be told
            for call in self._in_vllm():
                call.queue.put(EngineDeadError(f"request {call.request.request_id}: {self._fault}"))
            raise

    async def shutdown(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()
