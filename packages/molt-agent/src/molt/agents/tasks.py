"""Task rows from a JSONL file."""

from pathlib import Path
from typing import Any

import msgspec

from molt.agents.errors import TaskError


def read_tasks(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the first `limit` rows, or all; empty lines are skipped.

    Raises:
        TaskError: The file cannot be read or has no rows, or a line is no JSON object; names file and line.
    """
    rows: list[dict[str, Any]] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(rows) == limit:
                    break
                text = line.removeprefix(b"\xef\xbb\xbf").strip()
                if text:
                    rows.append(_row(text, f"{path}, line {number}"))
    except OSError as exc:
        raise TaskError(f"{path}: {exc.strerror or exc}") from exc
    if not rows:
        raise TaskError(f"{path}: no task rows: write one JSON object a line")
    return rows


def _row(text: bytes, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.ValidationError:
        raise TaskError(f"{where}: not a JSON object: {text[:60].decode(errors='replace')}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise TaskError(f"{where}: not JSON: {exc}") from None
