"""Resends: one sample for one thing asked, whatever clients do when a connection breaks."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio
import json

import pytest

from .conftest import until
from .gated import gated
from .ledger_check import check_ledger
from .replies import CALCULATOR, CALCULATOR_BLOCK, call, events
from .sockets import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
BODIES = {CHAT: {"messages": USER}, MESSAGES: {"messages": USER, "max_tokens": 99}}
WIRES = pytest.mark.parametrize("path", list(BODIES))
MODES = pytest.mark.parametrize("stream", [True, False])


def said(text):
    return {"role": "assistant", "content": text}


def text_of(response):
    """The id and the text of a reply, however it came."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        body = response.json()
        if "choices" in body:
            return body["id"], body["choices"][0]["message"]["content"]
        return body["id"], "".join(block.get("text", "") for block in body["content"])
    frames = events(response.content)
    assert frames[-1] in [(None, "[DONE]"), ("message_stop", {"type": "message_stop"})]
    if frames[-1][0] is None:
        chunks = [data for _, data in frames[:-1]]
        return chunks[0]["id"], "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    deltas = [data["delta"].get("text", "") for name, data in frames if name == "content_block_delta"]
    return frames[0][1]["message"]["id"], "".join(deltas)


async def cut(bench, caller, path, engine=None, *, after=b"one", **changes):
    """Send a request, and reset its connection: after `after` was received, or once its engine runs."""
    body = {**BODIES[path], "stream": bool(after), **changes}
    client = await RawClient.post(caller, path, body)
    if engine is not None:
        await until(lambda: engine.running)
        engine.gate.release()
    if after:
        await client.read_until(after)
    left = caller.session.counters["clients_left"]
    client.reset()
    await until(lambda: caller.session.counters["clients_left"] > left)


async def undelivered(bench, *replies, path=MESSAGES, **settings):
    """A session whose first reply was sampled after its client had gone."""
    engine = gated(bench, "one", " two", **settings)
    caller = bench.open()
    await cut(bench, caller, path, engine)
    engine.gate.release()
    await until(lambda: caller.turns and not engine.running)
    assert [turn.status for turn in caller.turns] == ["undelivered"]
    engine.sample(2 * len(replies))
    return caller


@WIRES
@MODES
async def test_a_resend_joins_the_sample_whose_client_is_gone(bench, path, stream):
    """Claude Code asks again within 30 ms, without streaming, when a stream breaks."""
    engine = gated(bench, "one", " two", " three")
    caller = bench.open()
    await cut(bench, caller, path, engine)
    resend = asyncio.create_task(caller.post(path, {**BODIES[path], "stream": stream}))
    await until(lambda: caller.session.counters["resends.attached"])
    engine.sample(2)
    response_id, text = text_of(await resend)
    (turn,) = caller.turns
    assert (response_id, text) == (turn.response_id, "one two three")
    assert (turn.status, turn.adopted, engine.peak, engine.aborted) == ("delivered", True, 1, [])


async def test_a_resend_joins_before_the_first_token(bench):
    engine = gated(bench, "one")
    caller = bench.open()
    client = await RawClient.post(caller, MESSAGES, {**BODIES[MESSAGES], "stream": True})
    await until(lambda: engine.running)
    client.reset()
    await until(lambda: caller.session.counters["clients_left"])
    resend = asyncio.create_task(caller.post(MESSAGES, {**BODIES[MESSAGES], "stream": True}))
    await until(lambda: caller.session.counters["resends.attached"])
    engine.gate.release()
    assert text_of(await resend)[1] == "one"
    assert [turn.status for turn in caller.turns] == ["delivered"]


@WIRES
@MODES
async def test_a_reply_that_reached_nobody_is_given_to_the_resend(bench, path, stream):
    caller = await undelivered(bench, path=path)
    response = await caller.post(path, {**BODIES[path], "stream": stream})
    (turn,) = caller.turns
    assert text_of(response) == (turn.response_id, "one two")
    assert (turn.status, turn.adopted) == ("delivered", True)
    assert caller.session.counters["resends.replayed"] == 1


