"""Reading JSON bodies into structs, with the path of a bad field in the client's terms."""

import re
from typing import Any, TypeVar

import msgspec

from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.nesting import MAX_DEPTH, check_depth, check_nodes, too_deep

_T = TypeVar("_T")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_READ_LATER = frozenset(("messages", "input", "tools", "system"))
"""Piece by piece, each distinct one once a session, with the path of what is wrong in it."""
_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


def decode(decoder: msgspec.json.Decoder[_T], body: bytes, where: str = "") -> _T:
    """The decoded body. `where` is the path of `body` in the request; empty: the whole request.

    Raises:
        CallError: The body is no JSON, nested too deeply, or a field has the wrong type; `param` is its path.
    """
    try:
        if where:
            value = decoder.decode(body)
            check_depth(body, where)
        else:
            check_nodes(body)
            value = decoder.decode(body)
            _check_unread(body)
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
        raise too_deep(where) from None
    return value


def _check_unread(body: bytes) -> None:
    """Check the fields that the decoder has skipped, or not looked into as it would into parts that are read later."""
    if body.isascii() and body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return
    for name, raw in _decode_fields.decode(body).items():
        if name not in _READ_LATER:
            check_depth(raw, name)
            try:
                str(raw, "utf-8")
            except UnicodeDecodeError as error:
                raise CallError("invalid_request", f"{name} is not valid UTF-8: {error}", param=name) from None


def join(where: str, path: str) -> str:
    """The path of a field inside the value at `where`."""
    if not where or not path or path.startswith("["):
        return where + path
    return f"{where}.{path}"


def arguments_of(text: str) -> dict[str, Any] | str:
    """Tool-call arguments as templates take them: an object, or the text where it is none."""
    try:
        value = msgspec.json.decode(text)
        check_depth(text.encode(), "")
    except (msgspec.DecodeError, RecursionError, CallError):
        return text
    return value if isinstance(value, dict) else text


def present(raw: msgspec.Raw) -> bytes | None:
    """The JSON text of an optional field; None where it is absent or null."""
    text = bytes(raw)
    return None if text in (b"", b"null") else text
