"""Requests and answers in vLLM's terms."""

import asyncio
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import msgspec

from molt.train.engine.protocol import EngineChunk, EngineRequest, Grammar
from molt.train.errors import EngineDeadError, EngineError, EngineOverloadedError, EngineRequestError

MAX_MESSAGE_CHARS = 500
"""Of what a client is told of a request that vLLM refuses: vLLM may quote the whole of it."""
_SOURCE_LINE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
"""What xgrammar puts before its messages."""


@contextmanager
def in_our_terms(request: EngineRequest) -> Iterator[None]:
    """What vLLM raises in the block becomes an EngineError of the kind that says who is at fault."""
    from vllm.exceptions import VLLMClientError, VLLMError
    from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

    try:
        yield
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


def sampling_params(request: EngineRequest, *, streamed: bool) -> Any:
    """A request as vLLM's `SamplingParams`, with every field set."""
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


def chunk_of(output: Any, request: EngineRequest) -> EngineChunk:
    """A `RequestOutput` of vLLM as a chunk. Raises EngineError when vLLM gave the generation up."""
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
