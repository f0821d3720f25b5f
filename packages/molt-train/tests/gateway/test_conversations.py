"""Random conversations: branching, edited, resent and echoed in other words; every row is what the engine was given."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .replies import CALCULATOR, CALCULATOR_BLOCK, call

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORDS = st.sampled_from(["hi", "é😀", "two words", "<|im_end|>", "<tool_call>", "", " "])
REPLIES = st.sampled_from(
    [
        {"text": "fine"},
        {"text": "fine", "finish_reason": "length"},
        {"text": "<think>\nhm\n</think>\n\nfine"},
        {"text": "<think>\nhm"},
        {"text": call('{"a":1}') + " tail"},
        {"text": "so " + call("{}") + call('{"a": 2}')},
        {"text": "<tool_call>\n{bad\n</tool_call>"},
        {"text": ""},
        {"token_ids": [72, 71, 72, 71, 570]},
    ]
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["go on", "go on", "go on", "fork", "edit", "resend", "system"]), WORDS, REPLIES),
    min_size=1,
    max_size=7,
)


def chat_echo(reply):
    message = reply["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": tool_call["id"], "content": "3"} for tool_call in message.get("tool_calls", [])
    ]
    return [message, *results]


def messages_echo(reply):
    content = [json.loads(json.dumps(block)) for block in reply["content"] if block["type"] != "thinking"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
        for block in content
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": content}, *([{"role": "user", "content": results}] if results else [])]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.booleans())
async def test_rows_are_what_the_engine_was_given(bench, steps, is_chat):
    bench.serve(*[reply for _, _, reply in steps])
    caller = bench.open(max_tokens=50)
    system, messages, forks = "S", [], [[]]
    expected_parents = 0
    for kind, word, _ in steps:
        if kind == "fork":
            messages = list(forks[len(word) % len(forks)])
        elif kind == "edit" and messages:
            messages = [{"role": "user", "content": "edited"}, *messages[1:]]
        elif kind == "system":
            system += "!"
        if kind != "resend" or not messages:
            messages = [*messages, {"role": "user", "content": word}]
        expected_parents += kind == "go on" and len(messages) > 1
        if is_chat:
            body = {"messages": [{"role": "system", "content": system}, *messages], "tools": [CALCULATOR]}
            reply = (await caller.post("/v1/chat/completions", body)).json()
            messages = [*messages, *chat_echo(reply)]
        else:
            body = {"system": system, "messages": messages, "tools": [CALCULATOR_BLOCK], "max_tokens": 50}
            reply = (await caller.post("/v1/messages", body)).json()
            messages = [*messages, *messages_echo(reply)]
        forks.append(messages)
    rows = bench.check_exact(caller)
    assert len(rows) == len(steps) == len({line["request_id"] for line in bench.log[-len(steps) :]})
    assert sum(turn.parent_turn_id is not None for turn in caller.turns) >= expected_parents
    assert all(turn.status == "delivered" for turn in caller.turns)
    num_children = Counter(turn.parent_turn_id for turn in caller.turns)
    for turn in caller.turns:
        text = bench.decode(rows[turn.turn_id])
        assert text.startswith("<|im_start|>system\nS")
        control = bench.encode("<|im_start|>")[0]
        starts = [i for i, token_id in enumerate(rows[turn.turn_id]) if token_id == control]
        ends = bench.encode("<|im_end|>")[0]
        for start in starts[1:]:
            before = rows[turn.turn_id][:start]
            assert before[-2] == ends, "every turn of a row is ended once before the next begins"
            assert before[-3] != ends
        assert turn.adopted or num_children[turn.turn_id] == 0
