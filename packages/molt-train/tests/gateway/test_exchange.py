"""What every request and response carries on any wire: the heads of streams, ids, what clients say of themselves."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .every_wire import CHAT, COMPLETIONS, EVERY, MESSAGES, RESPONSES

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAMPLING = pytest.mark.parametrize("wire", [CHAT, RESPONSES, MESSAGES, COMPLETIONS], ids=lambda wire: wire.path)
CODEX = {
    "session-id": "0198-aa",
    "thread-id": "0198-bb",
    "x-client-request-id": "0198-cc",
    "x-codex-turn-metadata": '{"turn_id":"0198-dd","window_number":2,"request_kind":"compaction"}',
}
OPENCODE = {"x-session-affinity": "ses_1", "x-session-id": "ses_1", "x-parent-session-id": "ses_0"}
CLAUDE_CODE = {
    "x-claude-code-session-id": "00000000-0000-4000-8000-000000000000",
    "anthropic-version": "2026-10-21",
    "anthropic-beta": "none-such-2099-01-01,another",
}


@SAMPLING
async def test_no_proxy_may_keep_or_change_a_stream(bench, wire):
    caller = bench.open()
    response = await caller.post(wire.path, wire.body(stream=True), **{"accept-encoding": "gzip, deflate, br, zstd"})
    heads = {key: value for key, value in response.headers.items() if key not in ("date", "request-id", "x-request-id")}
    assert heads == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "transfer-encoding": "chunked",
    }


@EVERY
async def test_every_answer_has_an_id_of_its_own_under_either_name(bench, wire):
    caller = bench.open()
    ids = set()
    for body, status in ((wire.body(), 200), (wire.body(stream=True), 200), (b"{", 400)):
        response = await caller.post(wire.path, body)
        assert response.status_code == status
        assert response.headers["request-id"] == response.headers["x-request-id"]
        ids.add(response.headers["request-id"])
    assert len(ids) == 3


@SAMPLING
@pytest.mark.parametrize("hints", [CODEX, OPENCODE, CLAUDE_CODE], ids=["codex", "opencode", "claude_code"])
async def test_what_a_harness_says_of_its_session_is_kept_word_for_word_and_opens_nothing(bench, wire, hints):
    caller, other = bench.open(), bench.open()
    assert (await caller.post(wire.path, wire.body(), **hints)).status_code == 200
    (turn,) = caller.turns
    assert hints.items() <= turn.client.items()
    assert "authorization" not in turn.client
    named = dict.fromkeys(hints, other.session.session_id)
    assert (await caller.post(wire.path, wire.body(), authorization="Bearer x", **named)).status_code == 401
    assert (await caller.post(wire.path, wire.body(), **named)).status_code == 200
    assert (len(caller.turns), other.turns) == (2, []), "whose turn it is, the URL and the key say"
