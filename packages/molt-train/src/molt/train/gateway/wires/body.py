"""Reading JSON bodies into structs, with the path of a bad field in the client's terms."""

import re
from typing import Any, TypeVar

import msgspec

from molt.train.gateway.call_error import CallError

_T = TypeVar("_T")
_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


def decode(decoder: msgspec.json.Decoder[_T], body: bytes, where: str = "") -> _T:
    """The decoded body. `where` is the path of `body` in the request.

    Raises:
        CallError: The body is no JSON, or a field has the wrong type; `param` is its path.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _AT.search(message)
        param = join(where, found[1]) if found else where
        raise CallError(
            "invalid_request", message[: found.start()] if found else message, param=param or None
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallError("invalid_request", f"the body is not valid JSON: {error}", param=where or None) from None
    except RecursionError:
        raise CallError("invalid_request", "the body is nested too deeply", param=where or None) from None


def join(where: str, path: str) -> str:
    """The path of a field inside the value at `where`."""
    if not where or not path or path.startswith("["):
        return where + path
    return f"{where}.{path}"


def arguments_of(text: str) -> dict[str, Any] | str:
    """Tool-call arguments as templates take them: an object, or the text where it is none."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def present(raw: msgspec.Raw) -> bytes | None:
    """The JSON text of an optional field; None where it is absent or null."""
    text = bytes(raw)
    return None if text in (b"", b"null") else text
