"""Which request a resend is, to the field; and what it reads where it joins a sample at its very end."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio

import pytest

from .conftest import until
from .gated import GatedEngine
from .replies import CALCULATOR, call, events
from .sockets import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
RETRY = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"},
        {"messages": [{"role": "system", "content": "S"}, *USER]},
        {"messages": [{"role": "user", "content": "hi "}]},
        {"tools": [CALCULATOR, CALCULATOR | {"function": CALCULATOR["function"] | {"name": "other"}}]},
        {"tool_choice": "required"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
        {"temperature": 0.5},
        {"max_tokens": 98},
        {"stop": ["x"]},
        {"logit_bias": {"5": 1}},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 3},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
    ],
    ids=str,
)
async def test_what_has_a_say_in_the_sample_makes_a_request_another(bench, change):
    caller = bench.open()
    body = {"messages": USER, "max_tokens": 99, "tools": [CALCULATOR]}
    replies = [await caller.post(CHAT, asked, **RETRY) for asked in (body, body | change, body, body | change)]
    ids = [reply.json()["id"] for reply in replies]
    assert ids[0] == ids[2] != ids[1] == ids[3]
    assert caller.session.counters["resends.replayed"] == 2


async def test_the_same_request_on_another_wire_is_another(bench):
    caller = bench.open()
    body = {"model": "m", "messages": USER, "max_tokens": 99}
    ids = [(await caller.post(path, body, **RETRY)).json()["id"] for path in (CHAT, MESSAGES, CHAT)]
    assert (ids[0], ids[1][:4]) == (ids[2], "msg_")
    assert [turn.wire for turn in caller.turns] == ["chat", "messages"]


async def test_which_of_two_equal_turns_is_continued_makes_a_request_another(bench):
    """Siblings of best-of-n that read the same differ in the ids of their calls only."""
    bench.serve({"text": call('{"a": 1}')}, {"text": call('{"a": 1}')}, {"text": "3"})
    caller = bench.open()
    body = {"messages": USER, "tools": [CALCULATOR]}
    choices = (await caller.post(CHAT, body | {"n": 2})).json()["choices"]
    ids = []
    for message in [choice["message"] for choice in choices] * 2:
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        response = await caller.post(CHAT, body | {"messages": [*USER, message, result]}, **RETRY)
        ids.append(response.json()["id"])
    assert ids[:2] == ids[2:]
    one, two, *continuing = caller.turns
    assert [turn.parent_turn_id for turn in continuing] == [one.turn_id, two.turn_id]


class LingeringEngine(GatedEngine):
    """Ends a while after its last token."""

    async def stream(self, request):
        async for chunk in super().stream(request):
            yield chunk
        await self.gate.acquire()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_resend_that_joins_when_all_is_sampled_reads_it_once(bench, num_choices):
    """Tokens that the reply so far has are not handed on a second time."""
    engine = LingeringEngine(bench.encode("one"), bench.encode(" two"))
    bench.serve(engine=engine)
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {"messages": USER, "stream": True, "n": num_choices})
    await until(lambda: len(engine.running) == num_choices)
    engine.sample(2 * num_choices)
    await until(lambda: not engine.running)
    client.reset()
    await until(lambda: caller.session.counters["clients_left"])
    body = {"messages": USER, "stream": True, "n": num_choices}
    resend = asyncio.create_task(caller.post(CHAT, body))
    await until(lambda: caller.session.counters["resends.attached"])
    engine.sample(num_choices)
    texts = dict.fromkeys(range(num_choices), "")
    for _, data in events((await resend).content)[:-1]:
        texts[data["choices"][0]["index"]] += data["choices"][0]["delta"].get("content", "")
    assert texts == dict.fromkeys(range(num_choices), "one two")
