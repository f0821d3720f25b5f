"""What must hold of the recording of a client that did the task."""

from collections.abc import Iterator, Mapping

from molt.train.audit import audit_recordings
from molt.train.config import Config
from molt.train.conformance.cell import Cell
from molt.train.conformance.endpoint import EngineCall
from molt.train.records.recording import Recording
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn


def main_segments(recording: Recording) -> list[Segment]:
    """Those of the conversation itself: no side calls."""
    auxiliary = {turn.turn_id for turn in recording.turns if turn.auxiliary}
    return [segment for segment in recording.segments if not auxiliary.intersection(segment.turn_ids)]


def problems_of(recording: Recording, calls: Mapping[str, EngineCall], cell: Cell) -> Iterator[str]:
    """What is wrong with a recording, in words. `calls` is the engine's log by request."""
    if len(recording.turns) < len(cell.replies):
        yield f"{len(recording.turns)} turns were recorded, fewer than {len(cell.replies)}"
    rows: dict[str | None, list[int]] = {None: []}
    for turn in recording.turns:
        rows[turn.turn_id] = [*rows[turn.parent_turn_id], *turn.context_ids, *turn.token_ids]
        for problem in _problems_of_turn(turn, rows[turn.turn_id], calls.get(turn.turn_id), cell):
            yield f"turn {turn.turn_id} {problem}"
    segments = main_segments(recording)
    if len(segments) != 1 or not segments[0].trained:
        opened = [f"{segment.opened_by} ({segment.untrained_reason or 'trained'})" for segment in segments]
        yield f"one trained segment was expected, not {', '.join(opened) or 'none'}"
    yield from audit_recordings([recording], Config()).violations


def _problems_of_turn(turn: Turn, row: list[int], call: EngineCall | None, cell: Cell) -> Iterator[str]:
    if call is None:
        yield "is not in the engine's log"
    elif row != call.prompt_token_ids + call.token_ids or turn.logprobs != call.logprobs:
        yield "is not what the engine was given and gave"
    if turn.wire != cell.wire:
        yield f"came over the wire {turn.wire}"
    if turn.status != "delivered" or not turn.adopted:
        yield f"was {turn.status}, adopted: {turn.adopted}"
