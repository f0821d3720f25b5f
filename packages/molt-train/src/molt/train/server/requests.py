"""Request bodies: bytes to protocol structs, with errors that name the field."""

import difflib
import json
import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from molt.agents.protocol import ResultReport, SessionRequest, SessionResult
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.nesting import check_depth
from molt.train.server.errors import ApiError

T = TypeVar("T")
Result = TypeVar("Result", ResultReport, SessionResult)

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Of one request to the control API. Model calls, which may carry images, have the gateway's own limit."""


async def read_body(request: Request) -> bytes:
    """The whole body; empty ones count as `{}`. Raises ApiError 413 when it is too large."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks) or b"{}"


def decode(body: bytes, schema: type[T]) -> T:
    """The body as `schema`; unknown fields are ignored, so that a newer worker can talk to an older server."""
    try:
        value = msgspec.json.decode(body, type=schema)
        check_depth(body, "")
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    except CallError as error:
        raise ApiError(400, error.message) from None
    return value


def decode_session(body: bytes) -> SessionRequest:
    """A request for a session. A field that does not exist is an error: ignored, it would change the sampling."""
    request = decode(body, SessionRequest)
    fields = decode(body, dict[str, Any])
    _refuse_unknown(fields, SessionRequest, prefix="")
    return request


def decode_result(body: bytes, schema: type[Result]) -> Result:
    """A report of how a rollout ended.

    A reward or score that is no finite number does not make the report invalid: it makes the outcome `failed`, with
    the value as the reason. JSON itself has no NaN and no infinities, but Python's `json` writes them.
    """
    try:
        fields: Any = json.loads(body)
        check_depth(body, "")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    except CallError as error:
        raise ApiError(400, error.message) from None
    if isinstance(fields, dict):
        for name in ("reward", "score"):
            value = fields.get(name)
            if value is not None and not _is_finite_number(value):
                reason = f"{name} is {value!r:.80}, which is no finite number"
                fields |= {"outcome": "failed", "reward": None, "score": None, "error": reason}
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _refuse_unknown(fields: dict[str, Any], schema: type[msgspec.Struct], *, prefix: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(schema)}
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ApiError(
                400, f"unknown field {prefix + name!r}; the nearest known one is {prefix + near!r}", param=prefix + name
            )
        for nested in _structs_of(known[name]):
            if isinstance(value, dict):
                _refuse_unknown(value, nested, prefix=f"{prefix}{name}.")


def _structs_of(field_type: Any) -> list[type[msgspec.Struct]]:
    options = getattr(field_type, "__args__", (field_type,))
    return [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Turns msgspec's "Expected `int`, got `str` - at `$.a.b`" into a message that begins with the field."""
    text, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(400, f"{param} is missing", param=param)
    return ApiError(400, f"{param or 'the body'}: {text[:1].lower()}{text[1:]}", param=param)