async def test_a_replayed_call_has_the_ids_and_arguments_it_had(bench):
    bench.serve({"text": "<think>\nhm\n</think>\n\nI add." + call('{"a": 1}') + call("{}"), "delay_s": 0.01})
    caller = bench.open()
    body = {"messages": USER, "tools": [CALCULATOR], "logprobs": True}
    client = await RawClient.post(caller, CHAT, body)
    await until(lambda: caller.session.attempts._under_way)
    client.reset()
    await until(lambda: caller.turns)
    first = (await caller.post(CHAT, body)).json()
    again = (await caller.post(CHAT, body, **{"x-stainless-retry-count": "1"})).json()
    assert first == again
    streamed = await caller.post(CHAT, {**body, "stream": True}, **{"x-stainless-retry-count": "1"})
    chunks = [data["choices"][0]["delta"] for _, data in events(streamed.content)[:-1]]
    ids = [part["id"] for delta in chunks for part in delta.get("tool_calls", []) if "id" in part]
    calls = first["choices"][0]["message"]["tool_calls"]
    assert ids == [tool_call["id"] for tool_call in calls]
    assert [tool_call["function"]["arguments"] for tool_call in calls] == ['{"a": 1}', "{}"]
    assert len(bench.log) == len(caller.turns) == 1


@WIRES
async def test_verifiers_2368_a_body_repeated_after_delivery_is_a_new_sample(bench, path):
    bench.serve({"text": "one"}, {"text": "two"})
    caller = bench.open()
    replies = [text_of(await caller.post(path, BODIES[path])) for _ in range(2)]
    assert [text for _, text in replies] == ["one", "two"]
    assert replies[0][0] != replies[1][0]
    assert [(turn.status, turn.adopted) for turn in caller.turns] == [("delivered", False), ("delivered", True)]
    check_ledger([caller.session], bench.log)


@WIRES
async def test_a_counted_retry_of_a_delivered_turn_is_the_same_turn(bench, path):
    bench.serve({"text": "one"}, {"text": "two"})
    caller = bench.open()
    first = text_of(await caller.post(path, BODIES[path], **{"x-stainless-retry-count": "0"}))
    again = text_of(await caller.post(path, {**BODIES[path], "stream": True}, **{"x-stainless-retry-count": "1"}))
    assert first == again
    assert len(caller.turns) == 1


REPLAYED = {
    CHAT: {"messages": USER, "tools": [CALCULATOR], "logprobs": True, "top_logprobs": 2},
    MESSAGES: {"messages": USER, "tools": [CALCULATOR_BLOCK], "max_tokens": 99},
    RESPONSES: {"input": USER, "tools": [{"type": "function", **CALCULATOR["function"]}]},
    COMPLETIONS: {"prompt": "1 + 2", "logprobs": 2, "max_tokens": 99},
}


@pytest.mark.parametrize("path", list(REPLAYED))
async def test_a_replay_is_the_reply_byte_for_byte(bench, path):
    bench.serve({"text": "<think>\nhm\n</think>\n\nI add." + call('{"a": 1}') + call("{}")}, {"text": "another"})
    caller = bench.open()
    first = await caller.post(path, REPLAYED[path])
    again = await caller.post(path, REPLAYED[path], **{"x-stainless-retry-count": "1"})
    assert (first.status_code, again.content) == (200, first.content)
    assert len(caller.turns) == 1


async def test_codexs_resend_of_a_cut_stream_has_other_metadata_and_the_same_items(bench):
    engine = gated(bench, "one", " two", " three")
    caller = bench.open()
    body = {"input": USER, "stream": True, "store": False, "prompt_cache_key": "k"}
    client = await RawClient.post(caller, RESPONSES, {**body, "client_metadata": {"turn": "1"}})
    await until(lambda: engine.running)
    engine.gate.release()
    seen = await client.read_until(b'"one"')
    client.reset()
    await until(lambda: caller.session.counters["clients_left"])
    resend = asyncio.create_task(caller.post(RESPONSES, {**body, "client_metadata": {"turn": "2"}}))
    await until(lambda: caller.session.counters["resends.attached"])
    engine.sample(2)
    frames = events((await resend).content)
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    final = frames[-1][1]["response"]
    assert frames[-1][0] == "response.completed"
    assert final["output"][0]["content"][0]["text"] == "one two three"
    assert final["id"].encode() in seen
    assert final["output"][0]["id"].encode() in seen
    assert [turn.status for turn in caller.turns] == ["delivered"]


async def test_what_has_no_say_in_the_sample_does_not_make_a_request_another(bench):
    """Codex sends other metadata with the resend of a stream that was cut; Claude Code moves its cache marks."""
    engine = gated(bench, "one", " two")
    caller = bench.open()
    await cut(bench, caller, CHAT, engine, metadata={"attempt": "1"}, stream_options={"include_usage": True})
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    body = {"prompt_cache_key": "k", "metadata": {"attempt": "2"}, "messages": [{"content": parts, "role": "user"}]}
    resend = asyncio.create_task(caller.post(CHAT, body))
    await until(lambda: caller.session.counters["resends.attached"])
    engine.gate.release()
    assert text_of(await resend)[1] == "one two"
    other = asyncio.create_task(caller.post(CHAT, {**body, "temperature": 0.5}))
    engine.sample(2)
    await other
    assert len(caller.turns) == 2, "another temperature is another request"


