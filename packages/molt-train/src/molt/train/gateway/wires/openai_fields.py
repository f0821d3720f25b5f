"""The request fields that Chat Completions and Completions share: sampling, the form of the reply, streaming."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from molt.train.gateway.call import ResponseFormat, SamplingWishes
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import present

ABSENT = Raw(b"null")
MAX_STOPS = 4
MAX_BIAS = 100
_MAX_SEED = 2**63 - 1
_STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's names for what bounds the text of a reply, and ours."""


class StreamOptions(Struct):
    """How a stream is written."""

    include_usage: bool | None = None


class _JsonSchema(Struct):
    schema: dict[str, Any]


class _ResponseFormat(Struct):
    type: str
    json_schema: _JsonSchema | None = None


class _Unused(Struct, kw_only=True):
    """What changes a reply elsewhere and has no effect here. What concerns no reply (`user`, `store`) is not listed."""

    audio: Raw = ABSENT
    bad_words: Raw = ABSENT
    continue_final_message: Raw = ABSENT
    ignore_eos: Raw = ABSENT
    include_reasoning: Raw = ABSENT
    length_penalty: Raw = ABSENT
    min_tokens: Raw = ABSENT
    prediction: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT
    repetition_penalty: Raw = ABSENT
    return_token_ids: Raw = ABSENT
    stop_token_ids: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    verbosity: Raw = ABSENT
    web_search_options: Raw = ABSENT


_unused_of = attrgetter(*_Unused.__struct_fields__)
_NONE_SENT = (ABSENT,) * len(_Unused.__struct_fields__)


class OpenAIFields(_Unused, kw_only=True):
    """The shared fields."""

    model: str = ""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Meta(ge=-_MAX_SEED - 1, le=_MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    response_format: _ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream is to end with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def unused(self) -> tuple[str, ...]:
        """Notes for `ModelCall.notes` of the fields sent that have no effect."""
        fields = _unused_of(self)
        if fields == _NONE_SENT:
            return ()
        named = zip(_Unused.__struct_fields__, fields, strict=True)
        return tuple([f"ignored.{name}" for name, value in named if present(value) is not None])

    def wishes(self, max_tokens: int | None = None) -> SamplingWishes:
        """How the client wants to sample; `max_tokens` goes before the field of that name.

        Raises:
            CallError: There are too many stop strings, or a bias is for no token id or out of bounds.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOPS:
            raise CallError(
                "invalid_request", f"stop has {len(stop)} strings: send {MAX_STOPS} at the most", param="stop"
            )
        return SamplingWishes(
            max_tokens=max_tokens or self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_logit_bias(self.logit_bias) if self.logit_bias else None,
            seed=self.seed,
            stop=tuple(text for text in stop if text),
        )

    def bound(self) -> ResponseFormat | None:
        """What the text of the reply must be.

        Raises:
            CallError: It is of no known kind, or asked for in two ways.
        """
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        if self.response_format is None and not self.structured_outputs and list(guided.values()) == [None] * 4:
            return None
        bounds = [
            *_of_response_format(self.response_format),
            *_of_structured_outputs(self.structured_outputs or {}, "structured_outputs."),
            *_of_structured_outputs(guided, "guided_"),
        ]
        if len(bounds) > 1:
            raise CallError(
                "invalid_request", "the reply is bound in more than one way: keep one", param="response_format"
            )
        return bounds[0] if bounds else None


def _logit_bias(sent: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in sent.items():
        if not (key.isascii() and key.isdecimal()):
            raise CallError("invalid_request", f"logit_bias has the key {key!r}: use token ids", param="logit_bias")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            message = f"logit_bias of token {key} is {value}: stay between -{MAX_BIAS} and {MAX_BIAS}"
            raise CallError("invalid_request", message, param="logit_bias")
        bias[int(key)] = value
    return bias


def _of_response_format(sent: _ResponseFormat | None) -> Sequence[ResponseFormat]:
    if sent is None or sent.type == "text":
        return ()
    if sent.type == "json_object":
        return (ResponseFormat(kind="json_object"),)
    if sent.type != "json_schema":
        message = f"response_format of type {sent.type!r} is not served: use text, json_object or json_schema"
        raise CallError("invalid_request", message, param="response_format.type")
    if sent.json_schema is None:
        message = "response_format of type json_schema has no json_schema: send its schema"
        raise CallError("invalid_request", message, param="response_format.json_schema")
    return (ResponseFormat(kind="json_schema", spec=sent.json_schema.schema),)


def _of_structured_outputs(sent: dict[str, Any], prefix: str) -> Sequence[ResponseFormat]:
    bounds = []
    for name, kind in _STRUCTURED.items():
        spec = sent.get(name)
        if spec is None or spec is False:
            continue
        if kind in ("json_schema", "structural_tag") and isinstance(spec, str):
            spec = _json(spec, prefix + name)
        _check_kind(spec, kind, prefix + name)
        wanted = {"kind": kind, "spec": None if kind == "json_object" else spec, "param": prefix + name}
        bounds.append(msgspec.convert(wanted, ResponseFormat))
    return bounds


def _json(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise CallError("invalid_request", f"{where} is not valid JSON: {error}", param=where) from None


def _check_kind(spec: Any, kind: str, where: str) -> None:
    wanted, name = {
        "json_schema": (dict, "an object"),
        "structural_tag": (dict, "an object"),
        "json_object": (bool, "true"),
        "choice": (list, "a list of strings"),
    }.get(kind, (str, "a string"))
    texts = spec if kind == "choice" and isinstance(spec, list) else [""]
    if not isinstance(spec, wanted) or not texts or not all(isinstance(text, str) for text in texts):
        raise CallError("invalid_request", f"{where} is {str(spec)[:64]!r}: send {name}", param=where)
