"""Sessions that no worker drives: they may rest, outlive their server, and expire."""

import asyncio

import pytest

from molt.agents.protocol import LeaseRequest, SamplingParams, SessionRequest, SessionResult
from molt.train.errors import LedgerFullError, PayloadDamagedError
from molt.train.gateway.sessions import Session
from molt.train.server import ApiError

ASK = LeaseRequest(worker_id="w", capacity=8, wait_s=0.0)
ONE = SessionResult(reward=1.0)


async def test_sessions_of_one_key_become_a_group_of_the_runs_size(desk, call_model, pool):
    request = SessionRequest(group="ticket-1", task={"q": "?"}, sampling_policy="client", metadata={"user": 1})
    for reward in (0.0, 1.0):
        session = desk.open_session(request)
        call_model(session.session_id)
        assert pool.num_ready == 0
        assert (await desk.finish_session(session.session_id, SessionResult(reward=reward))).accepted
    [group] = pool.take(1)
    assert group.task_id == "ticket-1"
    assert [r.outcome.reward for r in group.rollouts] == [0.0, 1.0]
    assert [len(r.experiences) for r in group.rollouts] == [1, 1]


async def test_a_session_without_a_key_is_recorded_only(desk, call_model, pool, sessions):
    session = desk.open_session(SessionRequest())
    assert sessions.get(session.session_id).policy == "enforce"
    call_model(session.session_id)
    assert (await desk.finish_session(session.session_id, SessionResult(reward=0.5))).accepted
    assert pool.num_ready == 0
    assert desk.recording(session.session_id).turns[0].token_ids == [7, 8]
    [result] = pool.ledger.results()
    assert (result.counted, result.rollout_id, result.outcome.reward) == (False, None, 0.5)


async def test_a_session_takes_one_result_and_only_its_own(desk, open_group):
    session = desk.open_session(SessionRequest())
    replies = await asyncio.gather(*(desk.finish_session(session.session_id, SessionResult(reward=1)) for _ in "ab"))
    assert [reply.accepted for reply in replies] == [True, False]
    again = await desk.finish_session(session.session_id, SessionResult(reward=1))
    assert (again.accepted, again.reason) == (False, "the session has its result already")
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    foreign = await desk.finish_session(lease.session.session_id, SessionResult(reward=1))
    assert (foreign.accepted, "belongs to a lease" in foreign.reason) == (False, True)


async def test_an_unknown_session_is_not_found(desk):
    with pytest.raises(ApiError, match="session 'x' is unknown") as of_result:
        await desk.finish_session("x", SessionResult(reward=1))
    with pytest.raises(ApiError, match="session 'x' is unknown") as of_recording:
        desk.recording("x")
    assert of_result.value.status == of_recording.value.status == 404


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(max_tokens=0), "sampling_params.max_tokens"),
        (SamplingParams(temperature=-1.0), "sampling_params.temperature"),
        (SamplingParams(top_p=0.0), "sampling_params.top_p"),
        (SamplingParams(top_p=1.5), "sampling_params.top_p"),
    ],
)
async def test_sampling_that_cannot_be_is_refused(desk, sampling, param):
    with pytest.raises(ApiError, match="it must be") as caught:
        desk.open_session(SessionRequest(sampling_params=sampling))
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_a_session_that_is_not_called_any_more_rests_and_its_result_still_counts(
    desk, call_model, clock, pool, sessions
):
    session_id = desk.open_session(SessionRequest(group="k", task={"q": 1})).session_id
    clock.now = 60.0
    call_model(session_id)
    clock.now = 159.0
    await desk.expire()
    assert sessions.get(session_id).state == "open"
    clock.now = 160.0
    await desk.expire()
    session = sessions.get(session_id)
    assert (session.state, session.closed_because) == ("closed", "it was not called for 100 s")
    assert pool.ledger.session(session_id).state == "idle"
    assert desk.recording(session_id).turns[0].token_ids == [7, 8]
    assert desk.status()["self_driven_sessions"].idle == 1
    for reward in (0.0, 1.0):
        other = desk.open_session(SessionRequest(group="k")).session_id if reward else session_id
        assert (await desk.finish_session(other, SessionResult(reward=reward))).accepted
    [group] = pool.take(1)
    assert [(len(r.experiences), r.outcome.reward) for r in group.rollouts] == [(1, 0.0), (0, 1.0)]
    assert pool.ledger.session(session_id).state == "closed"
    assert pool.ledger._db.execute("SELECT count(*) FROM recordings").fetchone() == (2,), "each session's, once"
    again = await desk.finish_session(session_id, ONE)
    assert (again.accepted, again.repeated, again.reason) == (False, True, "the session has its result already")


