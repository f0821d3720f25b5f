# ruff: noqa: TID252 - the folders of tests are no installed package
import asyncio
import sqlite3

import httpx
import msgspec
import pytest

from molt.agents.control import ControlApi
from molt.agents.errors import FencedError
from molt.agents.protocol import (
    HeartbeatRequest,
    LeaseRequest,
    ReleaseRequest,
    ResultReport,
    SamplingParams,
    SessionRequest,
    SessionResult,
)
from molt.train.config import Config, ModelConfig, PoolConfig, RolloutConfig
from molt.train.controller.results import experiences_into
from molt.train.controller.rollouts import DeskSettings, RolloutDesk
from molt.train.experience import LocalPayloadStore
from molt.train.gateway.sessions import Sessions
from molt.train.gateway.trace import TraceLog
from molt.train.gateway.turns import Frame, TurnNode, pack, pack_floats
from molt.train.observe.metrics import Metrics
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Task
from molt.train.server import ApiError, HttpServer, bind, create_app

from .conftest import one_turn

CONFIG = Config(
    model=ModelConfig(name="tiny"),
    rollout=RolloutConfig(group_size=2, max_tokens=64, temperature=0.7, timeout_s=120.0),
    pool=PoolConfig(max_attempts=2, lease_ttl_s=30.0),
)
ASK = LeaseRequest(worker_id="w", capacity=8, wait_s=0.0)


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


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions():
    return Sessions()


@pytest.fixture
def admitted():
    """What the desk calls before it grants leases; a test adds to it."""
    return []


@pytest.fixture
def pool(tmp_path, clock):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield Pool(ledger, settings=CONFIG.pool, clock=clock, experiences_of=experiences_into(LocalPayloadStore()))
    ledger.close()


@pytest.fixture
def make_desk(pool, sessions, admitted):
    def make(url="http://trainer:1", **changes):
        settings = msgspec.structs.replace(DeskSettings.of(CONFIG, url), **changes)
        return RolloutDesk(
            pool,
            sessions,
            settings=settings,
            experiences_of=experiences_into(LocalPayloadStore()),
            admit=lambda: [hook() for hook in admitted],
            progress=lambda: {"step": 7},
        )

    return make


@pytest.fixture
def desk(make_desk):
    return make_desk()


@pytest.fixture
def open_group(pool):
    def open_one(size=1):
        return pool.open_group(
            Task(task_id="t", data={"q": "1+1"}), kind="train", size=size, position=pool.next_position
        )

    return open_one


@pytest.fixture
def call_model(sessions):
    """Let a session look as if its client had made one model call, of two tokens in and two out."""

    def call(session_id, *, status="delivered"):
        session = sessions.get(session_id)
        assert session.state == "open", "410 Gone"
        turn = msgspec.structs.replace(one_turn(session_id, 3), status=status, logprobs=[-0.1, -0.2], versions=[3, 4])
        session.turns = lambda: [turn]
        session.count("sampling_overridden")

    return call


def done(reward=1.0, *, attempt=1, outcome="completed", **fields):
    return ResultReport(worker_id="w", attempt=attempt, outcome=outcome, reward=reward, **fields)


async def test_a_lease_carries_all_that_an_agent_needs(desk, open_group, sessions):
    open_group()
    reply = await desk.lease(ASK)
    assert (reply.heartbeat_s, reply.finished) == (10.0, False)
    [lease] = reply.leases
    assert (lease.rollout_id, lease.group_id, lease.attempt) == ("g1.0", "g1", 1)
    assert (lease.task, lease.timeout_s) == ({"q": "1+1"}, 120.0)
    assert lease.sampling_params == SamplingParams(max_tokens=64, temperature=0.7)
    credentials = lease.session
    assert credentials.session_url == f"http://trainer:1/s/{credentials.session_id}"
    assert credentials.base_url == f"{credentials.session_url}/v1"
    assert credentials.model_name == "tiny"
    session = sessions.get(credentials.session_id)
    assert session.accepts(credentials.api_key)
    assert session.policy == "enforce"
    assert session.metadata["rollout_id"] == "g1.0"


async def test_a_report_closes_the_session_and_its_turns_become_experiences(
    desk, open_group, call_model, pool, sessions
):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    session_id = lease.session.session_id
    call_model(session_id)
    assert desk.recording(session_id).state == "open"
    reply = await desk.report(lease.lease_id, done(0.75, score=0.5, info={"calls": 2}))
    assert (reply.accepted, reply.reason) == (True, None)
    assert sessions.get(session_id).state == "closed"
    [group] = pool.take(1)
    [rollout] = group.rollouts
    assert (rollout.outcome.reward, rollout.outcome.score, rollout.outcome.info) == (0.75, 0.5, {"calls": 2})
    [experience] = rollout.experiences
    assert (experience.num_actions, experience.oldest_version, experience.newest_version) == (2, 3, 4)
    assert experience.payload.token_ids.tolist() == [5, 6, 7, 8]
    recording = desk.recording(session_id)
    assert recording.state == "closed"
    assert recording.turns[0].token_ids == [7, 8]
    assert recording.segments[0].action_mask == [0, 0, 1, 1]
    assert recording.counters["sampling_overridden"] == 1
    assert recording.counters["turns"] == 1
    assert (desk.num_leases, desk.num_results) == (1, 1)


