"""Refusals, each in its wire's own shape, and none of them in a recording."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import anthropic
import openai
import pytest

from .replies import CALCULATOR

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def chat_error(response):
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return response.status_code, body["error"]


def messages_error(response):
    body = response.json()
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"]
    return response.status_code, body["error"]


async def test_either_header_opens_a_session_and_one_right_key_is_enough(bench):
    caller = bench.open()
    right, wrong = f"Bearer {caller.key}", "Bearer wrong"
    for headers, status in [
        ({"authorization": right}, 200),
        ({"authorization": "", "x-api-key": caller.key}, 200),
        ({"authorization": wrong, "x-api-key": caller.key}, 200),
        ({"authorization": right, "x-api-key": "wrong"}, 200),
        ({"authorization": wrong}, 401),
        ({"authorization": "", "x-api-key": ""}, 401),
        ({"authorization": f"Basic {caller.key}"}, 401),
        ({"authorization": f"Bearer {bench.open().key}"}, 401),
    ]:
        response = await caller.post(CHAT, {"messages": USER}, **headers)
        assert response.status_code == status, headers


async def test_a_closed_session_is_gone_for_good(bench):
    caller = bench.open()
    await caller.openai.chat.completions.create(model="m", messages=USER)
    await bench.sessions.close(caller.session.session_id)
    assert await bench.sessions.close(caller.session.session_id) is caller.session
    status, error = chat_error(chat := await caller.post(CHAT, {"messages": USER}))
    assert (status, error["code"], chat.headers["x-should-retry"]) == (410, "session_closed", "false")
    status, error = messages_error(messages := await caller.post(MESSAGES, {"messages": USER}))
    assert (status, error["type"], messages.headers["x-should-retry"]) == (410, "invalid_request_error", "false")
    with pytest.raises(openai.APIStatusError) as raised:
        await caller.openai.copy(max_retries=5).chat.completions.create(model="m", messages=USER)
    assert raised.value.status_code == 410
    assert (len(caller.turns), caller.session.state) == (1, "closed")
    bench.sessions.forget(caller.session.session_id)
    assert (await caller.post(CHAT, {"messages": USER})).status_code == 401


async def test_unknown_routes_and_methods(bench):
    caller = bench.open()
    headers = {"authorization": f"Bearer {caller.key}"}
    for path in ("/v1/embeddings", "/v2/models", "/v1/%2e%2e/%2e%2e/api", "/v1/chat/completions/x"):
        response = await bench.http.get(caller.url + path, headers=headers)
        assert chat_error(response)[0] == 404, path
    response = await bench.http.get(caller.url + "/v1/nothing", headers={**headers, "anthropic-version": "2023-06-01"})
    assert messages_error(response)[0] == 404
    assert chat_error(await bench.http.get(caller.url + CHAT, headers=headers))[0] == 405
    assert messages_error(await bench.http.get(caller.url + MESSAGES, headers=headers))[0] == 405


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'{"messages": "x\xff"}', "messages"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "messages[0]"),
        (b'{"messages": ' + b"[" * 100_000, None),
        ({"messages": []}, "messages"),
        ({}, None),
        ({"messages": "hi"}, "messages"),
        ({"messages": [*USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"messages": USER, "temperature": -1}, "temperature"),
        ({"messages": USER, "top_p": 0}, "top_p"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "n": 0}, "n"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": USER, "tools": [CALCULATOR, {"type": "web"}]}, "tools[1]"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function.name"),
        ({"messages": USER, "tools": [CALCULATOR], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"messages": USER, "tools": [CALCULATOR], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "messages"),
    ],
)
async def test_a_bad_chat_request_names_its_field(bench, body, param):
    caller = bench.open()
    response = await caller.post(CHAT, body)
    status, error = chat_error(response)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(response.content) < 4096
    assert (caller.turns, bench.log) == ([], [])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 5}, "missing required field `messages`"),
        ({"messages": USER}, "missing required field `max_tokens`"),
        ({"messages": USER, "max_tokens": -1}, "max_tokens: "),
        ({"messages": [{"role": "tool", "content": "x"}], "max_tokens": 5}, "messages[0].role: "),
        ({"messages": USER, "max_tokens": 5, "system": 3}, "system "),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 5},
            "messages[1].content[0].source: ",
        ),
        (
            {"messages": USER, "max_tokens": 5, "output_config": {"format": {"type": "json_schema"}}},
            "output_config.format",
        ),
        ({"messages": USER, "max_tokens": 5, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: "),
    ],
)
async def test_a_bad_messages_request_says_what_is_wrong(bench, body, message):
    caller = bench.open()
    status, error = messages_error(await caller.post(MESSAGES, body))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
    assert (caller.turns, bench.log) == ([], [])


async def test_a_prompt_that_fills_the_window_is_refused_in_the_words_clients_know(bench):
    bench.serve({"text": "x"}, max_model_len=40)
    caller = bench.open()
    long = [{"role": "user", "content": "x" * 100}]
    status, error = chat_error(await caller.post(CHAT, {"messages": long}))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    status, error = messages_error(await caller.post(MESSAGES, {"messages": long, "max_tokens": 5}))
    tokens = bench.renderer.count(long, [])
    assert (status, error["message"]) == (400, f"prompt is too long: {tokens} tokens > 40 maximum")
    assert caller.turns == []


async def test_a_fault_of_our_own_is_told_and_logged(bench, monkeypatch, caplog):
    caller = bench.open()
    monkeypatch.setattr(type(caller.session.tree), "match", lambda *args: 1 / 0)
    status, error = chat_error(await caller.post(CHAT, {"messages": USER}))
    assert (status, "division" in error["message"]) == (500, False)
    assert "ZeroDivisionError" in caplog.text


async def test_models_in_the_shape_of_either_vendor(bench):
    caller = bench.open()
    listed = [model async for model in caller.openai.models.list()]
    assert [(model.id, model.max_model_len) for model in listed] == [("policy", 32768)]
    assert (await caller.openai.models.retrieve("policy")).id == "policy"
    listed = [model async for model in caller.anthropic.models.list()]
    assert [(model.id, model.max_model_len) for model in listed] == [("policy", 32768)]
    assert (await caller.anthropic.models.retrieve("policy")).max_input_tokens == 32768
    with pytest.raises(openai.NotFoundError):
        await caller.openai.models.retrieve("other")
    with pytest.raises(anthropic.NotFoundError):
        await caller.anthropic.models.retrieve("other")
