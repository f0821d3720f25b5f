"""`metrics.jsonl`: one JSON object an update, in order, readable while the run goes on."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec


class Journal:
    """Appends to a journal; each object is in the file when `append` returns.

    Opening a file that a killed process left behind drops the torn line at its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = read_journal(path) if path.exists() else []
        self._replace(rows)
        self._file = path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one update. A value that is not finite becomes null."""
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Force what was appended to the disk: afterwards no loss of power takes it."""
        os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop the updates after `step`: a run resumed from that checkpoint makes them again."""
        self._file.close()
        self._replace([row for row in read_journal(self.path) if row["step"] <= step])
        self._file = self.path.open("ab")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        # Through a second file: a reader, or a crash in between, finds the old journal or the new one.
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.writelines(_line(row) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The updates in `path`. A last line without its end, still being written or torn by a kill, is left out.

    Raises:
        ValueError: Another line is not a JSON object; the message names file and line.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number} is not a JSON object: {error}") from None
    return rows


def _line(row: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(dict(row)) + b"\n"
