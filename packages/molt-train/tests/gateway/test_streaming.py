"""Time: tokens reach the client as they are sampled, waits are kept alive, and clients that leave free their engine."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio
import json

import anthropic
import openai
import pytest

from molt.train.engine.protocol import EngineChunk
from molt.train.errors import EngineDeadError, EngineError, EngineOverloadedError
from molt.train.gateway.exchange import Exchange

from .conftest import until
from .gated import GatedEngine, gated
from .replies import events

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": USER, "stream": True},
    "/v1/messages": {"messages": USER, "stream": True, "max_tokens": 99},
    "/v1/responses": {"input": USER, "stream": True},
    "/v1/completions": {"prompt": "hi", "stream": True},
}
BEATS = {
    "/v1/chat/completions": b": keep-alive\n\n",
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    "/v1/responses": b"event: response.in_progress\n",
    "/v1/completions": b": keep-alive\n\n",
}
WIRES = pytest.mark.parametrize("path", list(BODIES))


def text_of(frames):
    choices = [data["choices"][0] for _, data in frames if isinstance(data, dict) and data.get("choices")]
    deltas = [choice.get("delta", choice) for choice in choices]
    deltas += [data["delta"] for name, data in frames if name == "content_block_delta"]
    deltas += [{"text": data["delta"]} for name, data in frames if name == "response.output_text.delta"]
    return "".join(delta.get("content") or delta.get("text") or "" for delta in deltas)


def is_ended(frames):
    name, data = frames[-1]
    return data == "[DONE]" or name in ("message_stop", "response.completed")


@WIRES
async def test_tokens_arrive_before_the_next_are_sampled(bench, path):
    """agent-lightning#262: no wire is streamed by cutting a finished reply."""
    engine = gated(bench, "one", " two", " three")
    caller = bench.open()
    headers = {"authorization": f"Bearer {caller.key}"}
    engine.gate.release()  # the first token opens the stream
    async with bench.http.stream("POST", caller.url + path, json=BODIES[path], headers=headers) as response:
        seen, received = b"", response.aiter_raw()
        for expected in ("one", "one two", "one two three"):
            while text_of(events(seen)) != expected:
                seen += await anext(received)
            engine.gate.release()
        seen += b"".join([piece async for piece in received])
    await until(lambda: caller.turns[0].status == "delivered")
    assert (len(caller.turns), caller.turns[0].versions) == (1, [7] * len(caller.turns[0].token_ids))


@WIRES
async def test_a_stream_that_waits_is_kept_alive(bench, path):
    """tale PR#3387, litellm#36024, llmtrim#221: a client that hears nothing goes away, or asks again."""
    engine = gated(bench, "one", keepalive_s=0.01)
    caller = bench.open()
    headers = {"authorization": f"Bearer {caller.key}"}
    async with bench.http.stream("POST", caller.url + path, json=BODIES[path], headers=headers) as response:
        received = response.aiter_raw()
        seen = b""
        while seen.count(BEATS[path]) < 4:
            seen += await anext(received)
        engine.gate.release()
        seen += b"".join([piece async for piece in received])
    assert text_of(events(seen)) == "one"
    assert is_ended(events(seen))


