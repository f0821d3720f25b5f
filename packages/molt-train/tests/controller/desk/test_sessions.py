# ruff: noqa: TID252 - the folders of tests are no installed package
"""What sessions recorded: in the ledger, and no longer in memory."""

import gc
import tracemalloc

import msgspec
import pytest

from molt.agents.protocol import SamplingParams, SessionRequest, SessionResult
from molt.train.controller.results import recording_of
from molt.train.gateway.sessions import Sessions
from molt.train.gateway.trace import TraceLog
from molt.train.gateway.turns import Frame, TurnNode, pack, pack_floats
from molt.train.server import ApiError
from molt.train.trajectory import DEFAULT_RULES

from .reports import ASK, done

TURN = TurnNode(
    **dict.fromkeys(("turn_id", "response_id", "root_id"), "t"),
    **dict.fromkeys(("context_ids", "token_ids", "versions"), pack([5])),
    **dict.fromkeys(("sampling", "client"), b"{}"),
    wire="chat",
    parent=None,
    opened_by="start",
    frame=Frame(0, b"", has_tools=False),
    request=1,
    off_policy=(),
    prompt_length=1,
    logprobs=pack_floats([-0.5]),
    finish_reason="stop",
)


async def test_old_sessions_leave_memory_and_are_read_from_the_ledger(make_desk, call_model, sessions):
    desk = make_desk(max_closed_sessions=2)
    ids = [desk.open_session(SessionRequest()).session_id for _ in range(4)]
    for session_id in ids:
        call_model(session_id)
        await desk.finish_session(session_id, SessionResult(reward=1))
    assert [sessions.get(session_id) is not None for session_id in ids] == [False, False, True, True]
    assert [desk.recording(session_id).turns[0].session_id for session_id in ids] == ids
    assert (await desk.finish_session(ids[0], SessionResult(reward=1))).reason == "the session has its result already"


async def test_closing_keeps_what_open_sessions_recorded_and_takes_no_more(desk, open_group, call_model, sessions):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    own = desk.open_session(SessionRequest())
    ids = [lease.session.session_id, own.session_id]
    for session_id in ids:
        call_model(session_id)
    await desk.close()
    assert [sessions.get(session_id).state for session_id in ids] == ["closed", "closed"]
    assert [desk.recording(session_id).turns[0].token_ids for session_id in ids] == [[7, 8], [7, 8]]
    for refused in (desk.report(lease.lease_id, done()), desk.finish_session(own.session_id, SessionResult(reward=1))):
        with pytest.raises(ApiError, match="stopping") as caught:
            await refused
        assert caught.value.status == 503, "so that it is sent again, to the server that follows"
    assert (await desk.lease(ASK)).finished


async def test_what_a_dead_server_had_recorded_is_in_the_ledger(desk, tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    log = TraceLog(traces)
    trace = log.of("dead")
    trace.add(TURN)
    trace.mark("t", status="delivered", continued=False)
    log.close()
    assert desk.rescue(traces) == 1
    assert desk.rescue(traces) == 0, "the file is gone"
    recording = desk.recording("dead")
    assert recording.state == "closed"
    assert [(turn.token_ids, turn.status) for turn in recording.turns] == [([5], "delivered")]
    assert [segment.token_ids for segment in recording.segments] == [[5, 5]]


async def test_a_trace_goes_when_the_ledger_has_the_recording(make_desk, sessions, tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    sessions._traces = TraceLog(traces)
    desk = make_desk()
    opened = desk.open_session(SessionRequest())
    sessions.get(opened.session_id).trace.add(TURN)
    assert [path.stat().st_size > 0 for path in traces.iterdir()] == [True]
    await desk.finish_session(opened.session_id, SessionResult(outcome="completed", reward=1.0))
    assert [path.stat().st_size for path in traces.iterdir()] == [0]
    assert desk.recording(opened.session_id).state == "closed"


def long_turn(num_tokens):
    """A delivered turn of so many sampled tokens; none of its bytes is shared with another's."""
    turn = msgspec.structs.replace(TURN, status="delivered", token_ids=pack(list(range(num_tokens))))
    turn.logprobs, turn.versions = pack_floats([-0.5] * num_tokens), pack([3] * num_tokens)
    return turn


async def kept_bytes(desk, sessions, num_tokens):
    """What stays in memory of twenty sessions that were finished, in bytes."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20):
        opened = desk.open_session(SessionRequest())
        sessions.get(opened.session_id).tree.add(long_turn(num_tokens))
        assert (await desk.finish_session(opened.session_id, SessionResult(reward=1.0))).accepted
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


async def test_what_stays_of_closed_sessions_does_not_depend_on_what_they_recorded(desk, sessions):
    """A token costs 16 bytes in a turn, so twenty of 20,000 tokens would be 6 MB."""
    tracemalloc.start()
    try:
        await kept_bytes(desk, sessions, 1)  # what is allocated once
        short, long = await kept_bytes(desk, sessions, 1), await kept_bytes(desk, sessions, 20_000)
    finally:
        tracemalloc.stop()
    assert long < short + 1_000_000
    assert short < 20 * 10_000


async def test_a_closed_session_holds_nothing_that_was_recorded():
    sessions = Sessions()
    session, key = sessions.open(sampling=SamplingParams(), policy="client", metadata={"task": "x" * 1000})
    session.tree.add(TURN)
    session.count("forks")
    await sessions.close(session.session_id)
    sessions.release(session.session_id)
    assert recording_of(session, DEFAULT_RULES).turns == []
    assert (session.counters, session.metadata, session.trace) == ({}, {}, None)
    assert session.accepts(key)
    assert session.state == "closed"


async def test_a_lease_that_was_reported_leaves_nothing_in_memory_but_its_name(desk, open_group, call_model, sessions):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    session = sessions.get(lease.session.session_id)
    session.tree.add(TURN)
    assert (await desk.report(lease.lease_id, done())).accepted
    assert session.tree.nodes == []
    assert len(desk.recording(lease.session.session_id).turns) == 1
