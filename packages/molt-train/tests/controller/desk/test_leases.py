# ruff: noqa: TID252 - the folders of tests are no installed package
"""Leases, from the worker's request to its report."""

import asyncio

import msgspec
import pytest

from molt.agents.protocol import HeartbeatRequest, LeaseRequest, ReleaseRequest, SamplingParams
from molt.train.errors import LedgerFullError
from molt.train.server import ApiError

from .reports import ASK, PATIENT, done


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
    await desk.expire()
    assert sessions.get(lease.session.session_id).state == "closed"
    [again] = (await desk.lease(ASK)).leases
    assert (again.rollout_id, again.attempt) == ("g1.0", 2)
    assert again.session.session_id != lease.session.session_id


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


async def test_a_worker_must_ask_for_something(desk):
    with pytest.raises(ApiError, match="capacity is 0; it must be at least 1"):
        await desk.lease(LeaseRequest(worker_id="w", capacity=0))


async def test_silent_workers_are_noticed_by_themselves(desk, open_group, clock, pool, monkeypatch):
    monkeypatch.setattr("molt.train.controller.desk.desk.EXPIRY_INTERVAL_S", 0.0)
    open_group()
    await desk.lease(ASK)
    clock.now += 31.0
    watch = asyncio.create_task(desk.watch())
    assert await pool.wait_offers(5)
    watch.cancel()


async def test_only_a_worker_with_the_labels_of_a_task_is_given_it(desk, open_group, pool):
    open_group(labels={"arch": "arm64"})
    poll = asyncio.create_task(desk.lease(msgspec.structs.replace(PATIENT, worker_id="x86", labels={"arch": "x86"})))
    assert (await desk.lease(ASK)).leases == ()
    request = LeaseRequest(
        worker_id="arm", capacity=1, wait_s=0.0, labels={"arch": "arm64", "gpu": "no"}, concurrency=4
    )
    assert len((await desk.lease(request)).leases) == 1
    assert not poll.done()
    poll.cancel()
    workers = {row.worker_id: row for row in pool.status().workers}
    assert (workers["arm"].capacity, workers["arm"].labels, workers["arm"].leases) == (4, request.labels, 1)
    assert workers["w"].capacity == 8, "what it asks for, where it does not say how many it runs"


async def test_leases_of_an_answer_that_did_not_arrive_are_taken_back_at_no_cost(desk, open_group, pool, sessions):
    """The worker asks the same again, so it was not given what it was granted."""
    open_group(2)
    request = msgspec.structs.replace(ASK, request_id="r1")
    lost = (await desk.lease(request)).leases
    found = (await desk.lease(request)).leases
    assert [(lease.rollout_id, lease.attempt) for lease in found] == [("g1.0", 2), ("g1.1", 2)]
    assert not {lease.lease_id for lease in lost} & {lease.lease_id for lease in found}
    await desk.expire()
    assert [sessions.get(lease.session.session_id).state for lease in lost] == ["closed", "closed"]
    assert [row.failures for row in pool.ledger.rollouts("g1")] == [0, 0]
    assert pool.counters["leases_taken_back"] == 2
    for lease in found:
        assert (await desk.report(lease.lease_id, done(attempt=2))).accepted


async def test_another_request_takes_nothing_back(desk, open_group, pool):
    open_group(2)
    for request_id in ("r1", "r2", ""):
        await desk.lease(msgspec.structs.replace(ASK, capacity=1, request_id=request_id))
    await desk.lease(msgspec.structs.replace(ASK, capacity=1, worker_id="other", request_id="r2"))
    assert pool.status().num_leased == 2
    assert pool.counters["leases_taken_back"] == 0


async def test_what_its_worker_has_spoken_of_is_not_taken_back(desk, open_group, pool):
    open_group(3)
    request = msgspec.structs.replace(ASK, request_id="r1")
    reply = await desk.lease(request)
    beaten, reported, unheard = reply.leases
    desk.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=(beaten.lease_id,)))
    await desk.report(reported.lease_id, done())
    desk.take_back(reply)
    assert pool.status().num_leased == 1
    assert desk.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=(beaten.lease_id, unheard.lease_id))).lost == (
        unheard.lease_id,
    )


async def test_a_repeated_result_is_told_from_a_late_one(desk, open_group, clock):
    open_group(2)
    first, second = (await desk.lease(ASK)).leases
    await desk.report(first.lease_id, done(1.0))
    again = await desk.report(first.lease_id, done(1.0))
    assert (again.accepted, again.repeated) == (False, True)
    assert not (await desk.report(first.lease_id, done(1.0, worker_id="other"))).repeated
    clock.now += 31.0
    await desk.expire()
    late = await desk.report(second.lease_id, done(1.0))
    assert (late.accepted, late.repeated) == (False, False)


async def test_a_cut_lease_is_lost_its_session_closed_and_its_late_report_kept(desk, open_group, pool, sessions):
    open_group(1, extra=1)
    quick, slow = (await desk.lease(ASK)).leases
    await desk.report(quick.lease_id, done(1.0))
    beat = desk.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=(slow.lease_id,)))
    assert beat.lost == (slow.lease_id,)
    await desk.expire()
    assert sessions.get(slow.session.session_id).state == "closed"
    late = await desk.report(slow.lease_id, done(9.0))
    assert (late.accepted, late.repeated) == (False, False)
    assert [r.outcome.reward for r in pool.take(1)[0].rollouts] == [1.0]
    assert [(r.outcome.reward, r.counted) for r in pool.ledger.results()] == [(1.0, True), (9.0, False)]


