"""The matrix as people and programs read it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

MAX_NOTE_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one cell ended, or that its client is not there."""

    client: str
    version: str = ""
    wire: str = ""
    result: Literal["pass", "fail", "not installed"]
    turns: int | None = None
    forks: int | None = None
    """Segments of the conversation beyond its first: where what the client sent back did not continue the record."""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def format_table(rows: Sequence[Row]) -> str:
    """Aligned columns, one line a row."""
    head = ["client", "version", "wire", "result", "turns", "forks", "note"]
    lines = [head, *([_text(value) for value in row.as_dict().values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _text(value: object) -> str:
    return "" if value is None else str(value)[:MAX_NOTE_CHARS]
