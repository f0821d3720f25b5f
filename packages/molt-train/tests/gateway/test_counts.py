"""Counters: a request that is refused, or only counts tokens, leaves none; what is accepted is counted once."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .every_wire import CHAT, COMPLETIONS, COUNT, MESSAGES
from .replies import CALCULATOR_BLOCK

pytestmark = pytest.mark.asyncio(loop_scope="session")

ODD = {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "nobody_knows"}]}
TOOLS = [CALCULATOR_BLOCK, {"type": "nobody_20990101", "name": "nobody"}]
FIRST = {"messages": [ODD], "tools": TOOLS}
COUNTED = {"block_dropped_unknown": 1, "tool_without_schema_omitted": 1}
MORE = {"role": "user", "content": "more"}


async def test_what_is_counted_is_counted_once_however_often_it_is_sent(bench):
    caller = bench.open()
    assert (await caller.post(MESSAGES.path, MESSAGES.body(**FIRST))).status_code == 200
    assert caller.session.counters == COUNTED
    echoed = [ODD, {"role": "assistant", "content": "hello"}, MORE]
    assert (await caller.post(MESSAGES.path, MESSAGES.body(messages=echoed, tools=TOOLS))).status_code == 200
    assert caller.session.counters == COUNTED
    # Another system text: the whole history is rendered again.
    again = MESSAGES.body(messages=echoed, tools=TOOLS, system="Be brief.")
    assert (await caller.post(MESSAGES.path, again)).status_code == 200
    assert caller.session.counters == COUNTED
    assert [turn.opened_by for turn in caller.turns] == ["start", None, "system_changed"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [ODD, {"role": "user", "content": 3}]},
        {"messages": [ODD, {"role": "user", "content": "long " * 2000}]},
        {"tools": [*TOOLS, {"name": 3}]},
        {"tool_choice": {"type": "tool", "name": "other"}},
    ],
    ids=["bad message", "too long", "bad tool", "no such tool"],
)
async def test_a_refused_request_counts_nothing_and_its_correction_all(bench, fields):
    bench.serve({"text": "hello"}, max_model_len=1000)
    caller = bench.open()
    body = MESSAGES.body(**{**FIRST, **fields})
    assert (await caller.post(MESSAGES.path, body)).status_code == 400
    assert (caller.session.counters, caller.turns) == ({}, [])
    assert (await caller.post(MESSAGES.path, MESSAGES.body(**FIRST))).status_code == 200
    assert caller.session.counters == COUNTED


async def test_counting_tokens_and_asking_for_none_count_nothing(bench):
    caller = bench.open()
    strict = [{**CALCULATOR_BLOCK, "strict": True}, TOOLS[1]]
    assert (await caller.post(COUNT.path, COUNT.body(messages=[ODD], tools=strict))).status_code == 200
    none = MESSAGES.body(messages=[ODD], tools=TOOLS, max_tokens=0)
    assert (await caller.post(MESSAGES.path, none)).status_code == 200
    assert (caller.session.counters, caller.turns) == ({}, [])
    assert (await caller.post(MESSAGES.path, MESSAGES.body(**FIRST))).status_code == 200
    assert caller.session.counters == COUNTED


async def test_notes_of_a_refused_call_are_not_counted(bench):
    bench.serve({"text": "hello"}, max_model_len=1000)
    caller = bench.open()
    long = [{"role": "user", "content": "long " * 2000}]
    for messages, status, counted in ((long, 400, {}), (None, 200, {"ignored.verbosity": 1})):
        body = CHAT.body(**({"messages": messages} if messages else {}), verbosity="low", max_tokens=5)
        assert (await caller.post(CHAT.path, body)).status_code == status
        assert caller.session.counters == counted


async def test_of_several_prompts_one_that_is_too_long_refuses_them_all_without_a_count(bench):
    bench.serve({"text": "hello"}, max_model_len=100)
    caller = bench.open()
    body = COMPLETIONS.body(prompt=["short", "long " * 200], max_tokens=1000)
    assert (await caller.post(COMPLETIONS.path, body)).status_code == 400
    assert (caller.session.counters, caller.turns) == ({}, [])


async def test_a_resend_that_is_answered_by_the_first_sample_counts_nothing_more(bench):
    caller = bench.open()
    for _ in range(2):
        response = await caller.post(MESSAGES.path, MESSAGES.body(**FIRST), **{"idempotency-key": "one"})
        assert response.status_code == 200
    assert caller.session.counters == {**COUNTED, "resends.replayed": 1}
    assert len(caller.turns) == 1