async def test_no_more_requests_for_leases_wait_than_may(make_desk, open_group):
    desk = make_desk(max_polls=2)
    polls = [asyncio.create_task(desk.lease(PATIENT)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="2 requests for leases are waiting already") as caught:
        await desk.lease(PATIENT)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)
    assert (await desk.lease(ASK)).leases == (), "who does not wait takes no place"
    polls.pop().cancel()
    await asyncio.sleep(0)
    polls.append(asyncio.create_task(desk.lease(PATIENT)))
    open_group(2)
    assert [len((await poll).leases) for poll in polls] == [1, 1]


async def test_every_answer_says_that_the_run_is_over(desk, open_group):
    open_group(3)
    first, second, third = (await desk.lease(ASK)).leases
    before = desk.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=()))
    assert not before.finished
    desk.finish()
    assert desk.heartbeat(HeartbeatRequest(worker_id="w", lease_ids=(first.lease_id,))).finished
    reply = await desk.report(second.lease_id, done())
    assert (reply.accepted, reply.finished) == (True, True)
    assert (await desk.report(second.lease_id, done())).finished
    assert (await desk.release(third.lease_id, ReleaseRequest(worker_id="w", attempt=1))).finished
    assert (await desk.lease(ASK)).finished


async def test_the_end_waits_until_every_worker_knows_of_it(make_desk, open_group, clock):
    desk = make_desk(heartbeat_s=30.0)
    open_group(2)
    await desk.lease(msgspec.structs.replace(ASK, worker_id="gone", capacity=1))
    clock.now += 33.0  # longer than a heartbeat takes
    [lease] = (await desk.lease(msgspec.structs.replace(ASK, worker_id="busy"))).leases
    polling = asyncio.create_task(desk.lease(msgspec.structs.replace(PATIENT, worker_id="idle")))
    await asyncio.sleep(0)
    farewell = asyncio.create_task(desk.dismiss())
    assert (await polling).finished
    assert not farewell.done()
    assert desk.heartbeat(HeartbeatRequest(worker_id="busy", lease_ids=(lease.lease_id,))).finished
    await asyncio.sleep(0)
    assert not farewell.done(), "it will give its lease back"
    await desk.release(lease.lease_id, ReleaseRequest(worker_id="busy", attempt=1))
    await farewell


async def test_the_end_does_not_wait_for_ever(make_desk, monkeypatch):
    monkeypatch.setattr("molt.train.controller.desk.leases.FAREWELL_SLACK_S", 0.01)
    desk = make_desk(heartbeat_s=0.0)
    await desk.lease(ASK)
    await desk.dismiss()
    assert (await desk.lease(ASK)).finished, "who comes later is told so, too"


async def test_the_end_waits_for_nobody_where_there_are_no_workers(desk):
    farewell = asyncio.create_task(desk.dismiss())
    await asyncio.sleep(0)
    assert farewell.done()


async def test_leases_whose_sessions_a_full_disk_does_not_take_are_taken_back(desk, open_group, pool, monkeypatch):
    open_group(2)
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "attach_session", full)
        with pytest.raises(LedgerFullError):
            await desk.lease(ASK)
    assert (pool.status().num_leased, desk.status()["num_open_sessions"]) == (0, 0)
    assert [lease.attempt for lease in (await desk.lease(ASK)).leases] == [2, 2]
    assert [row.failures for row in pool.ledger.rollouts("g1")] == [0, 0]


async def test_what_a_full_disk_does_not_let_be_taken_back_is_tried_again(
    desk, open_group, call_model, pool, sessions, monkeypatch
):
    open_group(1)
    reply = await desk.lease(ASK)
    session_id = reply.leases[0].session.session_id
    call_model(session_id)
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "end_attempt", full)
        desk.take_back(reply)
        await desk.expire()
        assert pool.status().num_leased == 1
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "add_recording", full)
        await desk.expire()
        assert (pool.status().num_leased, sessions.get(session_id).state) == (0, "closed")
        assert desk.status()["num_open_sessions"] == 1, "what it recorded is in memory alone"
    await desk.expire()
    assert desk.status()["num_open_sessions"] == 0
    assert len(pool.ledger.recording(session_id).turns) == 1


async def test_the_watch_outlives_a_full_disk(desk, open_group, clock, pool, monkeypatch, caplog):
    monkeypatch.setattr("molt.train.controller.desk.desk.EXPIRY_INTERVAL_S", 0.0)
    open_group()
    await desk.lease(ASK)
    clock.now += 31.0
    with monkeypatch.context() as patch:
        patch.setattr(pool.ledger, "end_attempt", full)
        watch = asyncio.create_task(desk.watch())
        for _ in range(200):
            await asyncio.sleep(0)
    assert caplog.text.count("nothing expires for now") == 1
    assert await pool.wait_offers(5)
    watch.cancel()


def full(*_args, **_kwargs):
    raise LedgerFullError("no room")