async def test_undelivered_tokens_are_accounted_for(desk, open_group, call_model, pool):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    call_model(lease.session.session_id, status="undelivered")
    await desk.report(lease.lease_id, done())
    [rollout] = pool.take(1)[0].rollouts
    assert (rollout.delivered_fraction, rollout.experiences) == (0.0, ())


@pytest.mark.parametrize(
    ("report", "kind", "error"),
    [
        (done(None), "failed", "outcome 'completed' without a reward"),
        (done(float("nan")), "failed", "reward is nan, which is no finite number"),
        (done(1.0, score=float("inf")), "failed", "score is inf, which is no finite number"),
        (done(None, outcome="truncated"), "failed", "outcome 'truncated' without a reward"),
        (done(1.0, outcome="timeout", error="too slow"), "timeout", "too slow"),
        (done(1.0, outcome="failed", error="ValueError"), "failed", "ValueError"),
    ],
)
async def test_only_a_finite_reward_of_a_whole_episode_is_a_reward(desk, open_group, pool, report, kind, error):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    assert (await desk.report(lease.lease_id, report)).accepted
    outcome = pool.take(1)[0].rollouts[0].outcome
    assert (outcome.kind, outcome.reward, outcome.score, outcome.error) == (kind, None, None, error)


async def test_an_expired_attempt_is_fenced_its_session_closed_and_its_recording_kept(
    desk, open_group, call_model, clock, pool, sessions
):
    open_group()
    [old] = (await desk.lease(ASK)).leases
    call_model(old.session.session_id)
    clock.now += 31.0
    [expired] = await desk.expire()
    assert (expired.rollout_id, expired.retried) == ("g1.0", True)
    assert sessions.get(old.session.session_id).state == "closed"
    assert desk.recording(old.session.session_id).turns[0].token_ids == [7, 8]
    [new] = (await desk.lease(LeaseRequest(worker_id="other", capacity=1, wait_s=0))).leases
    assert (new.rollout_id, new.attempt) == ("g1.0", 2)
    assert new.session.session_id != old.session.session_id
    late = await desk.report(old.lease_id, done(9.0))
    assert not late.accepted
    assert "is over (expired)" in late.reason
    assert desk.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=(old.lease_id,))).lost == (old.lease_id,)
    call_model(new.session.session_id)
    assert (await desk.report(new.lease_id, done(1.0, attempt=2))).accepted
    assert [r.outcome.reward for r in pool.take(1)[0].rollouts] == [1.0]
    assert desk.recording(old.session.session_id).turns[0].token_ids == [7, 8]
    assert pool.ledger._db.execute("SELECT count(*) FROM recordings").fetchone() == (2,), "each session's, once"


async def test_a_result_from_before_a_restart_is_refused(desk, open_group):
    open_group()
    reply = await desk.report("g1.0.1-0123", done())
    assert (reply.accepted, reply.reason) == (False, "lease 'g1.0.1-0123' is unknown to this run")


async def test_groups_are_admitted_before_leases_are_granted(desk, admitted, open_group):
    admitted.append(open_group)
    assert len((await desk.lease(ASK)).leases) == 1


async def test_a_long_poll_waits_for_work_and_ends_with_the_run(desk, open_group):
    assert (await desk.lease(ASK)).leases == ()
    patient = LeaseRequest(worker_id="w", capacity=1, wait_s=30)
    poll = asyncio.create_task(desk.lease(patient))
    await asyncio.sleep(0)
    open_group()
    assert len((await poll).leases) == 1
    poll = asyncio.create_task(desk.lease(patient))
    await asyncio.sleep(0)
    desk.finish()
    assert (await poll).finished
    open_group()
    reply = await desk.lease(ASK)
    assert (reply.leases, reply.finished) == ((), True)


async def test_of_two_polls_for_one_rollout_one_wins_and_the_other_waits_on(desk, open_group):
    patient = LeaseRequest(worker_id="w", capacity=1, wait_s=30)
    polls = [asyncio.create_task(desk.lease(patient)) for _ in range(2)]
    await asyncio.sleep(0)
    open_group()
    finished, [waiting] = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
    assert len(finished) == 1
    open_group()
    assert len((await waiting).leases) == 1