async def test_the_sdks_take_keep_alives_for_life(bench):
    bench.serve({"text": "hello", "delay_s": 0.05, "chunk_delay_s": 0.03}, keepalive_s=0.01)
    caller = bench.open()
    async with caller.anthropic.messages.stream(model="m", max_tokens=99, messages=USER) as manager:
        assert (await manager.get_final_message()).content[0].text == "hello"
    chunks = await caller.openai.chat.completions.create(model="m", messages=USER, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == "hello"


@WIRES
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_aborted_after_the_grace(bench, path, stream):
    """vllm#32442, tale PR#3387: what nobody waits for is not sampled to its end."""
    engine = gated(bench, "one", " two", grace_s=0.0)
    caller = bench.open()
    await leave(bench, caller, path, {**BODIES[path], "stream": stream}, engine)
    await until(lambda: caller.turns)
    turn = caller.turns[0]
    assert (turn.status, turn.finish_reason, turn.adopted) == ("aborted", "abort", False)
    assert bench.decode(turn.token_ids) == "one"
    assert turn.versions == [7] * len(turn.token_ids)
    assert engine.aborted == [turn.turn_id]
    assert not engine.running


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_left_within_the_grace_leaves_an_undelivered_turn(bench, stream):
    engine = gated(bench, "one", " two", grace_s=60.0)
    caller = bench.open()
    await leave(bench, caller, "/v1/messages", {**BODIES["/v1/messages"], "stream": stream}, engine)
    engine.gate.release()
    await until(lambda: caller.turns)
    assert (caller.turns[0].status, caller.turns[0].adopted) == ("undelivered", False)
    assert bench.decode(caller.turns[0].token_ids) == "one two"
    assert engine.aborted == []


async def leave(bench, caller, path, body, engine):
    """Send a request, see its first token sampled, and reset the connection."""
    host, port = bench.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST {caller.url.removeprefix(bench.url)}{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {caller.key}\r\n"
    )
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    await until(lambda: engine.running)
    engine.gate.release()
    if body["stream"]:
        await reader.readuntil(b"one")
    writer.transport.abort()
    # The server has to read the reset before the test goes on; only its own loop can tell.
    for _ in range(20):
        await asyncio.sleep(0.001)


async def test_closing_a_session_aborts_what_is_in_flight(bench):
    engine = gated(bench, "one", " two")
    caller = bench.open()
    streamed = asyncio.create_task(caller.post("/v1/messages", BODIES["/v1/messages"]))
    await until(lambda: len(engine.running) == 1)
    engine.gate.release()
    whole = asyncio.create_task(caller.post("/v1/chat/completions", {"messages": USER}))
    await until(lambda: len(engine.running) == 2)
    session = await bench.sessions.close(caller.session.session_id)
    assert sorted(turn.status for turn in session.turns()) == ["aborted", "aborted"]
    assert (await whole).status_code == 410
    frames = events((await streamed).content)
    assert frames[-1][0] == "error"
    assert not any(name == "message_stop" for name, _ in frames)


async def test_closing_a_session_refuses_what_is_still_queued(bench):
    engine = gated(bench, "one", max_session_requests=1, hold_s=60.0)
    caller = bench.open()
    calls = [asyncio.create_task(caller.post("/v1/chat/completions", {"messages": USER})) for _ in range(2)]
    await until(lambda: engine.running and caller.session.slots._waiters)
    await bench.sessions.close(caller.session.session_id)
    assert [response.status_code for response in await asyncio.gather(*calls)] == [410, 410]
    assert [turn.status for turn in caller.turns] == ["aborted"]


async def test_nothing_follows_the_last_write(bench):
    sent = []

    async def send(message):
        sent.append(message.get("body"))

    scope = {"method": "POST", "path": "/", "headers": []}
    exchange = Exchange(scope, send, send)
    exchange.keep_alive(0.001, lambda: b"beat")
    await until(lambda: b"beat" in sent)
    await exchange.write_last(b"last")
    await asyncio.sleep(0.01)
    assert sent[-1] == b"last"
    exchange.close()


async def test_requests_beyond_the_sessions_limit_queue(bench):
    engine = gated(bench, "one", max_session_requests=2, hold_s=60.0)
    caller = bench.open()
    calls = [asyncio.create_task(caller.post("/v1/chat/completions", {"messages": USER})) for _ in range(5)]
    await until(lambda: len(engine.running) == 2)
    for _ in calls:
        engine.gate.release()
    assert [response.status_code for response in await asyncio.gather(*calls)] == [200] * 5
    assert (engine.peak, len(caller.turns)) == (2, 5)


async def test_an_overloaded_engine_is_503_or_529_at_once(bench):
    bench.serve({"error": "overloaded"}, hold_s=60.0)
    caller = bench.open()
    for stream in (False, True):
        chat = await caller.post("/v1/chat/completions", {"messages": USER, "stream": stream})
        assert (chat.status_code, chat.headers["retry-after"]) == (503, "1")
        assert chat.json()["error"]["type"] == "server_error"
        messages = await caller.post("/v1/messages", {"messages": USER, "max_tokens": 9, "stream": stream})
        assert (messages.status_code, messages.json()["error"]["type"]) == (529, "overloaded_error")
    assert {(turn.status, turn.finish_reason) for turn in caller.turns} == {("failed", "error")}
    assert caller.session.counters["engine_failed"] == 4
    with pytest.raises(openai.InternalServerError):
        await caller.openai.chat.completions.create(model="m", messages=USER)
    with pytest.raises(anthropic.APIStatusError):
        await caller.anthropic.messages.create(model="m", max_tokens=9, messages=USER)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_waits_for_a_dead_engine_to_come_back(bench, stream):
    bench.serve({"error": "dead"}, {"error": "dead"}, {"text": "back"}, hold_s=30.0)
    caller = bench.open()
    response = await caller.post("/v1/chat/completions", {"messages": USER, "stream": stream})
    assert response.status_code == 200
    assert caller.session.counters == {"engine_dead_held": 2}
    turn = caller.turns[0]
    assert bench.decode(turn.token_ids) == "back<|im_end|>"
    assert [line["request_id"] for line in bench.log] == [turn.turn_id, f"{turn.turn_id}-2", f"{turn.turn_id}-3"]


async def test_an_engine_that_stays_dead_is_503_after_the_hold(bench):
    bench.serve({"error": "dead"}, hold_s=0.08)
    caller = bench.open()
    response = await caller.post("/v1/chat/completions", {"messages": USER})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert caller.session.counters["engine_dead_held"] >= 1
    assert [turn.status for turn in caller.turns] == ["failed"]


async def test_closing_ends_the_wait_for_a_dead_engine(bench):
    bench.serve({"error": "dead"}, hold_s=3600.0)
    caller = bench.open()
    waiting = asyncio.create_task(caller.post("/v1/chat/completions", {"messages": USER}))
    await until(lambda: caller.session.counters["engine_dead_held"])
    await bench.sessions.close(caller.session.session_id)
    assert (await waiting).status_code == 410
    assert [turn.status for turn in caller.turns] == ["aborted"]


@pytest.mark.parametrize("error", ["dead", "overloaded"])
async def test_an_engine_that_fails_in_mid_stream_ends_it_with_a_typed_error(bench, error):
    bench.serve({"text": "one two", "error": error}, hold_s=60.0)
    caller = bench.open()
    frames = events((await caller.post("/v1/chat/completions", BODIES["/v1/chat/completions"])).content)
    assert text_of(frames) == "one two"
    assert frames[-1][1]["error"]["type"] == "server_error"
    frames = events((await caller.post("/v1/messages", BODIES["/v1/messages"])).content)
    assert text_of(frames) == "one two"
    assert (frames[-1][0], frames[-1][1]["error"]["type"]) == ("error", "overloaded_error")
    for turn in caller.turns:
        assert (turn.status, bench.decode(turn.token_ids)) == ("failed", "one two")
    with pytest.raises(openai.APIError):
        async for _ in await caller.openai.chat.completions.create(model="m", messages=USER, stream=True):
            pass
    with pytest.raises(anthropic.APIStatusError):
        async with caller.anthropic.messages.stream(model="m", max_tokens=9, messages=USER) as manager:
            await manager.get_final_message()
    bench.check_exact(caller)


async def test_a_stream_that_was_kept_alive_fails_by_an_event(bench):
    bench.serve({"error": "overloaded", "delay_s": 0.05}, keepalive_s=0.01)
    response = await bench.open().post("/v1/messages", BODIES["/v1/messages"])
    frames = events(response.content)
    assert response.status_code == 200
    assert {name for name, _ in frames[:-1]} == {"message_start", "ping"}
    assert frames[-1][0] == "error"


@pytest.mark.parametrize("fault", [EngineDeadError("a"), EngineOverloadedError("b"), EngineError("c")])
async def test_every_engine_error_has_an_answer(bench, fault):
    engine = gated(bench, fault, hold_s=0.0)
    engine.gate.release()
    response = await bench.open().post("/v1/chat/completions", {"messages": USER})
    assert response.status_code == (500 if type(fault) is EngineError else 503)


async def test_a_dead_engine_does_not_keep_a_session_from_closing(bench):
    class Dead(GatedEngine):
        async def abort(self, request_id):
            await super().abort(request_id)
            raise EngineDeadError("gone")

    engine = Dead(bench.encode("one"))
    bench.serve(engine=engine)
    caller = bench.open()
    running = asyncio.create_task(caller.post("/v1/chat/completions", {"messages": USER}))
    await until(lambda: engine.running)
    await bench.sessions.close(caller.session.session_id)
    assert (await running).status_code == 410


async def test_versions_that_come_with_the_last_chunk_are_recorded(bench):
    class LateVersions(GatedEngine):
        async def stream(self, request):
            for token_ids, versions, finish in (([5], [], None), ([6], [3, 4], "stop")):
                yield EngineChunk(token_ids=token_ids, logprobs=[-1.0], versions=versions, finish_reason=finish)

    bench.serve(engine=LateVersions())
    caller = bench.open()
    await caller.post("/v1/messages", BODIES["/v1/messages"])
    assert (caller.turns[0].token_ids, caller.turns[0].versions) == ([5, 6], [3, 4])


async def test_an_engine_that_ends_without_a_reason_is_a_failure(bench):
    class Unfinished(GatedEngine):
        async def stream(self, request):
            yield EngineChunk(token_ids=[5], logprobs=[-1.0], versions=[])

    bench.serve(engine=Unfinished())
    caller = bench.open()
    frames = events((await caller.post("/v1/messages", BODIES["/v1/messages"])).content)
    assert frames[-1][1]["error"]["type"] == "api_error"
    assert (caller.turns[0].status, caller.turns[0].versions) == ("failed", [-1])


async def test_a_pause_in_mid_stream_shows_as_keep_alives_and_nothing_else(bench):
    """A refit: the engine is paused, and its chunks do not come."""
    engine = gated(bench, "one", " two", keepalive_s=0.01)
    caller = bench.open()
    headers = {"authorization": f"Bearer {caller.key}"}
    async with bench.http.stream(
        "POST", caller.url + "/v1/messages", json=BODIES["/v1/messages"], headers=headers
    ) as response:
        engine.gate.release()
        received, seen = response.aiter_raw(), b""
        while b'"one"' not in seen:
            seen += await anext(received)
        paused = b""
        while paused.count(b"event: ping") < 3:
            paused += await anext(received)
        assert {name for name, _ in events(paused)} == {"ping"}
        engine.gate.release()
        seen += b"".join([piece async for piece in received])
    assert text_of(events(seen)) == "one two"


async def test_a_keep_alive_opens_a_stream_whose_prompt_is_known(bench):
    engine = gated(bench, "one", keepalive_s=0.01)
    caller = bench.open()
    headers = {"authorization": f"Bearer {caller.key}"}
    path = "/v1/chat/completions"
    async with bench.http.stream("POST", caller.url + path, json=BODIES[path], headers=headers) as response:
        received, seen = response.aiter_raw(), b""
        while b": keep-alive" not in seen:
            seen += await anext(received)
        assert events(seen)[0][1]["choices"][0]["delta"]["role"] == "assistant"
        engine.gate.release()
        seen += b"".join([piece async for piece in received])
    assert text_of(events(seen)) == "one"
    assert seen.count(b'"role"') == 1


async def test_a_request_that_queues_is_kept_alive(bench):
    engine = gated(bench, "one", keepalive_s=0.01, max_session_requests=1, hold_s=60.0)
    caller = bench.open()
    first = asyncio.create_task(caller.post("/v1/chat/completions", {"messages": USER}))
    await until(lambda: engine.running)
    headers = {"authorization": f"Bearer {caller.key}"}
    async with bench.http.stream(
        "POST", caller.url + "/v1/messages", json=BODIES["/v1/messages"], headers=headers
    ) as response:
        received, seen = response.aiter_raw(), b""
        while seen.count(b"event: ping") < 2:
            seen += await anext(received)
        assert {name for name, _ in events(seen)} == {"ping"}
        engine.sample(2)
        seen += b"".join([piece async for piece in received])
    assert text_of(events(seen)) == "one"
    assert (await first).status_code == 200


async def test_keep_alives_of_a_responses_stream_are_numbered_events(bench):
    """Codex counts events as life, and no comments."""
    engine = gated(bench, "one", " two", keepalive_s=0.01)
    caller = bench.open()
    headers = {"authorization": f"Bearer {caller.key}"}
    body = {"input": USER, "stream": True}
    async with bench.http.stream("POST", caller.url + "/v1/responses", json=body, headers=headers) as response:
        received, seen = response.aiter_raw(), b""
        for count in (3, 6):
            while seen.count(b"event: response.in_progress") < count:
                seen += await anext(received)
            engine.gate.release()
        seen += b"".join([piece async for piece in received])
    frames = events(seen)
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    assert [name for name, _ in frames].count("response.created") == 1
    assert frames[-1][1]["response"]["output"][0]["content"][0]["text"] == "one two"
