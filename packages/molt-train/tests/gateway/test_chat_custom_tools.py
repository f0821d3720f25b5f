"""Custom tools on Chat Completions: free text in, free text out, one string argument in between."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.gateway.wires.custom_tool import CustomInput, input_of

from .replies import call, events

USER = [{"role": "user", "content": "write"}]
TOOLS = [{"type": "custom", "custom": {"name": "write", "description": "Writes.", "format": {"type": "text"}}}]
TEXT = 'line "one"\n\ttwo \\ ünï 😀 \x7f'


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("ascii_only", [True, False])
async def test_a_custom_tool_is_called_with_its_text_and_known_again(bench, ascii_only):
    arguments = json.dumps({"input": TEXT}, ensure_ascii=ascii_only)
    bench.serve({"text": call(arguments, "write")}, {"text": "done"})
    caller = bench.open()
    first = await caller.openai.chat.completions.create(model="m", messages=USER, tools=TOOLS)
    message = first.choices[0].message
    (made,) = message.tool_calls
    assert (made.type, made.custom.name, made.custom.input) == ("custom", "write", TEXT)
    assert first.choices[0].finish_reason == "tool_calls"
    echoed = {"role": "assistant", "content": "", "tool_calls": [made.model_dump()]}
    result = {"role": "tool", "tool_call_id": made.id, "content": "ok"}
    await caller.openai.chat.completions.create(model="m", messages=[*USER, echoed, result], tools=TOOLS)
    one, two = caller.turns
    assert two.parent_turn_id == one.turn_id
    assert '"required": ["input"]' in bench.decode(one.context_ids)
    assert not caller.session.counters
    bench.check_exact(caller)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_custom_call_streams_as_its_text(bench):
    bench.serve({"text": call(json.dumps({"input": TEXT}), "write") + call('{"input": ""}', "write")})
    caller = bench.open()
    body = {"model": "m", "messages": USER, "tools": TOOLS, "stream": True}
    frames = [data for _, data in events((await caller.post("/v1/chat/completions", body)).content)][:-1]
    parts = [part for frame in frames for part in frame["choices"][0]["delta"].get("tool_calls", [])]
    heads = [part for part in parts if "id" in part]
    assert [(head["index"], head["type"], head["custom"]) for head in heads] == [
        (0, "custom", {"name": "write", "input": ""}),
        (1, "custom", {"name": "write", "input": ""}),
    ]
    assert "".join([part["custom"]["input"] for part in parts if part["index"] == 0]) == TEXT
    assert len(parts) > 10, "the text is shown as it is sampled"
    assert frames[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_grammar_of_a_custom_tool_is_accepted_and_counted(bench):
    caller = bench.open()
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    tools = [{"type": "custom", "custom": {"name": "write", "format": grammar}}]
    await caller.openai.chat.completions.create(model="m", messages=USER, tools=tools)
    assert caller.session.counters == {"custom_grammar_not_enforced": 1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        (' {\n"input" :"a"}', "a"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"input": "cut \\u00e', "cut "),
        ('{"input": "\\ud83d\\ude00"}', "😀"),
        ('{"input": "\\ud83d!"}', "�!"),
        ("{}", ""),
        ('{"inp', ""),
        ('{"command": "ls"}', '{"command": "ls"}'),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_the_text_of_a_custom_call(arguments, text):
    assert input_of(arguments) == text


@given(st.text(), st.booleans(), st.lists(st.integers(0, 400), max_size=6))
def test_the_text_of_a_custom_call_does_not_depend_on_how_it_comes(text, ascii_only, cuts):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    bounds = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    reader = CustomInput()
    assert "".join([reader.feed(arguments[start:end]) for start, end in itertools.pairwise(bounds)]) == text
