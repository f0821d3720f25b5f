"""How deep, and how finely, the JSON of a request may be nested. What is deeper breaks whatever walks it later."""

import re
from typing import Annotated

from msgspec import Meta, Raw

from molt.train.gateway.call_error import CallError

MAX_DEPTH = 64
"""Levels of objects and arrays in a body, the body itself the first."""
MAX_NODES = 1_000_000
"""Objects and arrays in a body: each takes a hundred times its two bytes once it is read."""
MAX_ITEMS = 100_000
Items = Annotated[list[Raw], Meta(max_length=MAX_ITEMS)]
"""Messages of a conversation."""

_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b'{}[]"'))
_STRING = re.compile(rb'"[^"]*"')


def check_depth(text: bytes | Raw, where: str) -> None:
    """Refuse valid JSON that is nested too deeply; `where` is its path in the body.

    Costs next to nothing for what has few brackets, and some 5 ns a byte for code and tool results.

    Raises:
        CallError: The body has more than `MAX_DEPTH` levels here.
    """
    allowed = MAX_DEPTH - where.count(".") - where.count("[") - bool(where)
    raw = bytes(text)
    if raw.count(b"{") + raw.count(b"[") <= allowed:
        return
    brackets = _brackets(raw)
    for _ in range(allowed):
        brackets = brackets.replace(b"[]", b"")  # the innermost level of every branch
        if not brackets:
            return
    raise too_deep(where)


def too_deep(where: str) -> CallError:
    """What JSON is refused with that is nested too deeply."""
    message = f"{where or 'the body'} is nested too deeply: a body has {MAX_DEPTH} levels at the most"
    return CallError("invalid_request", message, param=where or None)


def check_nodes(body: bytes) -> None:
    """Refuse a body, valid or not, with too many objects and arrays.

    Raises:
        CallError: It has more than `MAX_NODES`.
    """
    is_suspect = len(body) > 2 * MAX_NODES and body.count(b"{") + body.count(b"[") > MAX_NODES
    if is_suspect and len(_brackets(body)) > 2 * MAX_NODES:
        raise CallError("invalid_request", f"the body has more than {MAX_NODES} objects and arrays")


def _brackets(text: bytes) -> bytes:
    """The brackets that stand outside strings, all of them square."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _STRING.sub(b"", text.translate(_AS_SQUARE, _NO_STRUCTURE))
