"""The turn tree over whole sessions: what other trainers lost, doubled or refused, and what becomes of it here."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio
import json
from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.gateway.call import ModelCall
from molt.train.gateway.history import MessageCache, Paths, Tools
from molt.train.gateway.routes import WIRES
from molt.train.trajectory import build_trajectory

from .replies import CALCULATOR, CALCULATOR_BLOCK, call

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = {"role": "user", "content": "1 + 2?"}
MORE = {"role": "user", "content": "more"}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def said(text):
    return {"role": "assistant", "content": text}


async def chat(caller, *messages, **fields):
    response = await caller.post(CHAT, {"messages": list(messages), **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


async def ask(caller, *messages, **fields):
    body = {"max_tokens": 99, "tools": [CALCULATOR_BLOCK], "messages": list(messages), **fields}
    response = await caller.post(MESSAGES, body)
    assert response.status_code == 200, response.text
    return response.json()["content"]


def parents(caller):
    order = {turn.turn_id: index for index, turn in enumerate(caller.turns)}
    return [order[turn.parent_turn_id] if turn.parent_turn_id else turn.opened_by for turn in caller.turns]


def trajectory(caller):
    return build_trajectory(caller.session.session_id, caller.turns)


REASONED = "<think>\nAdd them.\n</think>\n\nIt is 3."
ECHOES = {
    "left out": {"content": "It is 3."},
    "as its own field": {"content": "It is 3.", "reasoning": "other words"},
    "in marks": {"content": "<think>\nAdd them.\n</think>\n\nIt is 3."},
    "in marks, edited": {"content": "<think>Short.</think>It is 3."},
    "in other marks": {"content": "<thinking>Add them.</thinking>\nIt is 3."},
    "in front, bare": {"content": "Add them.\n\nIt is 3."},
    "as parts": {"content": [{"type": "text", "text": "Add them."}, {"type": "text", "text": "It is 3."}]},
}


@pytest.mark.parametrize("echo", list(ECHOES))
async def test_slime_2335_reasoning_echoed_in_any_form_is_the_turn(bench, echo):
    bench.serve({"text": REASONED}, {"text": "ok"})
    caller = bench.open()
    await chat(caller, USER)
    await chat(caller, USER, {"role": "assistant", **ECHOES[echo]}, MORE)
    assert parents(caller) == ["start", 0]
    bench.check_exact(caller)


async def test_reasoning_put_in_front_of_the_text_of_a_call_is_the_turn(bench):
    bench.serve({"text": REASONED + call("{}")}, {"text": "ok"})
    caller = bench.open()
    message = await chat(caller, USER, tools=[CALCULATOR])
    message["content"] = "Add them. It is 3."
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    await chat(caller, USER, message, result, tools=[CALCULATOR])
    assert parents(caller) == ["start", 0]


async def test_slime_2288_verl_6719_areal_1290_eight_rollouts_stay_eight_rows(bench):
    bench.serve({"text": REASONED + call('{"a":  1}')}, {"text": " It  is 3. "}, {"token_ids": [72, 71, 72, 71]})
    callers = [bench.open() for _ in range(8)]

    async def rollout(caller):
        messages = [SYSTEM, USER]
        for turn in range(8):
            reply = await chat(caller, *messages, tools=[CALCULATOR])
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in reply.get("tool_calls", [])]
            messages += [reply, *results, {"role": "user", "content": f"turn {turn}"}]

    await asyncio.gather(*(rollout(caller) for caller in callers))
    for caller in callers:
        built = trajectory(caller)
        assert [segment.opened_by for segment in built.segments] == ["start"]
        assert sum(built.segments[0].action_mask) == sum(len(turn.token_ids) for turn in caller.turns)
        bench.check_exact(caller)


async def test_nemo_rl_1812_prime_rl_1334_a_rewritten_prefix_opens_a_branch_and_the_run_goes_on(bench):
    bench.serve({"text": "one"})
    caller = bench.open()
    await chat(caller, SYSTEM, USER)
    await chat(caller, SYSTEM, {"role": "user", "content": "1 + 2 ?"}, said("one"), MORE)
    await chat(caller, SYSTEM, USER, said("One."), MORE)
    await chat(caller, SYSTEM, USER, said("one"), MORE)
    assert parents(caller) == ["start", "history_rewritten", "history_rewritten", 0]
    assert len(trajectory(caller).segments) == 3


async def test_foldagent_3_skyrl_123_a_shared_prefix_is_trained_once(bench):
    bench.serve({"text": "a plan"}, {"text": "left"}, {"text": "right"}, {"text": "on"})
    caller = bench.open()
    shared = [SYSTEM, USER, said("a plan")]
    await chat(caller, SYSTEM, USER)
    for branch in ("left", "right"):
        await chat(caller, *shared, {"role": "user", "content": f"go {branch}"})
    await chat(caller, *shared, {"role": "user", "content": "go left"}, said("left"), MORE)
    built = trajectory(caller)
    assert parents(caller) == ["start", 0, 0, 1]
    assert sum(sum(segment.action_mask) for segment in built.segments) == sum(len(t.token_ids) for t in caller.turns)
    assert built.counters["shared_tokens"] == len(caller.turns[0].token_ids)


async def test_opencode_47831_a_call_renamed_to_invalid_is_the_turn_that_issued_it(bench):
    bench.serve({"text": call('{"a": 1}')}, {"text": "ok"})
    caller = bench.open()
    message = await chat(caller, USER, tools=[CALCULATOR])
    tool_call = message["tool_calls"][0]
    tool_call["function"] = {"name": "invalid", "arguments": json.dumps({"tool": "calculator", "error": "bad"})}
    result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "no such tool"}
    await chat(caller, USER, message, result, tools=[CALCULATOR])
    assert parents(caller) == ["start", 0]
    assert caller.session.counters["echo_differs"] == 1


async def test_claude_codes_unparsed_input_is_the_turn_that_was_cut(bench):
    bench.serve({"text": call('{"a": 1')[:-16], "finish_reason": "length"}, {"text": "ok"})
    caller = bench.open()
    content = await ask(caller, USER)
    (block,) = [block for block in content if block["type"] == "tool_use"]
    block["input"] = {"__unparsedToolInput": '{"a": 1'}
    result = {"type": "tool_result", "tool_use_id": block["id"], "is_error": True, "content": "not JSON"}
    await ask(caller, USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]})
    assert parents(caller) == ["start", 0]
    bench.check_exact(caller)


async def test_compaction_opens_a_row_and_may_repeat_a_body(bench):
    bench.serve({"text": "one"})
    caller = bench.open()
    await chat(caller, SYSTEM, USER)
    await chat(caller, SYSTEM, USER, said("one"), MORE)
    summary = {"role": "user", "content": "What was said: one."}
    for _ in range(2):
        await chat(caller, SYSTEM, summary)
    await chat(caller, SYSTEM, summary, said("one"), MORE)
    assert parents(caller) == ["start", 0, "new_conversation", "resampled", 3]
    trained = [segment.trained for segment in trajectory(caller).segments]
    assert trained == [True, False, True], "of two equal samples, the one that was continued"


async def test_parallel_sub_agents_are_leaves_of_one_rollout(bench):
    bench.serve({"text": "fine", "delay_s": 0.005})
    caller = bench.open()

    async def agent(number):
        first = {"role": "user", "content": f"task {number}"}
        await chat(caller, SYSTEM, first, tools=[CALCULATOR])
        await chat(caller, SYSTEM, first, said("fine"), MORE, tools=[CALCULATOR])

    await asyncio.gather(*(agent(number) for number in range(4)))
    built = trajectory(caller)
    assert sorted(segment.opened_by for segment in built.segments) == ["new_conversation"] * 3 + ["start"]
    assert all(segment.trained and len(segment.turn_ids) == 2 for segment in built.segments)
    bench.check_exact(caller)


@pytest.mark.parametrize("place", ["first", "between", "last"])
async def test_opencodes_title_call_is_auxiliary_wherever_it_comes(bench, place):
    bench.serve({"text": "fine"})
    caller = bench.open()

    async def title(when):
        if place == when:
            await chat(caller, {"role": "system", "content": "You write titles."}, USER)

    await title("first")
    await chat(caller, SYSTEM, USER, tools=[CALCULATOR])
    await title("between")
    await chat(caller, SYSTEM, USER, said("fine"), MORE, tools=[CALCULATOR])
    await title("last")
    auxiliary = {"first": [True, False, False], "between": [False, True, False], "last": [False, False, True]}
    assert [turn.auxiliary for turn in caller.turns] == auxiliary[place]
    segments = {segment.untrained_reason: segment for segment in trajectory(caller).segments}
    assert set(segments) == {None, "auxiliary"}
    assert len(segments[None].turn_ids) == 2


async def test_a_raw_prompt_beside_an_agent_with_tools_is_no_side_call(bench):
    bench.serve({"text": "fine"})
    caller = bench.open()
    await chat(caller, SYSTEM, USER, tools=[CALCULATOR])
    assert (await caller.post("/v1/completions", {"prompt": "raw"})).status_code == 200
    await chat(caller, {"role": "system", "content": "You write titles."}, USER)
    assert [turn.auxiliary for turn in caller.turns] == [False, False, True]


async def test_beside_a_conversation_without_tools_nothing_tells_a_title_call_from_a_critic(bench):
    bench.serve({"text": "fine"})
    caller = bench.open()
    await chat(caller, SYSTEM, USER)
    await chat(caller, {"role": "system", "content": "You write titles."}, USER)
    await chat(caller, SYSTEM, USER, said("fine"), MORE)
    await chat(caller, {"role": "system", "content": "You judge answers."}, said("fine"))
    assert [turn.auxiliary for turn in caller.turns] == [False] * 4
    assert all(segment.trained for segment in trajectory(caller).segments)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_siblings_of_a_first_call_are_samples_of_one_request(bench, path):
    bench.serve({"text": "a"}, {"text": "b"}, {"text": "c"})
    caller = bench.open()
    asked = {"messages": [USER]} if path == CHAT else {"prompt": "raw"}
    assert (await caller.post(path, {**asked, "n": 3})).status_code == 200
    assert parents(caller) == ["start", "resampled", "resampled"]
    await chat(caller, SYSTEM, USER)
    assert parents(caller)[3] == "new_conversation"


async def test_several_new_messages_are_in_the_row_in_their_order(bench):
    bench.serve({"text": call('{"a": 1}') + call('{"a": 2}')}, {"text": "ok"})
    caller = bench.open()
    content = await ask(caller, USER)
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": i, "content": f"result {n}"} for n, i in enumerate(ids)]
    news = {"role": "user", "content": [*results, {"type": "text", "text": "and hurry"}]}
    await ask(caller, USER, {"role": "assistant", "content": content}, news)
    assert parents(caller) == ["start", 0]
    row = bench.decode(bench.check_exact(caller)[caller.turns[1].turn_id])
    assert row.index("result 0") < row.index("result 1") < row.index("and hurry")


async def test_a_turn_that_is_no_longer_the_latest_can_be_continued(bench):
    bench.serve({"text": "one"}, {"text": "two"}, {"text": "three"})
    caller = bench.open()
    await chat(caller, USER)
    await chat(caller, USER, said("one"), MORE)
    other = {"role": "user", "content": "or else"}
    await chat(caller, USER, said("one"), other)
    assert parents(caller) == ["start", 0, 0]
    assert caller.session.counters == {"forks.branched": 1}


async def test_a_long_history_is_not_walked_again(bench, monkeypatch):
    steps = []
    after = Paths.after
    monkeypatch.setattr(Paths, "after", lambda self, *args: steps.append(args) or after(self, *args))
    bench.serve({"text": "one"}, max_model_len=1_000_000)
    caller = bench.open()
    messages = [SYSTEM, USER]
    for number in range(500):
        messages += [said(f"reply {number}"), {"role": "user", "content": f"message {number}"}]
    await chat(caller, *messages)
    costs = []
    for _ in range(3):
        messages += [said("one"), MORE]
        steps.clear()
        await chat(caller, *messages)
        costs.append(len(steps))
    assert costs == [3, 3, 3], "the echo, the new message, the new reply"


MARK = {"cache_control": {"type": "ephemeral"}}
SAID = st.builds(
    lambda role, text, mark: json.dumps({"role": role, "content": [{"type": "text", "text": text, **mark}]}).encode(),
    st.sampled_from(["system", "user", "assistant"]),
    st.sampled_from("abc"),
    st.sampled_from([{}, MARK]),
)


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(SAID, max_size=4)), min_size=1, max_size=12))
async def test_a_history_that_goes_on_from_another_reads_as_one_read_from_the_start(steps):
    cache, dialect, sent = MessageCache(), WIRES[CHAT], []
    for keep, new in steps:
        sent = [*sent[:keep], *new]
        request = ModelCall(model="m", messages=[bytes(bytearray(raw)) for raw in sent])
        history = await cache.history(request, dialect)
        recent, cache._recent = cache._recent, defaultdict(deque)
        fresh = await cache.history(request, dialect)
        cache._recent = recent
        for name in ("links", "paths", "num_system", "system"):
            assert getattr(history, name) == getattr(fresh, name)
        assert history.chain.ends == fresh.chain.ends
        cache.keep(history, Tools(b"", []), lambda _: None)
        for after in range(-1, len(sent)):
            expected = [dialect.messages(raw, "", lambda _: None)[0] for raw in sent[after + 1 :]]
            assert await history.messages(after) == expected


async def test_a_closed_session_keeps_its_turns_and_nothing_else(bench):
    bench.serve({"text": "one"})
    caller = bench.open()
    await chat(caller, USER)
    await chat(caller, USER, said("one"), MORE)
    turns = caller.turns
    await bench.sessions.close(caller.session.session_id)
    tree = caller.session.tree
    assert caller.turns == turns
    assert [*tree._by_path, *tree._requests, *tree.messages._known, *tree.messages._recent] == []
