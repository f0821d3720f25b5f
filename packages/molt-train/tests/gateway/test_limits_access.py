"""Who is let in, where to, and what the others are told; on every wire."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import hmac
import logging
from types import SimpleNamespace

import anthropic
import openai
import pytest

from molt.agents.protocol import SamplingParams
from molt.train.gateway import sessions

from .every_wire import CHAT, EVERY, MESSAGES

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_no_key_looks_like_an_option_of_a_command_line():
    book = sessions.Sessions()
    opened = [book.open(sampling=SamplingParams(), policy="client") for _ in range(1000)]
    secrets = [secret for session, key in opened for secret in (session.session_id, key)]
    assert len(set(secrets)) == 2000
    assert all(secret[0] != "-" and len(secret) >= 32 for secret in secrets)


@EVERY
async def test_a_wrong_key_an_unknown_session_and_anothers_key_get_one_answer(bench, unmoved, wire):
    other, headers = bench.open(), {"content-type": "application/json"}
    answers = set()
    for session_id, key in (
        (unmoved.session.session_id, "wrong"),
        (unmoved.session.session_id, other.key),
        ("unknown", unmoved.key),
        ("unknown", "-"),
        ("unknown", "k" * 50_000),
        ("x" * 50_000, unmoved.key),
        ("%00", unmoved.key),
        ("\u00e9", unmoved.key),
    ):
        url = f"{bench.url}/s/{session_id}{wire.path}"
        for auth in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            response = await bench.http.post(url, content=wire.body(), headers=headers | auth)
            answers.add(wire.check(response))
            assert response.headers["www-authenticate"] == "Bearer"
    assert answers == {(401, None, "the session is unknown, or the key is not its key")}
    for client, error in (
        (unmoved.openai, openai.AuthenticationError),
        (unmoved.anthropic, anthropic.AuthenticationError),
    ):
        with pytest.raises(error):
            await client.copy(api_key="wrong").models.list()


@EVERY
async def test_either_of_two_different_keys_may_be_the_sessions(bench, wire):
    """free-claude-code#902, vllm#51572, new-api#5491: clients send either header, and some both with two values."""
    caller = bench.open()
    for right, placeholder in (("authorization", "x-api-key"), ("x-api-key", "authorization")):
        value = {"authorization": f"Bearer {caller.key}", "x-api-key": caller.key}[right]
        headers = {"content-type": "application/json", right: value}
        for extra in ({}, {placeholder: "Bearer none"}):
            response = await bench.http.post(caller.url + wire.path, content=wire.body(), headers=headers | extra)
            assert response.status_code == 200


async def test_every_key_is_compared_in_constant_time_whether_the_session_exists_or_not(bench, monkeypatch):
    compared = []

    def compare(given, kept):
        compared.append((len(given), len(kept)))
        return hmac.compare_digest(given, kept)

    monkeypatch.setattr(sessions, "hmac", SimpleNamespace(compare_digest=compare))
    caller = bench.open()
    for session_id in (caller.session.session_id, "unknown"):
        for headers in ({"authorization": f"Bearer {caller.key}", "x-api-key": "x"}, {"authorization": "Bearer x"}):
            await bench.http.post(f"{bench.url}/s/{session_id}{CHAT.path}", content=CHAT.body(), headers=headers)
    assert compared == [(32, 32)] * 6, "of digests, which are as long whatever was given"


@EVERY
async def test_a_closed_session_tells_only_its_own_key_so(bench, wire):
    caller = bench.open()
    await bench.sessions.close(caller.session.session_id)
    assert (await wire.refused(caller, wire.body()))[0] == 410
    headers = {"x-api-key": "wrong"}
    assert wire.check(await bench.http.post(caller.url + wire.path, content=wire.body(), headers=headers))[0] == 401


@EVERY
async def test_another_method_is_told_which_is_served(bench, unmoved, wire):
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        headers = {"authorization": f"Bearer {unmoved.key}"}
        response = await bench.http.request(method, unmoved.url + wire.path, headers=headers)
        assert (wire.check(response)[0], response.headers["allow"]) == (405, "POST")
    response = await bench.http.options(unmoved.url + wire.path, headers={"origin": "http://x"})
    assert (response.status_code, response.content) == (204, b"")
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("anthropic_version", [{}, {"anthropic-version": "2023-06-01"}])
async def test_routes_of_no_wire_answer_in_the_shape_that_the_client_speaks(bench, unmoved, anthropic_version):
    shape = MESSAGES if anthropic_version else CHAT
    headers = {"authorization": f"Bearer {unmoved.key}", **anthropic_version}
    for path in (
        "/v1/embeddings",
        "/v2/models",
        "/../../api/v1/status",
        "/..%2f..%2fapi/v1/status",
        "/v1/%2e%2e/%2e%2e/api/v1/status",
        "//v1/chat/completions",
        "/v1//messages",
        "/v1/messages/..",
        "/v1/messages%00",
        "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
        "/" + "x" * 50_000,
        "/%ff%fe",
    ):
        response = await bench.http.get(unmoved.url + path.replace("..", "%2e%2e"), headers=headers)
        assert shape.check(response)[0] == 404, path
    response = await bench.http.delete(unmoved.url + "/v1/models", headers=headers)
    assert (shape.check(response)[0], response.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["", "/", "/api/hello", "?beta=true", "/api/hello?x=%00"])
async def test_reachability_needs_no_key_and_shows_no_session(bench, unmoved, path):
    """headroom#2032 (HEAD of the base URL) and CLIProxyAPI#5905 (`/api/hello`): without a 200 the agent gives up."""
    answers = set()
    for url in (unmoved.url, f"{bench.url}/s/unknown"):
        for method in ("HEAD", "GET"):
            response = await bench.http.request(method, url + path, headers={"user-agent": "Bun/1.4.0"})
            headers = {k: v for k, v in response.headers.items() if k not in ("date", "request-id", "x-request-id")}
            answers.add((response.status_code, response.content, str(headers)))
    assert len(answers) == 1
    assert answers.pop()[:2] == (200, b"")


@EVERY
async def test_query_strings_mean_nothing(bench, wire):
    caller = bench.open()
    headers = {"authorization": f"Bearer {caller.key}"}
    for query in ("beta=true", "key=x&session=y", "%00", "/../../api", "a" * 10_000):
        response = await bench.http.post(f"{caller.url}{wire.path}?{query}", content=wire.body(), headers=headers)
        assert response.status_code == 200


@EVERY
async def test_no_host_that_a_client_names_counts(bench, unmoved, wire):
    headers = {"host": "evil.example/s/x?", "x-forwarded-host": "evil.example", "content-type": "application/json"}
    response = await bench.http.post(unmoved.url + wire.path, content=wire.body(), headers=headers)
    assert wire.check(response)[0] == 401
    assert "evil" not in response.text + str(response.headers)


async def test_keys_are_in_no_log_whatever_fails(bench, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "molt")
    caplog.set_level(logging.DEBUG, "uvicorn")
    caller = bench.open()
    key = caller.key
    headers = {"authorization": f"Bearer {key}", "x-api-key": key}
    for body in (b"{", CHAT.body(), CHAT.body(model=3)):
        await bench.http.post(caller.url + CHAT.path, content=body, headers=headers)
    await bench.http.post(f"{bench.url}/s/unknown/v1/messages", content=b"{}", headers=headers)
    monkeypatch.setattr(type(caller.session.tree), "match", lambda *args: 1 / 0)
    assert (await bench.http.post(caller.url + CHAT.path, content=CHAT.body(), headers=headers)).status_code == 500
    assert "ZeroDivisionError" in caplog.text
    assert key not in caplog.text