async def test_a_session_rests_not_while_a_call_runs(desk, clock, sessions):
    session_id = desk.open_session(SessionRequest()).session_id
    session = sessions.get(session_id)
    session.begun(session)
    clock.now = 10_000.0
    await desk.expire()
    assert session.state == "open"
    session.ended(session)
    clock.now += 99.0
    await desk.expire()
    assert session.state == "open"
    clock.now += 1.0
    await desk.expire()
    assert session.state == "closed"


async def test_open_sessions_are_not_looked_at_before_they_can_be_idle(desk, clock, sessions, monkeypatch):
    first, second = (desk.open_session(SessionRequest()).session_id for _ in "ab")
    looked_at = []
    quiet_s = Session.quiet_s
    monkeypatch.setattr(Session, "quiet_s", lambda self: looked_at.append(self.session_id) or quiet_s(self))
    clock.now = 99.0
    await desk.expire()
    assert looked_at == []
    sessions.get(first).begun(first)
    sessions.get(first).ended(first)
    clock.now = 100.0
    await desk.expire()
    assert set(looked_at) == {first, second}
    assert [sessions.get(session_id).state for session_id in (first, second)] == ["open", "closed"]
    looked_at.clear()
    clock.now = 198.0
    await desk.expire()
    assert looked_at == []
    clock.now = 199.0
    await desk.expire()
    assert sessions.get(first).state == "closed"


async def test_sessions_that_a_full_disk_kept_open_rest_when_there_is_room(desk, clock, pool, sessions, monkeypatch):
    session_ids = [desk.open_session(SessionRequest()).session_id for _ in "ab"]
    clock.now = 100.0
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "add_recording", full)
        for _ in "12":
            with pytest.raises(LedgerFullError):
                await desk.expire()
    await desk.expire()
    assert [pool.ledger.session(session_id).state for session_id in session_ids] == ["idle", "idle"]


@pytest.mark.parametrize("group", [None, "k"])
async def test_a_session_without_a_result_expires_and_takes_no_place(desk, call_model, clock, pool, group):
    session_id = desk.open_session(SessionRequest(group=group)).session_id
    call_model(session_id)
    for now in (100.0, 999.0):
        clock.now = now
        await desk.expire()
    assert pool.ledger.session(session_id).state == "idle"
    clock.now = 1000.0  # since the last call, not since it rests
    await desk.expire()
    assert pool.ledger.session(session_id).state == "expired"
    [result] = pool.ledger.results()
    assert (result.counted, result.outcome.kind) == (False, "infrastructure")
    assert result.outcome.error == "no result within 1000 s of the last model call (pool.reward_wait_s)"
    assert list(pool.ledger.groups()) == []
    status = desk.status()["self_driven_sessions"]
    assert (status.open, status.idle, status.closed, status.expired) == (0, 0, 0, 1)
    late = await desk.finish_session(session_id, ONE)
    assert (late.accepted, late.repeated) == (False, False)
    assert late.reason == "the session has expired: no result came within 1000 s"
    assert pool.ledger._db.execute("SELECT count(*) FROM recordings").fetchone() == (1,)


