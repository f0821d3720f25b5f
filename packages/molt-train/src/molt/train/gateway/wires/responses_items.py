"""OpenAI Responses: which input items are one message.

Reasoning, text and calls up to the next item of somebody else are one assistant turn. They are folded to one JSON
array, which the session's cache knows as one message. Where items carry ids of ours, these tell one turn of ours from
the next.
"""

import re
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from molt.train.gateway.call_error import CallError
from molt.train.gateway.past import FoldedInput, Past
from molt.train.gateway.wires.body import decode
from molt.train.gateway.wires.nesting import Items

RESPONSE_PREFIX = "resp_"

NATIVE_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
    "computer_call": ("computer", "action"),
}
"""Calls of tools that the vendor's models know by themselves: the tool's name, and the field with its arguments."""
HOSTED_CALLS = frozenset(
    (
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "web_search_call",
    )
)
"""What the vendor's servers do for their models in mid-turn: nothing in it is for this one."""

_BY_ASSISTANT = frozenset(("reasoning", "function_call", "custom_tool_call", *NATIVE_CALLS, *HOSTED_CALLS))
_OUR_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{24})_\d+")


class Kind(Struct, gc=False):
    """As much of an item as folding needs."""

    type: str | None = None
    role: str | None = None
    id: str | None = None

    @property
    def is_message(self) -> bool:
        """Clients leave the type of messages out."""
        return self.type == "message" or (self.type is None and self.role is not None)

    @property
    def is_reference(self) -> bool:
        """Whether the item stands for an earlier one."""
        return self.type == "item_reference" or (self.type is None and self.role is None and self.id is not None)

    @property
    def by_assistant(self) -> bool:
        """Whether the item is part of an assistant turn."""
        return self.type in _BY_ASSISTANT or (self.role == "assistant" and self.is_message)


decode_kind = msgspec.json.Decoder(Kind)
_decode_kinds = msgspec.json.Decoder(list[Kind])
_decode_items = msgspec.json.Decoder(Items)


def fold(sent: bytes, past: Past) -> FoldedInput:
    """Fold a request's `input`, a JSON string or array. A reference is replaced by the item that it names.

    An input that begins, to the byte, with that of a recent request costs what is behind that.

    Raises:
        CallError: An item is malformed, or a reference names no output item of the session.
    """
    if sent.startswith(b'"'):
        return FoldedInput(messages=[b'{"role":"user","content":' + sent + b"}"])
    text = sent.strip().removesuffix(b"]").rstrip()
    begun = past.folded_before(text)
    added = sent if begun is None else b"[" + text[len(begun.text) :].lstrip(b", \n\r\t") + b"]"
    folded = FoldedInput() if begun is None else begun.copy()
    for index, (kind, raw) in enumerate(_items(added, folded.num_items, past), start=folded.num_items):
        issued_by = issuer(kind.id)
        if not kind.by_assistant:
            folded.close()
            folded.add(raw, index)
        elif folded.turn and (issued_by is None or folded.issuer in (None, issued_by)):
            folded.turn.append(raw)
            folded.issuer = issued_by or folded.issuer
        else:
            folded.close()
            folded.begin(raw, index, issued_by)
        folded.num_items += 1
    folded.text = text
    if folded.num_items:
        past.remember(folded)
    return folded


def item_id(kind: str, response_id: str, index: int) -> str:
    """Id of the output item at `index`: it names the turn, and is the same however often a reply is written."""
    return f"{kind}_{response_id.removeprefix(RESPONSE_PREFIX)}_{index}"


def split(turn: bytes) -> list[bytes]:
    """The items of a folded assistant turn."""
    return [bytes(raw) for raw in _decode_items.decode(turn)]


def _items(sent: bytes, start: int, past: Past) -> list[tuple[Kind, bytes]]:
    """The items of an array whose first is `input[start]`."""
    try:
        raws = [bytes(raw) for raw in _decode_items.decode(sent)]
    except msgspec.ValidationError as error:
        message = f"input is a text or a list of items: {error}"
        raise CallError("invalid_request", message, param="input") from None
    kinds = _kinds(sent, start, raws)
    for index, kind in enumerate(kinds):
        if kind.is_reference:
            raws[index] = _referred(kind.id or "", f"input[{start + index}].id", past)
            kinds[index] = decode_kind.decode(raws[index])
    return list(zip(kinds, raws, strict=True))


def _kinds(sent: bytes, start: int, raws: Sequence[bytes]) -> list[Kind]:
    """The kinds of all items. What is in them is checked when they are read."""
    try:
        return _decode_kinds.decode(sent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [decode(decode_kind, raw, f"input[{index}]") for index, raw in enumerate(raws, start)]


def _referred(item: str, where: str, past: Past) -> bytes:
    raw = past.item(RESPONSE_PREFIX + (issuer(item) or ""), item)
    if raw is None:
        message = f"{item!r} is no output item of this session: send the item itself"
        raise CallError("not_found", message, param=where)
    return raw


def issuer(item: str | None) -> str | None:
    """The turn that an item's id names, where the id looks like one of ours."""
    found = _OUR_ID.fullmatch(item) if item else None
    return found[1] if found else None