async def test_parallel_equal_requests_are_samples_of_their_own(bench):
    bench.serve({"text": "one", "delay_s": 0.02}, {"text": "two", "delay_s": 0.02}, {"text": "three", "delay_s": 0.02})
    caller = bench.open()
    replies = await asyncio.gather(*(caller.post(CHAT, BODIES[CHAT]) for _ in range(3)))
    assert {text_of(reply)[1] for reply in replies} == {"one", "two", "three"}
    assert [turn.status for turn in caller.turns] == ["delivered"] * 3
    check_ledger([caller.session], bench.log)


async def test_a_resend_that_overtakes_the_reset_replaces_the_first_request(bench):
    engine = gated(bench, "one", " two", grace_s=60.0)
    caller = bench.open()
    client = await RawClient.post(caller, MESSAGES, BODIES[MESSAGES])
    await until(lambda: len(engine.running) == 1)
    (first,) = engine.running
    resend = asyncio.create_task(caller.post(MESSAGES, BODIES[MESSAGES]))
    await until(lambda: len(engine.running) == 2)
    client.reset()
    await until(lambda: engine.aborted)
    assert engine.aborted == [first]
    await until(lambda: caller.turns)
    engine.sample(2)
    assert text_of(await resend)[1] == "one two"
    assert [(turn.status, turn.adopted) for turn in caller.turns] == [("aborted", False), ("delivered", True)]
    assert caller.session.counters["resends.superseded"] == 1


async def test_an_aborted_sample_is_not_given_to_a_resend(bench):
    engine = gated(bench, "one", " two", grace_s=0.0)
    caller = bench.open()
    await cut(bench, caller, MESSAGES, engine)
    await until(lambda: caller.turns and not engine.running)
    resend = asyncio.create_task(caller.post(MESSAGES, BODIES[MESSAGES]))
    engine.sample(2)
    assert text_of(await resend)[1] == "one two"
    assert [turn.status for turn in caller.turns] == ["aborted", "delivered"]
    assert bench.decode(caller.turns[0].token_ids) == "one", "what was sampled is kept"
    assert caller.session.counters["attempts.given_up"] == 1


async def test_the_grace_begins_again_with_each_client_that_leaves(bench):
    engine = gated(bench, "one", " two", " three", grace_s=60.0)
    caller = bench.open()
    await cut(bench, caller, MESSAGES, engine)
    for _ in range(3):
        await cut(bench, caller, MESSAGES)
    engine.sample(2)
    await until(lambda: caller.turns and not engine.running)
    assert text_of(await caller.post(MESSAGES, BODIES[MESSAGES]))[1] == "one two three"
    assert len(caller.turns) == engine.peak == 1


async def test_an_old_reply_is_not_given_to_a_resend_but_to_a_counted_retry(bench):
    caller = await undelivered(bench, "a new sample", replay_s=0.0)
    assert text_of(await caller.post(MESSAGES, BODIES[MESSAGES]))[0] != caller.turns[0].response_id
    caller = await undelivered(bench, replay_s=0.0)
    response = await caller.post(MESSAGES, BODIES[MESSAGES], **{"x-stainless-retry-count": "1"})
    assert text_of(response)[0] == caller.turns[0].response_id


