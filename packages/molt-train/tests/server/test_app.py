import asyncio
import select
import socket

import msgspec
import pytest

from molt.agents.protocol import (
    HeartbeatRequest,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
    SamplingParams,
    SessionRequest,
    SessionResult,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def error_of(response):
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"type", "message", "param"}
    return body["error"]


async def test_every_route_reaches_the_desk_as_its_struct(worker, desk):
    report = {"worker_id": "w", "attempt": 2, "outcome": "completed", "reward": 1, "info": {"calls": 2}}
    assert (await worker.post("/leases", json={"worker_id": "w", "capacity": 4, "wait_s": 0})).json() == {
        "leases": [],
        "heartbeat_s": 2.5,
        "finished": False,
    }
    beat = await worker.post("/heartbeat", json={"worker_id": "w", "lease_ids": ["a", "b"]})
    assert beat.json() == {"lost": ["a"], "finished": False}
    assert (await worker.post("/leases/l1/result", json=report)).json() == {
        "accepted": True,
        "reason": None,
        "repeated": False,
        "finished": False,
    }
    assert (await worker.post("/leases/l1/release", json={"worker_id": "w", "attempt": 2})).status_code == 200
    assert (await worker.post("/sessions/s/result", json={"reward": 0.5})).status_code == 200
    assert desk.calls == [
        LeaseRequest(worker_id="w", capacity=4, wait_s=0),
        HeartbeatRequest(worker_id="w", lease_ids=("a", "b")),
        ("l1", ResultReport(worker_id="w", attempt=2, outcome="completed", reward=1.0, info={"calls": 2})),
        ("l1", ReleaseRequest(worker_id="w", attempt=2)),
        ("s", SessionResult(outcome="completed", reward=0.5)),
    ]
    assert (await worker.get("/status")).json() == {"step": 3}
    assert (await worker.get("/sessions/s")).json() == {
        "session_id": "s",
        "state": "open",
        "turns": [],
        "segments": [],
        "counters": {"forks": 1},
        "delivered_fraction": 1.0,
    }


@pytest.mark.parametrize("content", [b"", b"{}"])
async def test_a_session_needs_no_body(worker, desk, content):
    response = await worker.post("/sessions", content=content)
    assert response.status_code == 201
    assert response.json() == {
        "session_id": "s",
        "session_url": "u/s/s",
        "base_url": "u/s/s/v1",
        "api_key": "k",
        "model_name": "m",
    }
    assert desk.calls == [SessionRequest()]


async def test_a_session_takes_every_field_it_knows(worker, desk):
    body = {
        "sampling_policy": "client",
        "sampling_params": {"temperature": 0.5, "stop": ["x"]},
        "metadata": {"anything": {"nested": 1}},
        "task": {"question": "1+1", "any": "key"},
        "group": "g",
    }
    assert (await worker.post("/sessions", json=body)).status_code == 201
    [request] = desk.calls
    assert request.sampling_params == SamplingParams(temperature=0.5, stop=("x",))
    assert request.task == {"question": "1+1", "any": "key"}


