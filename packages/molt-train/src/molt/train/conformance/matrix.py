"""Run the matrix, cell by cell, and check what was recorded of each."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from molt.train.conformance.cell import FINAL_TEXT, Cell
from molt.train.conformance.checks import main_segments, problems_of
from molt.train.conformance.endpoint import Endpoint, scripted_gateway
from molt.train.conformance.harnesses import HARNESSES, agent_module, can_work
from molt.train.conformance.sdks import DISTRIBUTIONS, sdk_cells, sdk_version
from molt.train.conformance.table import Row
from molt.train.errors import ConfigError

CLIENTS = (*DISTRIBUTIONS, *(harness.name for harness in HARNESSES))


def run_conformance(*, client: str | None, python: Path) -> Iterator[Row]:
    """Run every cell, or those of one client; yields how each ended.

    Args:
        client: One of `CLIENTS`; dashes count as underscores in the names of harnesses. None: all of them.
        python: The interpreter of the environment that agents run in. Commands are looked up beside it, too.

    Raises:
        ConfigError: There is no such client.
        MoltError: The gateway does not start.
    """
    wanted = CLIENTS if client is None else tuple(name for name in CLIENTS if client in (name, name.replace("_", "-")))
    if not wanted:
        raise ConfigError(f"--harness {client!r} is not one of {', '.join(CLIENTS)}")
    cells, absent = _installed(wanted, python)
    if cells:
        with tempfile.TemporaryDirectory(prefix="molt-") as scratch:
            script = b"\n".join(msgspec.json.encode(line) for line in _script([cell for cell, _ in cells]))
            with scripted_gateway(Path(scratch), script) as endpoint:
                for cell, version in cells:
                    yield _run(cell, version, endpoint)
    yield from absent


def _installed(wanted: tuple[str, ...], python: Path) -> tuple[list[tuple[Cell, str]], list[Row]]:
    """The cells to run, with the version of their client, and the rows of clients that are not there."""
    cells: list[tuple[Cell, str]] = []
    absent: list[Row] = []
    for cell in sdk_cells():
        if cell.client in wanted:
            version = sdk_version(cell.client)
            if version:
                cells.append((cell, version))
            elif cell.client not in {row.client for row in absent}:
                absent.append(Row(client=cell.client, result="not installed"))
    works = can_work(python)
    for harness in HARNESSES:
        if harness.name in wanted:
            version, agent = harness.version(python), agent_module(harness.name)
            if not works:
                absent.append(_absent(harness.name, f"molt-agent is not installed for {python}"))
            elif agent is None:
                absent.append(_absent(harness.name, "its example is not installed"))
            elif version is None:
                absent.append(_absent(harness.name, ""))
            else:
                cells.append((harness.cell(python, agent), version))
    return cells, absent


def _absent(client: str, note: str) -> Row:
    return Row(client=client, result="not installed", note=note)


def _script(cells: list[Cell]) -> Iterator[dict[str, str]]:
    for cell in cells:
        for reply in cell.replies:
            yield {"match": re.escape(f"[{cell.name}]"), "text": reply}
    yield {"text": FINAL_TEXT}


def _run(cell: Cell, version: str, endpoint: Endpoint) -> Row:
    session, problems = endpoint.open_session(), list[str]()
    try:
        cell.drive(cell, session)
    except Exception as error:  # noqa: BLE001 - whatever a client raises is its result
        problems.append(" ".join(f"{type(error).__name__}: {error}".split()))
    recording = endpoint.recording(session.session_id)
    problems += problems_of(recording, endpoint.engine_calls(), cell)
    main = main_segments(recording)
    return Row(
        client=cell.client,
        version=version,
        wire=" ".join(part for part in (cell.wire, cell.mode) if part),
        result="fail" if problems else "pass",
        turns=len(recording.turns),
        forks=max(0, len(main) - 1),
        note="; ".join(problems),
    )