async def test_a_cancelled_poll_takes_nothing(desk, open_group, pool):
    poll = asyncio.create_task(desk.lease(LeaseRequest(worker_id="gone", capacity=1, wait_s=30)))
    await asyncio.sleep(0)
    poll.cancel()
    open_group()
    await asyncio.wait([poll])
    assert pool.status().num_leased == 0
    assert len((await desk.lease(ASK)).leases) == 1


async def test_a_released_lease_is_offered_again_with_a_new_session(desk, open_group, sessions):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    assert (await desk.release(lease.lease_id, ReleaseRequest(worker_id="w", attempt=1))).accepted
    assert not (await desk.release(lease.lease_id, ReleaseRequest(worker_id="w", attempt=1))).accepted
    assert sessions.get(lease.session.session_id).state == "closed"
    [again] = (await desk.lease(ASK)).leases
    assert (again.rollout_id, again.attempt) == ("g1.0", 2)
    assert again.session.session_id != lease.session.session_id


async def test_a_report_that_the_ledger_could_not_take_counts_when_it_is_sent_again(
    desk, open_group, call_model, pool, monkeypatch
):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    call_model(lease.session.session_id)
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "add_recording", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("full")))
        with pytest.raises(sqlite3.OperationalError):
            await desk.report(lease.lease_id, done())
    assert (await desk.report(lease.lease_id, done())).accepted
    assert pool.take(1)[0].rollouts[0].experiences[0].num_actions == 2


async def test_a_model_call_that_will_not_end_does_not_hold_up_the_result(
    desk, open_group, call_model, sessions, monkeypatch
):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    call_model(lease.session.session_id)

    async def never_idle():
        raise TimeoutError

    monkeypatch.setattr(sessions.get(lease.session.session_id), "close", never_idle)
    assert (await desk.report(lease.lease_id, done())).accepted


async def test_two_reports_at_once_count_once(desk, open_group, call_model, pool):
    open_group()
    [lease] = (await desk.lease(ASK)).leases
    call_model(lease.session.session_id)
    replies = await asyncio.gather(*(desk.report(lease.lease_id, done(float(i))) for i in range(3)))
    assert [reply.accepted for reply in replies] == [True, False, False]
    assert pool.take(1)[0].rollouts[0].outcome.reward == 0.0
    assert len(list(pool.ledger.results())) == 3


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


async def test_a_worker_must_ask_for_something(desk):
    with pytest.raises(ApiError, match="capacity is 0; it must be at least 1"):
        await desk.lease(LeaseRequest(worker_id="w", capacity=0))


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


async def test_silent_workers_are_noticed_by_themselves(desk, open_group, clock, pool, monkeypatch):
    monkeypatch.setattr("molt.train.controller.rollouts.EXPIRY_INTERVAL_S", 0.0)
    open_group()
    await desk.lease(ASK)
    clock.now += 31.0
    watch = asyncio.create_task(desk.watch_leases())
    assert await pool.wait_offers(5)
    watch.cancel()


async def test_the_real_client_over_the_real_server(make_desk, open_group, call_model, pool, clock):
    async def no_gateway(scope, receive, send):
        raise AssertionError("no model call is made here")

    sock = bind("127.0.0.1", 0, token="t")
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    desk = make_desk(url)
    server = HttpServer(create_app(desk, no_gateway, Metrics(), token="t"), sock)
    await server.start()
    api = ControlApi(url, token="t", give_up_s=1)
    poll = asyncio.create_task(api.lease(LeaseRequest(worker_id="w", capacity=4, wait_s=30)))
    open_group(3)
    first, second, third = (await poll).leases
    assert first.session.session_url.startswith(f"{url}/s/")
    for lease in (first, second):
        call_model(lease.session.session_id)
    beat = await api.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=(first.lease_id, "gone")))
    assert beat.lost == ("gone",)
    assert (await api.report(first.lease_id, done(1.0))).accepted
    with pytest.raises(FencedError, match="the lease was reported before"):
        await api.report(first.lease_id, done(2.0))
    assert (await api.release(third.lease_id, ReleaseRequest(worker_id="w", attempt=1))).accepted
    clock.now += 31.0
    await desk.expire()
    with pytest.raises(FencedError, match="expired"):
        await api.report(second.lease_id, done(3.0))
    async with httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"authorization": "Bearer t"}) as client:
        status = (await client.get("/status")).json()
        assert (status["step"], status["num_open_sessions"]) == (7, 0)
        assert (status["pool"]["num_waiting"], status["pool"]["num_leased"]) == (2, 0)
        recording = (await client.get(f"/sessions/{second.session.session_id}")).json()
        assert (recording["state"], recording["turns"][0]["token_ids"]) == ("closed", [7, 8])
        assert recording["segments"][0]["versions"] == [None, None, 3, 4]
    desk.finish()
    assert (await api.lease(LeaseRequest(worker_id="w", capacity=1))).finished
    await api.close()
    await server.stop()


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