@pytest.mark.parametrize("ends", ["killed", "stopped"])
async def test_a_result_may_come_to_the_next_server(desk, call_model, pool, restart, ends):
    """A server that is killed leaves the turns in its trace, which the next one reads; see `rescue`."""
    first = desk.open_session(SessionRequest(group="k", task={"q": 1})).session_id
    call_model(first)
    assert (await desk.finish_session(first, SessionResult(reward=0.0))).accepted
    second = desk.open_session(SessionRequest(group="k", metadata={"user": 7})).session_id
    call_model(second)
    if ends == "stopped":
        await desk.close()
    else:
        pool.keep_session(desk.recording(second), None)  # what `rescue` does
    pool, desk = restart()
    assert pool.ledger.session(second).state == "idle"
    assert pool.ledger.session(second).metadata == {"user": 7}
    assert desk.status()["self_driven_sessions"].idle == 1
    assert not (await desk.finish_session(first, ONE)).accepted
    assert (await desk.finish_session(second, ONE)).accepted
    [group] = pool.take(1)
    assert [(r.outcome.reward, len(r.experiences)) for r in group.rollouts] == [(0.0, 1), (1.0, 1)]


async def test_the_wait_for_a_result_begins_anew_with_the_next_server(desk, clock, restart):
    session_id = desk.open_session(SessionRequest()).session_id
    clock.now = 900.0
    await desk.expire()
    pool, desk = restart()
    for now, state in ((1004.0, "idle"), (1005.0, "expired")):
        clock.now = now
        await desk.expire()
        assert pool.ledger.session(session_id).state == state


async def test_a_result_and_the_rest_at_once_count_once(desk, call_model, clock, pool):
    session_id = desk.open_session(SessionRequest()).session_id
    call_model(session_id)
    clock.now = 100.0
    reply, _ = await asyncio.gather(desk.finish_session(session_id, ONE), desk.expire())
    assert reply.accepted
    assert pool.ledger.session(session_id).state == "closed"
    assert [r.outcome.reward for r in pool.ledger.results()] == [1.0]
    assert pool.ledger._db.execute("SELECT count(*) FROM recordings").fetchone() == (1,)


async def test_what_a_full_disk_does_not_take_is_not_lost(desk, call_model, clock, pool, monkeypatch):
    session_id = desk.open_session(SessionRequest(group="k")).session_id
    call_model(session_id)
    clock.now = 100.0
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "add_recording", full)
        for attempt in (desk.expire, lambda: desk.finish_session(session_id, ONE)):
            with pytest.raises(LedgerFullError):
                await attempt()
    assert pool.ledger.session(session_id).state == "open"
    assert (await desk.finish_session(session_id, ONE)).accepted
    assert pool.ledger.session(session_id).state == "closed"
    assert len(pool.ledger.recording(session_id).turns) == 1


async def test_no_session_is_opened_on_a_full_disk(desk, disk, pool, sessions, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "add_session", full)
        with pytest.raises(LedgerFullError):
            desk.open_session(SessionRequest())
    assert desk.status()["num_open_sessions"] == 0
    assert not sessions._sessions
    disk.free = 0
    with pytest.raises(ApiError, match="no room on its disk: no sessions are opened") as caught:
        desk.open_session(SessionRequest())
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5.0)


def full(*_args, **_kwargs):
    raise LedgerFullError("no room")


async def test_a_recording_that_cannot_be_read_any_more_makes_no_member(desk, call_model, clock, pool, monkeypatch):
    ids = [desk.open_session(SessionRequest(group="k")).session_id for _ in range(2)]
    for session_id in ids:
        call_model(session_id)
    clock.now = 100.0
    await desk.expire()

    def damaged(_session_id):
        raise PayloadDamagedError("the record is damaged")

    monkeypatch.setattr(pool.ledger, "recording", damaged)
    assert (await desk.finish_session(ids[0], ONE)).accepted
    clock.now = 1000.0
    await desk.expire()
    assert [r.outcome.kind for r in pool.ledger.results()] == ["infrastructure", "infrastructure"]
    assert [pool.ledger.session(session_id).state for session_id in ids] == ["closed", "expired"]
    assert list(pool.ledger.groups()) == []
    assert desk.num_results == 1


async def test_a_full_disk_does_not_keep_a_server_from_stopping(desk, call_model, pool, monkeypatch, caplog):
    session_id = desk.open_session(SessionRequest()).session_id
    call_model(session_id)
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "add_recording", full)
        await desk.close()
    assert f"session {session_id}: what it recorded stays in its trace" in caplog.text
    assert pool.ledger.session(session_id).state == "open", "the next server finds the trace, and lets it rest"
