"""What a payload record holds: the turns and segments of one recording, in columns.

A frame is MessagePack: [turns, segments]. Each of the two is a table, field name -> column, in the order of the rows.
Most columns are lists of values. Those of tokens are [length of each row, encoding, data], the data being that of all
rows one after the other, little-endian:

    i4, i8    integers
    f4, f8    a bit for each value, which is 1 where it is not 0.0, then these values; f4 where that loses nothing
    bits      a bit for each value
    runs      [value, how often, value, how often, ...], of integers and nil
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn

_Column = tuple[str, Any]
"""Encoding and data."""
_Row = TypeVar("_Row", Turn, Segment)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[dict[str, Any], dict[str, Any]]).decode


def encode_frame(turns: Sequence[Turn], segments: Sequence[Segment]) -> bytes:
    """The bytes of a recording. Segments are kept whole, though their tokens are those of turns: an audit compares."""
    return _encode((_table(Turn, turns), _table(Segment, segments)))


def decode_frame(data: bytes) -> tuple[list[Turn], list[Segment]]:
    """Turns and segments, equal to those that were encoded."""
    turns, segments = _decode(data)
    return _rows(Turn, turns), _rows(Segment, segments)


def _table(kind: type[_Row], rows: Sequence[_Row]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        column = list(map(attrgetter(name), rows))
        encode = _ENCODERS.get(name)
        if encode is not None:
            lengths = list(map(len, column))
            column = [lengths, *encode(column, sum(lengths))]
        table[name] = column
    return table


def _rows(kind: type[_Row], table: dict[str, Any]) -> list[_Row]:
    columns = (_split(*column) if name in _ENCODERS else column for name, column in table.items())
    return [kind(**dict(zip(table, values, strict=True))) for values in zip(*columns, strict=True)]


def _split(lengths: list[int], encoding: str, data: Any) -> list[list[Any]]:
    total = sum(lengths)
    values = _runs_out(data) if encoding == "runs" else _DECODERS[encoding](data, total)
    if len(values) != total:
        raise ValueError(f"a column of {total} numbers holds {len(values)}")
    if len(lengths) == 1:
        return [values]
    return [values[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _ints(rows: Iterable[Sequence[int]], total: int) -> _Column:
    try:
        return "i4", np.fromiter(chain.from_iterable(rows), "<i4", total).tobytes()
    except OverflowError:
        return "i8", np.fromiter(chain.from_iterable(rows), "<i8", total).tobytes()


def _floats(rows: Iterable[Sequence[float]], total: int) -> _Column:
    values = np.fromiter(chain.from_iterable(rows), "<f8", total)
    # By its bits, so that -0.0 is kept.
    is_there = values.view("<i8") != 0
    present = values[is_there]
    with np.errstate(over="ignore"):
        single = present.astype("<f4")
    bits = np.packbits(is_there).tobytes()
    if (single == present).all():
        return "f4", bits + single.tobytes()
    return "f8", bits + present.tobytes()


def _bits(rows: Iterable[Sequence[int]], total: int) -> _Column:
    try:
        values = np.frombuffer(bytes(chain.from_iterable(rows)), np.uint8)
    except ValueError:
        return _ints(rows, total)
    return ("bits", np.packbits(values).tobytes()) if values.max(initial=0) <= 1 else _ints(rows, total)


def _runs(rows: Iterable[Sequence[int | None]], total: int) -> _Column:  # noqa: ARG001 - as the other encoders
    groups = groupby(chain.from_iterable(rows))
    return "runs", list(chain.from_iterable((value, len(list(group))) for value, group in groups))


def _runs_out(data: list[int | None]) -> list[int | None]:
    values: list[int | None] = []
    for value, times in zip(data[::2], data[1::2], strict=True):
        values += [value] * (times or 0)
    return values


def _floats_out(data: bytes, total: int, kind: str) -> list[float]:
    num_bytes = (total + 7) // 8
    is_there = np.unpackbits(np.frombuffer(data, np.uint8, num_bytes), count=total).view(bool)
    present = np.frombuffer(data, kind, offset=num_bytes)
    values = np.zeros(total)
    values[is_there] = present
    return values.tolist()


def _bits_out(data: bytes, total: int) -> list[int]:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=total).tolist()


_ENCODERS: dict[str, Callable[[Sequence[Any], int], _Column]] = {
    "context_ids": _ints,
    "token_ids": _ints,
    "action_mask": _bits,
    "logprobs": _floats,
    "versions": _runs,
}
"""By the name of the field, in turns and segments alike."""

_DECODERS: dict[str, Callable[[bytes, int], list[Any]]] = {
    "i4": lambda data, _: np.frombuffer(data, "<i4").tolist(),
    "i8": lambda data, _: np.frombuffer(data, "<i8").tolist(),
    "f4": lambda data, total: _floats_out(data, total, "<f4"),
    "f8": lambda data, total: _floats_out(data, total, "<f8"),
    "bits": _bits_out,
}