@pytest.mark.parametrize(
    ("body", "param", "near"),
    [
        ({"sampling_parms": {}}, "sampling_parms", "'sampling_params'"),
        ({"sampling_params": {"temprature": 0}}, "sampling_params.temprature", "'sampling_params.temperature'"),
    ],
)
async def test_a_field_that_a_session_does_not_have_is_an_error_with_the_nearest_one(worker, desk, body, param, near):
    response = await worker.post("/sessions", json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert near in error["message"]
    assert desk.calls == []


async def test_a_newer_worker_may_send_fields_that_this_server_does_not_know(worker, desk):
    response = await worker.post("/leases", json={"worker_id": "w", "capacity": 1, "mood": ["good"]})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "content", "param", "message"),
    [
        ("/leases", b'{"worker_id": "w"}', "capacity", "capacity is missing"),
        ("/leases", b"", "worker_id", "worker_id is missing"),
        ("/leases", b'{"worker_id": "w", "capacity": "4"}', "capacity", "capacity: expected `int`, got `str`"),
        ("/leases", b"[1]", None, "the body: expected `object`, got `array`"),
        ("/leases", b"{", None, "the body is not JSON"),
        ("/leases", b'{"worker_id": "\xff"}', None, "the body is not JSON"),
        ("/leases", b'{"new": ' + b"[" * 100_000, None, "the body is not JSON"),
        ("/sessions", b'{"sampling_params": {"max_tokens": 1.5}}', "sampling_params.max_tokens", "expected `int`"),
        ("/sessions/s/result", b"[", None, "the body is not JSON"),
        ("/sessions/s/result", b"[" * 100_000, None, "the body is not JSON"),
        ("/sessions/s/result", b"[1]", None, "the body: expected `object`"),
        ("/sessions/s/result", b'{"outcome": "won"}', "outcome", "outcome: invalid enum value 'won'"),
    ],
)
async def test_a_bad_body_is_answered_with_the_field_at_fault(worker, desk, path, content, param, message):
    response = await worker.post(path, content=content)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert desk.calls == []


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (b"NaN", "reward is nan, which is no finite number"),
        (b"-Infinity", "reward is -inf, which is no finite number"),
        (b"1e999", "reward is inf, which is no finite number"),
        (b'"high"', "reward is 'high', which is no finite number"),
        (b"true", "reward is True, which is no finite number"),
        (b"[1]", "reward is [1], which is no finite number"),
        (b"1" + b"0" * 400, "which is no finite number"),
    ],
)
async def test_a_reward_that_is_no_finite_number_makes_the_outcome_failed(worker, desk, reward, reason):
    assert (await worker.post("/sessions/s/result", content=b'{"reward": ' + reward + b"}")).status_code == 200
    head = b'{"worker_id": "w", "attempt": 1, "outcome": "completed", "reward": 1, "score": '
    assert (await worker.post("/leases/l/result", content=head + reward + b"}")).status_code == 200
    (_, by_session), (_, by_worker) = desk.calls
    assert (by_session.outcome, by_session.reward) == ("failed", None)
    assert reason in by_session.error
    assert (by_worker.outcome, by_worker.reward, by_worker.score) == ("failed", None, None)
    assert reason.replace("reward", "score") in by_worker.error


async def test_a_report_that_does_not_count_is_a_conflict(worker, desk):
    desk.verdict = ResultReply(accepted=False, reason="late")
    for path in ("/leases/l/result", "/leases/l/release", "/sessions/s/result"):
        response = await worker.post(path, json={"worker_id": "w", "attempt": 1, "outcome": "failed"})
        assert response.status_code == 409
        assert response.json() == {"accepted": False, "reason": "late", "repeated": False, "finished": False}


