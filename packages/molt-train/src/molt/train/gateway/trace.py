"""The durable half of a session: every turn is in a file before its client has seen the end of the reply.

A trace is a file a session, `SESSION_ID.trace`, of records that are only ever appended:

    length, CRC-32 (both little-endian u32), then that many bytes of MessagePack: a turn, or what became of one

A record is handed to the operating system when its call returns, so that it survives the death of the process; it is
not synced, so the last second may be lost with the power. Once the ledger has the whole recording, which it does sync,
the trace goes. Reading stops at the first record that is torn or damaged: whatever stands before it is whole.
"""

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec

from molt.train.gateway.turns import Frame, TurnNode, TurnTree
from molt.train.records.turn import Turn, TurnStatus

_HEAD = struct.Struct("<II")
_SUFFIX = ".trace"
_LINKS = ("parent", "twin")
_STORED = tuple(name for name in TurnNode.__struct_fields__ if name not in _LINKS)


class _TurnRecord(msgspec.Struct, tag="turn"):
    parent_turn_id: str | None
    node: dict[str, Any]


class _MarkRecord(msgspec.Struct, tag="mark"):
    turn_id: str
    status: TurnStatus
    continued: bool


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_TurnRecord | _MarkRecord)


class Trace:
    """Appends what one session records."""

    def __init__(self, folder: Path, session_id: str) -> None:
        """Name the file; it is made with the first record. `folder` exists."""
        self._path = folder / (session_id + _SUFFIX)
        self._size = 0

    def add(self, node: TurnNode) -> None:
        """Append a turn.

        Raises:
            OSError: The disk is full or gone; the trace is as it was before.
        """
        fields = {name: getattr(node, name) for name in _STORED}
        self._append(_TurnRecord(node.parent.turn_id if node.parent else None, fields))

    def mark(self, turn_id: str, *, status: TurnStatus, continued: bool) -> None:
        """Append what became of a turn. Raises OSError as `add` does."""
        self._append(_MarkRecord(turn_id, status, continued))

    def discard(self) -> None:
        """Delete the file, if there is one."""
        self._path.unlink(missing_ok=True)

    def _append(self, record: _TurnRecord | _MarkRecord) -> None:
        body = _encode(record)
        data = _HEAD.pack(len(body), zlib.crc32(body)) + body
        # Opened for each record: open sessions may be more than files a process may have open.
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.write(file, data) != len(data):
                os.ftruncate(file, self._size)
                raise OSError(f"{self._path}: only a part of a record could be written: the disk is full")
        finally:
            os.close(file)
        self._size += len(data)


def left_traces(folder: Path) -> list[Path]:
    """Traces of sessions whose recordings never got into the ledger, in the order of their names."""
    return sorted(folder.glob("*" + _SUFFIX))


def session_id_of(path: Path) -> str:
    """The session that a trace is of."""
    return path.name.removesuffix(_SUFFIX)


def read_trace(path: Path) -> list[Turn]:
    """The turns of a session, as far as its trace is whole."""
    tree, nodes = TurnTree(), dict[str, TurnNode]()
    for record in _records(path.read_bytes()):
        if isinstance(record, _MarkRecord):
            node = nodes[record.turn_id]
            node.status, node.continued = record.status, record.continued
            continue
        fields = record.node
        fields |= {"frame": msgspec.convert(fields["frame"], Frame), "off_policy": tuple(fields["off_policy"])}
        node = TurnNode(parent=nodes[record.parent_turn_id] if record.parent_turn_id else None, **fields)
        nodes[node.turn_id] = node
        tree.nodes.append(node)
    return tree.turns(session_id_of(path))


def _records(data: bytes) -> list[_TurnRecord | _MarkRecord]:
    records, start = [], 0
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        body = data[start + _HEAD.size : start + _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            break
        records.append(_decoder.decode(body))
        start += _HEAD.size + length
    return records