@WIRES
async def test_an_idempotency_key_names_one_request(bench, path):
    bench.serve({"text": "one"}, {"text": "two"})
    caller = bench.open()
    key = {"idempotency-key": "abc"}
    first = text_of(await caller.post(path, BODIES[path], **key))
    assert text_of(await caller.post(path, {**BODIES[path], "stream": True}, **key)) == first
    other = await caller.post(path, {**BODIES[path], "messages": [{"role": "user", "content": "other"}]}, **key)
    assert (other.status_code, other.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "'abc'" in other.json()["error"]["message"]
    assert len(caller.turns) == 1


async def test_two_requests_under_one_idempotency_key_are_one_sample(bench):
    engine = gated(bench, "one")
    caller = bench.open()
    key = {"idempotency-key": "abc"}
    both = [asyncio.create_task(caller.post(CHAT, {**BODIES[CHAT], "stream": s}, **key)) for s in (True, False)]
    await until(lambda: caller.session.counters["resends.attached"])
    engine.sample(2)
    first, second = [text_of(await reply) for reply in both]
    assert first == second
    assert [turn.status for turn in caller.turns] == ["delivered"]


async def test_closing_a_session_ends_those_that_joined_too(bench):
    engine = gated(bench, "one", " two", grace_s=60.0)
    caller = bench.open()
    await cut(bench, caller, MESSAGES, engine)
    resend = asyncio.create_task(caller.post(MESSAGES, BODIES[MESSAGES]))
    await until(lambda: caller.session.counters["resends.attached"])
    await bench.sessions.close(caller.session.session_id)
    assert (await resend).status_code == 410
    assert [turn.status for turn in caller.turns] == ["aborted"]


async def test_a_reply_that_is_continued_was_received(bench):
    caller = await undelivered(bench, "more")
    more = [*USER, said("one two"), {"role": "user", "content": "more"}]
    assert (await caller.post(MESSAGES, {**BODIES[MESSAGES], "messages": more})).status_code == 200
    assert [(turn.status, turn.adopted) for turn in caller.turns] == [("delivered", True)] * 2
    assert caller.session.counters["adopted_though_undelivered"] == 1


async def test_items_of_a_cut_stream_in_the_next_request_open_a_branch(bench):
    """Codex puts the finished items of a stream that was cut into its next request."""
    engine = gated(bench, "one", " two", grace_s=0.0)
    caller = bench.open()
    await cut(bench, caller, CHAT, engine)
    await until(lambda: caller.turns and not engine.running)
    more = [*USER, said("one"), {"role": "user", "content": "go on"}]
    resend = asyncio.create_task(caller.post(CHAT, {"messages": more}))
    engine.sample(2)
    assert text_of(await resend)[1] == "one two"
    assert [turn.opened_by for turn in caller.turns] == ["start", "cut_turn_echoed"]


async def test_the_echo_of_a_turn_cut_in_mid_conversation_branches_where_it_was_cut(bench):
    engine = gated(bench, "one", " two", grace_s=0.0)
    caller = bench.open()
    engine.sample(2)
    await caller.post(CHAT, BODIES[CHAT])
    more = [*USER, said("one two"), {"role": "user", "content": "more"}]
    await cut(bench, caller, CHAT, engine, messages=more)
    await until(lambda: len(caller.turns) == 2 and not engine.running)
    resend = asyncio.create_task(
        caller.post(CHAT, {"messages": [*more, said("one"), {"role": "user", "content": "go on"}]})
    )
    engine.sample(2)
    assert text_of(await resend)[1] == "one two"
    first, aborted, last = caller.turns
    assert (aborted.status, last.status) == ("aborted", "delivered")
    assert aborted.parent_turn_id == last.parent_turn_id == first.turn_id
    assert caller.session.counters["forks.cut_turn_echoed"] == 1


async def test_several_choices_are_replayed_together(bench):
    bench.serve({"text": "one"}, {"text": "two"})
    caller = bench.open()
    first = (await caller.post(CHAT, {**BODIES[CHAT], "n": 2})).json()
    again = (await caller.post(CHAT, {**BODIES[CHAT], "n": 2}, **{"x-stainless-retry-count": "1"})).json()
    assert first == again
    assert sorted(choice["message"]["content"] for choice in first["choices"]) == ["one", "two"]
    assert [turn.status for turn in caller.turns] == ["delivered"] * 2


@pytest.mark.parametrize("fault", ["overloaded", "dead"])
async def test_the_sdks_own_retries_end_in_one_delivered_turn(bench, monkeypatch, fault):
    bench.serve({"error": fault}, {"error": fault}, {"text": "one"}, {"error": fault}, {"text": "two"})
    caller = bench.open()
    for client in (caller.openai, caller.anthropic):
        monkeypatch.setattr(type(client), "_calculate_retry_timeout", lambda *_: 0.0)
    reply = await caller.openai.with_options(max_retries=2).chat.completions.create(model="m", messages=USER)
    assert reply.choices[0].message.content == "one"
    message = await caller.anthropic.with_options(max_retries=2).messages.create(model="m", max_tokens=9, messages=USER)
    assert message.content[0].text == "two"
    assert [turn.status for turn in caller.turns] == ["failed", "failed", "delivered", "failed", "delivered"]
    assert [turn.client["x-stainless-retry-count"] for turn in caller.turns] == ["0", "1", "2", "0", "1"]
    check_ledger([caller.session], bench.log)


async def test_a_failed_sibling_is_owed_a_sample_of_its_own(bench):
    """Of two agents that ask the same, the one that was refused must not be given the other's reply."""
    bench.serve({"error": "overloaded"}, {"text": "one"}, {"text": "two"})
    caller = bench.open()
    assert (await caller.post(CHAT, BODIES[CHAT])).status_code == 503
    bodies = [await caller.post(CHAT, BODIES[CHAT], **{"x-stainless-retry-count": count}) for count in ("0", "1")]
    assert (await caller.post(CHAT, BODIES[CHAT], **{"x-stainless-retry-count": "1"})).status_code == 200
    assert [text_of(body)[1] for body in bodies] == ["one", "one"]
    bench.serve({"text": "one", "delay_s": 0.02}, {"error": "overloaded"}, {"text": "two"})
    caller = bench.open()
    first = asyncio.create_task(caller.post(CHAT, BODIES[CHAT]))
    await until(lambda: caller.session.attempts._under_way)
    assert (await caller.post(CHAT, BODIES[CHAT])).status_code == 503
    assert text_of(await first)[1] == "one"
    retried = await caller.post(CHAT, BODIES[CHAT], **{"x-stainless-retry-count": "1"})
    assert text_of(retried)[1] == "two"


async def test_a_failure_reaches_those_that_joined(bench):
    engine = gated(bench, "one", RuntimeError("lost"))
    caller = bench.open()
    await cut(bench, caller, MESSAGES, engine)
    resend = asyncio.create_task(caller.post(MESSAGES, BODIES[MESSAGES]))
    await until(lambda: caller.session.counters["resends.attached"])
    engine.gate.release()
    assert (await resend).status_code == 500
    assert [turn.status for turn in caller.turns] == ["aborted"]


async def test_a_closed_session_answers_resends_with_410_and_no_retry(bench):
    caller = await undelivered(bench)
    await bench.sessions.close(caller.session.session_id)
    for path in BODIES:
        response = await caller.post(path, BODIES[path], **{"x-stainless-retry-count": "1"})
        assert (response.status_code, response.headers["x-should-retry"]) == (410, "false")
    attempts = caller.session.attempts
    assert not attempts._latest
    assert not attempts._under_way


async def test_tale_3396_copies_of_a_request_that_waits_do_not_queue_behind_it(bench):
    engine = gated(bench, "one", max_session_requests=1, hold_s=60.0)
    caller = bench.open()
    other = asyncio.create_task(caller.post(CHAT, {"messages": [{"role": "user", "content": "other"}]}))
    await until(lambda: engine.running)
    for _ in range(5):
        await cut(bench, caller, CHAT, after=b"")
    last = asyncio.create_task(caller.post(CHAT, BODIES[CHAT]))
    await until(lambda: caller.session.counters["resends.attached"] == 5)
    engine.sample(2)
    assert [text_of(await reply)[1] for reply in (other, last)] == ["one", "one"]
    assert len(caller.turns) == 2


async def test_a_request_whose_client_left_the_queue_costs_no_engine_call(bench):
    engine = gated(bench, "one", max_session_requests=1, hold_s=60.0, grace_s=0.0)
    caller = bench.open()
    other = asyncio.create_task(caller.post(CHAT, {"messages": [{"role": "user", "content": "other"}]}))
    await until(lambda: engine.running)
    await cut(bench, caller, CHAT, after=b"")
    engine.gate.release()
    await other
    await until(lambda: not caller.session.attempts._under_way)
    assert len(caller.turns) == 1
    assert caller.session.counters["attempts.given_up"] == 1


@WIRES
async def test_the_wait_for_a_place_ends_in_the_overloaded_error(bench, path):
    engine = gated(bench, "one", max_session_requests=1, hold_s=0.01)
    caller = bench.open()
    first = asyncio.create_task(caller.post(CHAT, {"messages": [{"role": "user", "content": "other"}]}))
    await until(lambda: engine.running)
    response = await caller.post(path, BODIES[path])
    assert response.status_code == {CHAT: 503, MESSAGES: 529}[path]
    assert "gateway.max_session_requests" in response.json()["error"]["message"]
    assert caller.session.counters["queue_expired"] == 1
    engine.gate.release()
    assert (await first).status_code == 200


async def test_miles_1826_retries_never_poison_a_session(bench):
    bench.serve({"text": "fine"})
    caller = bench.open()
    messages, statuses = list(USER), []
    for turn in range(20):
        for retries in range(turn % 3 + 1):
            body = {"messages": messages, "stream": turn % 2 == 0}
            response = await caller.post(CHAT, body, **{"x-stainless-retry-count": str(retries)})
            statuses.append(response.status_code)
        messages = [*messages, said("fine"), {"role": "user", "content": json.dumps({"turn": turn})}]
    assert set(statuses) == {200}
    assert [turn.status for turn in caller.turns] == ["delivered"] * 20
    assert [turn.parent_turn_id for turn in caller.turns[1:]] == [turn.turn_id for turn in caller.turns[:-1]]
    check_ledger([caller.session], bench.log)
