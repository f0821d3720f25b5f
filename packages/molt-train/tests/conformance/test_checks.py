"""A sound recording passes, and each thing that can be wrong with one is named."""

import msgspec
import pytest

from molt.train.conformance.cell import Cell
from molt.train.conformance.checks import problems_of
from molt.train.conformance.endpoint import EngineCall
from molt.train.records.recording import Recording
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory

CELL = Cell(client="c", wire="chat", replies=("first", "second"), drive=lambda cell, session: None)


def turn(name, parent, before, **changes):
    values = {
        "turn_id": name,
        "session_id": "s",
        "wire": "chat",
        "parent_turn_id": parent,
        "opened_by": None if parent else "start",
        "response_id": "r",
        "status": "delivered",
        "adopted": True,
        "auxiliary": False,
        "finish_reason": "stop",
        "prompt_length": before + 2,
        "context_ids": [before + 1, before + 2],
        "token_ids": [before + 3, before + 4],
        "logprobs": [-0.5, -0.25],
        "versions": [0, 0],
        **changes,
    }
    return Turn(**values)


def recording(*turns):
    segments = build_trajectory("s", list(turns)).segments
    return Recording(session_id="s", state="open", turns=list(turns), segments=segments, counters={})


FIRST, SECOND = turn("t1", None, 0), turn("t2", "t1", 4)
CALLS = {
    "t1": EngineCall(request_id="t1", prompt_token_ids=[1, 2], token_ids=[3, 4], logprobs=[-0.5, -0.25]),
    "t2": EngineCall(request_id="t2", prompt_token_ids=[1, 2, 3, 4, 5, 6], token_ids=[7, 8], logprobs=[-0.5, -0.25]),
}


def test_a_sound_recording_has_no_problem():
    assert list(problems_of(recording(FIRST, SECOND), CALLS, CELL)) == []


def test_a_side_call_is_no_problem():
    side = turn("t3", None, 0, auxiliary=True)
    calls = {**CALLS, "t3": msgspec.structs.replace(CALLS["t1"], request_id="t3")}
    assert list(problems_of(recording(FIRST, SECOND, side), calls, CELL)) == []


@pytest.mark.parametrize(
    ("turns", "calls", "problem"),
    [
        ([FIRST], CALLS, "1 turns were recorded, fewer than 2"),
        ([FIRST, SECOND], {"t1": CALLS["t1"]}, "turn t2 is not in the engine's log"),
        (
            [FIRST, turn("t2", "t1", 4, context_ids=[5, 9])],
            CALLS,
            "turn t2 is not what the engine was given and gave",
        ),
        (
            [FIRST, turn("t2", "t1", 4, logprobs=[-0.5, -0.5])],
            CALLS,
            "turn t2 is not what the engine was given and gave",
        ),
        ([FIRST, turn("t2", "t1", 4, wire="messages")], CALLS, "turn t2 came over the wire messages"),
        ([FIRST, turn("t2", "t1", 4, status="aborted")], CALLS, "turn t2 was aborted, adopted: True"),
        (
            [FIRST, turn("t2", None, 0, opened_by="history_rewritten")],
            {**CALLS, "t2": CALLS["t1"]},
            "one trained segment was expected, not start (trained), history_rewritten (trained)",
        ),
        ([], CALLS, "one trained segment was expected, not none"),
    ],
)
def test_what_is_wrong_is_named(turns, calls, problem):
    assert problem in list(problems_of(recording(*turns), calls, CELL))


def test_the_audits_violations_are_problems():
    sound = recording(FIRST, SECOND)
    (segment,) = sound.segments
    broken = msgspec.structs.replace(segment, token_ids=[9] * len(segment.token_ids))
    found = list(problems_of(msgspec.structs.replace(sound, segments=[broken]), CALLS, CELL))
    assert any("its tokens are not those of its turns" in problem for problem in found)