async def test_a_body_beyond_the_limit_is_refused(worker, desk):
    response = await worker.post("/leases", content=b"x" * (16 * 1024 * 1024 + 1))
    assert response.status_code == 413
    assert error_of(response)["type"] == "request_too_large"
    assert desk.calls == []


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer worker-toke",
        "Bearer worker-token-",
        "Basic worker-token",
        "worker-token",
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/leases"), ("GET", "/status"), ("GET", "/no/such/route")])
async def test_without_the_token_every_path_gives_the_same_401(anyone, desk, method, path, authorization):
    headers = {} if authorization is None else {"authorization": authorization}
    response = await anyone.request(method, f"/api/v1{path}", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert error["type"] == "authentication_error"
    assert "worker-token" not in error["message"]
    assert desk.calls == []


async def test_unknown_paths_and_methods_have_the_one_error_body(worker, anyone):
    for response, status, kind in (
        (await worker.get("/nowhere"), 404, "not_found_error"),
        (await worker.delete("/leases"), 405, "invalid_request_error"),
        (await worker.get("/sessions/other"), 404, "not_found_error"),
        (await anyone.get("/nowhere"), 404, "not_found_error"),
    ):
        assert response.status_code == status
        assert error_of(response)["type"] == kind


async def test_a_fault_of_the_server_is_a_500_that_tells_nothing_of_it(worker, caplog):
    response = await worker.get("/sessions/broken")
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "api_error"
    assert "secret" not in error["message"]
    assert "a bug, with a secret in its text" in caplog.text, "the log says it"


async def test_model_calls_reach_the_gateway_without_the_workers_token(anyone):
    response = await anyone.post("/s/abc/v1/messages")
    assert response.text == "gateway POST /s/abc/v1/messages"
    assert (await anyone.head("/s/abc")).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/api/hello")])
async def test_reachability_is_shown_without_key_and_body(anyone, method, path):
    response = await anyone.request(method, path)
    assert response.status_code == 200
    assert response.content == b""


async def test_metrics_are_shown_at_the_root(anyone, metrics):
    metrics.counter("rollouts", "Finished rollouts").inc(3)
    response = await anyone.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "molt_rollouts_total 3.0" in response.text


async def test_a_full_disk_is_a_503_that_may_be_tried_again(worker, desk, caplog):
    desk.is_full = True
    response = await worker.post("/heartbeat", json={"worker_id": "w", "lease_ids": []})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    error = error_of(response)
    assert error["type"] == "overloaded_error"
    assert "no room on its disk" in error["message"]
    assert "/secret" not in error["message"]
    assert "/secret/folder" in caplog.text, "the log says it"


async def ask_for_leases(server):
    """Send a request for leases by hand. Returns what reads and writes its connection."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_for_leases())
    return reader, writer


def request_for_leases():
    body = msgspec.json.encode(LeaseRequest(worker_id="w", capacity=1))
    head = f"POST /api/v1/leases HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"authorization: Bearer worker-token\r\n\r\n" + body


async def test_leases_that_a_worker_did_not_read_are_taken_back(server, desk):
    """A worker's death closes its socket with the answer unread, which the kernel tells the server by a reset."""
    host, port = server.url.removeprefix("http://").split(":")

    def ask_and_die():
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(request_for_leases())
            assert select.select([sock], [], [], 5)[0]

    await asyncio.to_thread(ask_and_die)
    await asyncio.wait_for(desk.taken_back.wait(), timeout=5)


async def test_leases_that_are_granted_as_the_worker_hangs_up_are_taken_back_or_never_granted(server, desk):
    desk.poll = asyncio.Event()
    _, writer = await ask_for_leases(server)
    await desk.poll_started.wait()
    writer.transport.abort()
    desk.poll.set()
    ends = [asyncio.create_task(event.wait()) for event in (desk.taken_back, desk.poll_cancelled)]
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert done
    for end in ends:
        end.cancel()


async def test_leases_that_a_worker_has_read_stay_granted_when_it_closes_its_connection(server, desk):
    desk.poll = asyncio.Event()
    reader, writer = await ask_for_leases(server)
    await desk.poll_started.wait()
    desk.poll.set()
    await reader.readuntil(b"}")
    writer.close()
    await writer.wait_closed()
    desk.poll_started.clear()
    reader, writer = await ask_for_leases(server)  # by when it is answered the first end has been heard of
    await reader.readuntil(b"}")
    assert not desk.taken_back.is_set()
    writer.close()


async def test_a_long_poll_is_cancelled_when_its_worker_hangs_up(server, desk):
    desk.poll = asyncio.Event()
    _, writer = await ask_for_leases(server)
    await desk.poll_started.wait()
    assert not desk.poll_cancelled.is_set()
    writer.transport.abort()
    assert await asyncio.wait_for(desk.poll_cancelled.wait(), timeout=5)


async def test_a_long_poll_answers_when_the_desk_does(worker, desk):
    desk.poll = asyncio.Event()
    poll = asyncio.create_task(worker.post("/leases", json={"worker_id": "w", "capacity": 1}))
    await desk.poll_started.wait()
    assert not poll.done()
    desk.poll.set()
    assert (await poll).json()["heartbeat_s"] == 2.5
    assert not desk.poll_cancelled.is_set()
