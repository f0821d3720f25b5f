"""A vLLM engine in this process: the body of an engine's Ray actor."""

import asyncio
import math
import os
import re
from collections.abc import AsyncGenerator
from itertools import repeat
from typing import Any, Literal

import msgspec

from molt.train.config import EngineConfig
from molt.train.engine.protocol import EngineChunk, EngineRequest, Grammar
from molt.train.errors import EngineDeadError, EngineError, EngineOverloadedError, EngineRequestError

EXTENSION = "molt.train.refit.gloo_engine.WorkerExtension"
MAX_MESSAGE_CHARS = 500
"""Of what a client is told of a request that vLLM refuses: vLLM may quote the whole of it."""
_SOURCE_LINE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
"""What xgrammar puts before its messages."""


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


class VllmEngine:
    """vLLM's `AsyncLLM`, answering with token ids, processed log-probs and the policy version of every token."""

    def __init__(self, setup: VllmSetup):
        self._setup = setup
        self._version = setup.version
        self._serving = asyncio.Event()
        self._serving.set()
        self._handing_over = 0
        self._all_handed_over = asyncio.Event()
        self._all_handed_over.set()

    async def start(self) -> int:
        """Load the model; returns this process's id."""
        from vllm import AsyncEngineArgs
        from vllm.config import StructuredOutputsConfig, WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        over_gloo = self._setup.transfer == "gloo"
        if over_gloo:
            import molt.train.refit.gloo_engine  # noqa: F401  registers the backend here, too
        settings = self._setup.engine
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
            weight_transfer_config=WeightTransferConfig(backend=self._setup.transfer),
            worker_extension_cls=EXTENSION if over_gloo else "",
            disable_log_stats=True,
            **device,
        )
        self._llm = AsyncLLM.from_engine_args(args)
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
        await self._llm.abort(request_id)

    async def _outputs(self, request: EngineRequest, *, streamed: bool) -> AsyncGenerator[EngineChunk]:
        from vllm.exceptions import VLLMClientError, VLLMError
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        queue = None
        try:
            queue = await self._hand_over(request, _sampling(request, streamed=streamed))
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield _chunk(output, request)
        except (asyncio.CancelledError, GeneratorExit):
            if queue is not None:
                await self._llm.abort(queue.request_id, internal=True)
            raise
        except VllmDeadError as error:
            raise EngineDeadError(f"request {request.request_id}: the engine is dead: {error}") from None
        except asyncio.QueueFull as error:
            raise EngineOverloadedError(f"request {request.request_id}: {error}") from None
        except EngineError:
            raise
        except VLLMClientError as error:
            raise _refusal(error, request) from None
        except (VLLMError, ValueError, RuntimeError, OverflowError) as error:
            raise EngineError(f"request {request.request_id}: {type(error).__name__}: {error}") from None
        finally:
            if queue is not None:
                queue.close()

    async def _hand_over(self, request: EngineRequest, params: Any) -> Any:
        """Give the request to vLLM's scheduler, salted with the version that will be served when it is scheduled.

        A request salted with the version on its way out, but scheduled after the update, would find keys and values of
        the old weights. So none is handed over while weights change, and an update waits for those under way.
        """
        from vllm import TokensPrompt

        while not self._serving.is_set():  # by the time a waiter wakes, the next update may have begun
            await self._serving.wait()
        self._handing_over += 1
        self._all_handed_over.clear()
        try:
            prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids, cache_salt=str(self._version))
            return await self._llm.add_request(request.request_id, prompt, params)
        finally:
            self._handing_over -= 1
            if not self._handing_over:
                self._all_handed_over.set()

    async def check_health(self) -> int:
        """The version being served; raises EngineDeadError when the engine behind this actor is gone."""
        if self._llm.errored:
            raise EngineDeadError("the engine's core process is gone")
        return self._version

    # --- weight transfer: the method names are those that vLLM's trainer half calls --------------------------------

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def start_weight_update(self) -> None:
        """Hold every running request, with what it has sampled, and make ready for new weights."""
        self._serving.clear()
        await self._all_handed_over.wait()
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._llm.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive the weights; the trainer sends them meanwhile."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self, version: int) -> None:
        """Serve the new weights as `version` and let the held requests go on."""
        await self._llm.finish_weight_update(str(version))
        # Prompts are salted with the version, so that no new one finds the keys and values of older weights.
        self._version = version
        await self._llm.resume_generation()
        self._serving.set()

    async def shutdown(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()


def _sampling(request: EngineRequest, *, streamed: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted = request.sampling
    return SamplingParams(
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        stop=list(wanted.stop),
        seed=wanted.seed,
        logit_bias=wanted.logit_bias or None,
        structured_outputs=_bound(wanted.grammar) if wanted.grammar else None,
        logprobs=request.num_top_logprobs,  # of these, and always of the sampled token
        detokenize=bool(wanted.stop),  # the gateway detokenizes; the engine needs text for stop strings only
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )


def _refusal(error: Exception, request: EngineRequest) -> EngineRequestError:
    message = str(error.args[0]) if error.args else str(error)
    if error.__cause__ is not None and str(error.__cause__) not in message:
        message += f" {error.__cause__}"
    field = getattr(error, "parameter", None) or ("grammar" if request.sampling.grammar else None)
    message = _SOURCE_LINE.sub("", message).strip()[:MAX_MESSAGE_CHARS]
    return EngineRequestError(message, "num_top_logprobs" if field == "logprobs" else field)


def _bound(grammar: Grammar) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match grammar.kind:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=grammar.text)
        case "regex":
            return StructuredOutputsParams(regex=grammar.text)
        case "choice":
            return StructuredOutputsParams(choice=msgspec.json.decode(grammar.text, type=list[str]))
        case "grammar":
            return StructuredOutputsParams(grammar=grammar.text)
        case "structural_tag":
            _check_schemas(msgspec.json.decode(grammar.text))
            return StructuredOutputsParams(structural_tag=grammar.text)


def _check_schemas(node: Any) -> None:
    """Refuse what xgrammar would ignore in a schema: vLLM checks that of a `json_schema`, not those within a tag."""
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    if isinstance(node, dict):
        if node.get("type") != "json_schema":
            for value in node.values():
                _check_schemas(value)
        elif isinstance(schema := node.get("json_schema"), dict) and has_xgrammar_unsupported_json_features(schema):
            raise EngineRequestError("the JSON schema has features that the grammar could not keep to", "grammar")
    elif isinstance(node, list):
        for value in node:
            _check_schemas(value)


def _chunk(output: Any, request: EngineRequest) -> EngineChunk:
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise EngineError(f"request {request.request_id}: the engine gave it up; its log says why")
    ids = list(completion.token_ids)
    steps = completion.logprobs or []
    versions: list[int] = []
    for span in completion.weight_versions or ():
        versions.extend(repeat(int(span.version), span.end - span.start))
    stop = completion.stop_reason
    return EngineChunk(
        token_ids=ids,
        logprobs=[step[token].logprob for step, token in zip(steps, ids, strict=True)],
        versions=versions,
        finish_reason=completion.finish_reason,
        stop_string=stop if isinstance(stop, str) else None,
        num_cached_tokens=output.num_cached_tokens or 0,
        top_logprobs=[_likeliest(step, number) for step in steps] if (number := request.num_top_logprobs) else [],
    )


def _likeliest(step: dict[int, Any], number: int) -> list[tuple[int, float]]:
    """The likeliest of the tokens that sampling did not rule out. vLLM adds the sampled one, however unlikely."""
    found = [(token, entry.logprob) for token, entry in step.items() if entry.logprob > -math.inf]
    return sorted(found, key=lambda pair: -pair[1])[:number]
