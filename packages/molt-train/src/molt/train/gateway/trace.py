"""The durable half of the sessions: every turn is in a file before its client has seen the end of the reply.

The log is a folder of numbered segments, each a file of records that are only ever appended:

    length, CRC-32 (both little-endian u32), then that many bytes of MessagePack: a turn, or what became of one

A turn is handed to the operating system when its call returns, so that it survives the death of the process; it is
not synced, so the last seconds may be lost with the power. Once the ledger has the recording of a session, which it
does sync, its turns are needed no more; a segment goes when that is true of all that it holds. Reading a segment stops
at the first record that is torn or damaged: whatever stands before it is whole.
"""

import asyncio
import logging
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from molt.train.gateway.turns import Frame, TurnNode, TurnTree
from molt.train.records.turn import Turn, TurnStatus

MARK_S = 0.05
"""How long what became of a turn may wait for the write of another turn."""
SEGMENT_BYTES = 64 * 1024 * 1024
"""A segment that is longer is followed by the next."""
logger = logging.getLogger(__name__)
_HEAD = struct.Struct("<II")
_SUFFIX = ".trace"
_LIVE = ("parent", "twin", "seed", "num_drawn")
"""What means something in the tree only."""
_STORED = tuple(name for name in TurnNode.__struct_fields__ if name not in _LIVE)
_stored_of = attrgetter(*_STORED)


class _TurnRecord(msgspec.Struct, tag="turn"):
    session_id: str
    parent_turn_id: str | None
    values: tuple[Any, ...]
    """Of the fields `_STORED`, in that order."""


class _MarkRecord(msgspec.Struct, tag="mark"):
    session_id: str
    turn_id: str
    status: TurnStatus
    continued: bool


_Record = _TurnRecord | _MarkRecord
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Record)


class TraceLog:
    """The log of one server."""

    def __init__(self, folder: Path) -> None:
        """Begin a log in `folder`, which exists and holds none: what an earlier server left was taken out."""
        self._folder = folder
        self._num_segments = 0
        self._segments: list[_Segment] = []
        self._marks: list[_MarkRecord] = []
        """Not written yet."""
        self._timer: asyncio.TimerHandle | None = None

    def of(self, session_id: str) -> "Trace":
        """Where a session's turns are kept."""
        return Trace(self, session_id)

    def append(self, record: _TurnRecord) -> None:
        """Append to the last segment. Raises OSError: the disk is full or gone, and the log as it was before."""
        self._write([*self._marks, record])

    def append_soon(self, record: _MarkRecord) -> None:
        """Append with the next turn, or in `MARK_S` seconds: half as many writes, and a turn's end is safe already."""
        self._marks.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MARK_S, self._write_marks)

    def _write_marks(self) -> None:
        self._timer = None
        try:
            self._write(self._marks)
        except OSError as error:
            logger.warning("what became of %d turns cannot be kept: %s", len(self._marks), error)

    def _write(self, records: Sequence[_Record]) -> None:
        if not self._segments or self._segments[-1].size > SEGMENT_BYTES:
            self._num_segments += 1
            self._segments.append(_Segment(self._folder / f"{self._num_segments:08d}{_SUFFIX}"))
        self._segments[-1].append(records)
        self._marks = []

    def discard(self, session_id: str) -> None:
        """A session's turns are needed no more."""
        self._marks = [record for record in self._marks if record.session_id != session_id]
        for segment in self._segments:
            segment.sessions.discard(session_id)
            if not segment.sessions:
                segment.empty()
        for segment in [segment for segment in self._segments[:-1] if not segment.sessions]:
            segment.delete()
            self._segments.remove(segment)

    def close(self) -> None:
        """Close the files; those that hold nothing go."""
        if self._timer:
            self._timer.cancel()
            self._write_marks()
        for segment in self._segments:
            segment.close()
            if not segment.sessions:
                segment.delete()
        self._segments.clear()


class Trace:
    """Keeps the turns of one session in a log: a `TurnSink`."""

    def __init__(self, log: TraceLog, session_id: str) -> None:
        self._log, self._session_id = log, session_id

    def add(self, node: TurnNode) -> None:
        """See `TurnSink.add`."""
        parent_id = node.parent.turn_id if node.parent else None
        self._log.append(_TurnRecord(self._session_id, parent_id, _stored_of(node)))

    def mark(self, turn_id: str, *, status: TurnStatus, continued: bool) -> None:
        """See `TurnSink.mark`."""
        self._log.append_soon(_MarkRecord(self._session_id, turn_id, status, continued))

    def discard(self) -> None:
        """They are needed no more."""
        self._log.discard(self._session_id)


class _Segment:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.sessions: set[str] = set()
        """Whose turns in it are still needed."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def append(self, records: Sequence[_Record]) -> None:
        data = b""
        for record in records:
            body = _encode(record)
            data += _HEAD.pack(len(body), zlib.crc32(body)) + body
        if os.write(self._file, data) != len(data):
            os.ftruncate(self._file, self.size)
            raise OSError(f"{self.path}: only a part of a record could be written: the disk is full")
        self.size += len(data)
        for record in records:
            self.sessions.add(record.session_id)

    def empty(self) -> None:
        os.ftruncate(self._file, 0)
        self.size = 0

    def close(self) -> None:
        os.close(self._file)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def read_traces(folder: Path) -> dict[str, list[Turn]]:
    """The turns of every session in a log, as far as it is whole."""
    trees: defaultdict[str, TurnTree] = defaultdict(TurnTree)
    nodes: dict[str, TurnNode] = {}
    for path in sorted(folder.glob("*" + _SUFFIX)):
        for record in _records(path.read_bytes()):
            if isinstance(record, _MarkRecord):
                if node := nodes.get(record.turn_id):
                    node.status, node.continued = record.status, record.continued
                continue
            fields: dict[str, Any] = dict(zip(_STORED, record.values, strict=True))
            fields |= {"frame": msgspec.convert(fields["frame"], Frame), "off_policy": tuple(fields["off_policy"])}
            node = TurnNode(parent=nodes[record.parent_turn_id] if record.parent_turn_id else None, **fields)
            nodes[node.turn_id] = node
            trees[record.session_id].nodes.append(node)
    return {session_id: tree.turns(session_id) for session_id, tree in trees.items()}


def delete_traces(folder: Path) -> None:
    """Delete a log that nobody writes."""
    for path in folder.glob("*" + _SUFFIX):
        path.unlink()


def _records(data: bytes) -> Iterator[_Record]:
    start = 0
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        body = data[start + _HEAD.size : start + _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        yield _decoder.decode(body)
        start += _HEAD.size + length
