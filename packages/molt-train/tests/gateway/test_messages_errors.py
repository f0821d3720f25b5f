"""Anthropic Messages, errors: status, type, body and headers as the vendor's SDK and Claude Code know them."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import anthropic
import pytest

from .messages_calls import USER, post
from .replies import events

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROUTES = ["/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"]


def check(response, status, kind):
    """The body and the headers of an error."""
    body = response.json()
    assert response.status_code == status
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert len(response.content) <= 4096
    return body["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
async def test_every_error_of_a_route_has_the_vendors_body(bench, route):
    bench.serve({"text": "hello"}, max_body_bytes=2000)
    caller = bench.open()
    check(await caller.post(route, b"{"), 400, "invalid_request_error")
    check(await caller.post(route, {"messages": []}), 400, "invalid_request_error")
    check(await caller.post(route, {}, authorization="Bearer wrong"), 401, "authentication_error")
    check(await bench.http.get(caller.url + route, headers={"x-api-key": caller.key}), 405, "invalid_request_error")
    check(await caller.post(route, b" " * 3000), 413, "request_too_large")
    check(await caller.post(route, b"x", **{"content-encoding": "br"}), 415, "invalid_request_error")
    await bench.sessions.close(caller.session.session_id)
    closed = await caller.post(route, {"max_tokens": 9, "messages": USER})
    check(closed, 410, "invalid_request_error")
    assert closed.headers["x-should-retry"] == "false"
    assert (caller.turns, bench.log) == ([], [])


async def test_either_header_may_carry_the_key_and_one_that_matches_is_enough(bench):
    """Claude Code and older SDKs send `x-api-key`, newer ones a bearer; some both, with different values."""
    caller = bench.open()
    body = {"model": "m", "max_tokens": 9, "messages": USER}
    for headers in (
        {"x-api-key": caller.key},
        {"authorization": f"Bearer {caller.key}"},
        {"authorization": "Bearer of-another-vendor", "x-api-key": caller.key},
        {"authorization": f"Bearer {caller.key}", "x-api-key": "placeholder"},
    ):
        response = await bench.http.post(caller.url + "/v1/messages", json=body, headers=headers)
        assert response.status_code == 200
    other = bench.open()
    for headers in ({}, {"x-api-key": other.key}, {"authorization": f"Basic {caller.key}"}):
        check(
            await bench.http.post(caller.url + "/v1/messages", json=body, headers=headers), 401, "authentication_error"
        )


async def test_an_unknown_route_answers_in_the_vendors_shape_where_its_version_is_sent(bench):
    response = await bench.open().post("/v1/messages/batches", {}, **{"anthropic-version": "2026-10-21"})
    check(response, 404, "not_found_error")


@pytest.mark.parametrize("error", ["overloaded", "dead"])
async def test_an_engine_without_room_is_overloaded_and_says_when_to_come_again(bench, error):
    """529, which Claude Code and the SDK retry; 429 would be final for others."""
    bench.serve({"text": "", "error": error})
    caller = bench.open()
    response = await post(caller)
    check(response, 529, "overloaded_error")
    assert int(response.headers["retry-after"]) >= 1
    with pytest.raises(anthropic.APIStatusError) as caught:
        await caller.anthropic.messages.create(model="m", max_tokens=9, messages=USER)
    assert caught.value.status_code == 529
    assert caught.value.request_id == caught.value.body["request_id"]


async def test_an_error_before_the_first_byte_of_a_stream_has_its_status(bench):
    bench.serve({"text": "", "error": "overloaded"})
    check(await post(bench.open(), stream=True), 529, "overloaded_error")


async def test_an_error_behind_the_first_byte_is_an_event(bench):
    bench.serve({"text": "some words", "error": "overloaded", "chunks": [1]})
    response = await post(bench.open(), stream=True)
    assert response.status_code == 200
    frames = events(response.content)
    name, data = frames[-1]
    assert (name, data["error"]["type"], data["request_id"]) == (
        "error",
        "overloaded_error",
        response.headers["request-id"],
    )
    assert [name for name, _ in frames].count("message_stop") == 0


async def test_a_prompt_that_fills_the_window_is_too_long_in_the_vendors_words(bench):
    """Claude Code compacts when it reads them."""
    bench.serve({"text": "hello"}, max_model_len=30)
    caller = bench.open()
    messages = [{"role": "user", "content": "x " * 100}]
    count = (await caller.anthropic.messages.count_tokens(model="m", messages=messages)).input_tokens
    message = check(await post(caller, messages=messages), 400, "invalid_request_error")
    assert message == f"prompt is too long: {count} tokens > 30 maximum"
    assert caller.turns == []


async def test_any_model_name_is_accepted_and_given_back(bench):
    caller = bench.open()
    for name in ("claude-opus-5", "x" * 300):
        assert (await post(caller, model=name)).json()["model"] == name
