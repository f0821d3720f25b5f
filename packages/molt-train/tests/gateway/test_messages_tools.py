"""Anthropic Messages: tools, tool choice, output format, and every field that has no effect."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import jsonschema
import msgspec
import pytest
from pydantic import BaseModel

from molt.train.gateway.call import ResponseFormat, ToolChoice
from molt.train.gateway.wires.messages import MessagesDialect

from .messages_calls import USER, both, post
from .replies import CALCULATOR_BLOCK, call

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS = [CALCULATOR_BLOCK]


def parse(**fields):
    return MessagesDialect().parse(msgspec.json.encode({"max_tokens": 9, "messages": USER, "tools": TOOLS, **fields}))


def schemas_of(*tools):
    counted = []
    schemas = MessagesDialect().tools(msgspec.json.encode(tools), counted.append)
    return {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}, counted


async def test_extra_fields_of_a_tool_are_accepted(bench):
    tool = CALCULATOR_BLOCK | {
        "type": "custom",
        "cache_control": {"type": "ephemeral"},
        "defer_loading": True,
        "strict": True,
        "eager_input_streaming": True,
        "input_examples": [{"a": 1}],
        "allowed_callers": ["direct"],
    }
    caller = bench.open()
    assert (await post(caller, tools=[tool])).status_code == 200
    assert (await post(caller, tools=TOOLS)).status_code == 200
    assert caller.turns[1].context_ids == caller.turns[0].context_ids
    assert '{"name": "calculator", "description": "Compute.", "parameters"' in bench.decode(caller.turns[0].context_ids)


async def test_tools_that_only_the_vendor_can_run_are_left_out_and_counted(bench):
    """vllm#46790: `web_search_20250305` was answered by 400."""
    tools = [
        CALCULATOR_BLOCK,
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "web_fetch_20260318", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
        {"type": "mcp_toolset", "mcp_server_name": "srv"},
        {"type": "computer_toolset_20260801"},
        {"type": "browser_toolset_20260801", "configs": {}},
        {"type": "of a later year", "name": "later"},
    ]
    caller = bench.open()
    assert (await post(caller, tools=tools)).status_code == 200
    assert caller.session.counters == {"tool_without_schema_omitted": 8}
    assert (await post(caller, tools=TOOLS)).status_code == 200
    assert caller.turns[1].context_ids == caller.turns[0].context_ids


@pytest.mark.parametrize(
    ("tool", "inputs"),
    [
        ({"type": "bash_20250124", "name": "bash"}, [{"command": "ls"}, {"restart": True}]),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
            [
                {"command": "view", "path": "/a", "view_range": [1, -1]},
                {"command": "create", "path": "/a", "file_text": "x"},
                {"command": "str_replace", "path": "/a", "old_str": "x", "new_str": "y"},
                {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
            ],
        ),
        ({"type": "text_editor_20241022", "name": "str_replace_editor"}, [{"command": "undo_edit", "path": "/a"}]),
        (
            {"type": "memory_20250818", "name": "memory"},
            [
                {"command": "view", "path": "/memories"},
                {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
            ],
        ),
        (
            {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
            [
                {"action": "screenshot"},
                {"action": "scroll", "coordinate": [1, 2], "scroll_direction": "down", "scroll_amount": 3},
            ],
        ),
        (
            {"type": "computer_20251124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
            [{"action": "zoom", "region": [0, 0, 10, 10]}],
        ),
    ],
)
async def test_tools_that_the_client_runs_are_given_the_schema_that_their_type_names(tool, inputs):
    schemas, counted = schemas_of(tool)
    assert counted == []
    for value in inputs:
        jsonschema.validate(value, schemas[tool["name"]])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": 3, "action": "fly"}, schemas[tool["name"]])


@pytest.mark.parametrize(
    ("version", "undoes", "inserts"), [("20250124", True, False), ("20250429", False, False), ("20250728", False, True)]
)
async def test_versions_of_the_text_editor_differ(version, undoes, inserts):
    schemas, _ = schemas_of({"type": f"text_editor_{version}", "name": "editor"})
    properties = schemas["editor"]["properties"]
    assert ("undo_edit" in properties["command"]["enum"], "insert_text" in properties) == (undoes, inserts)


async def test_a_schema_of_the_clients_own_wins(bench):
    schemas, _ = schemas_of({"type": "bash_20250124", "name": "bash", "input_schema": {"type": "object"}})
    assert schemas == {"bash": {"type": "object"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(max_calls=1)),
        ({"type": "any"}, ToolChoice(mode="required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(mode="required", max_calls=1)),
        ({"type": "tool", "name": "calculator"}, ToolChoice(mode="required", names=("calculator",))),
        ({"type": "none"}, ToolChoice(mode="none")),
    ],
)
async def test_tool_choice_is_passed_on(choice, expected):
    parsed = parse(tool_choice=choice)
    assert (parsed.tool_choice, parsed.notes) == (expected, ())


async def test_an_unknown_tool_choice_is_auto_and_counted():
    parsed = parse(tool_choice={"type": "perhaps"})
    assert (parsed.tool_choice, parsed.notes) == (ToolChoice(), ("tool_choice_unknown",))


@pytest.mark.parametrize(
    ("choice", "tools", "path"),
    [
        ({"type": "tool", "name": "missing"}, TOOLS, "tool_choice.name"),
        ({"type": "tool"}, TOOLS, "tool_choice.name"),
        ({"type": "any"}, [], "tool_choice"),
        ({"type": "any"}, None, "tool_choice"),
        (
            {"type": "tool", "name": "web_search"},
            [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice",
        ),
    ],
)
async def test_a_choice_of_a_tool_that_is_not_offered_is_refused(bench, choice, tools, path):
    response = await post(bench.open(), tool_choice=choice, tools=tools)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(path + ": ")


async def test_one_call_at_most_and_none_are_kept_to_in_the_reply(bench):
    bench.serve({"text": call("{}") + call("{}")})
    caller = bench.open()
    one = await both(caller, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["tool_use"]
    none = await both(caller, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    assert none.stop_reason == "end_turn"


class Answer(BaseModel):
    """What `messages.parse` asks for."""

    sum: int


async def test_strict_tools_are_named_whatever_the_choice():
    tools = [CALCULATOR_BLOCK | {"strict": True}, CALCULATOR_BLOCK | {"name": "other"}]
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "other"}):
        assert parse(tools=tools, tool_choice=choice).tool_choice.strict == ("calculator",)
    assert parse(tools=tools, tool_choice={"type": "none"}).tool_choice.strict == ()
    assert parse().tool_choice.strict == ()


async def test_an_output_format_is_passed_on(bench):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    parsed = parse(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert parsed.response_format == ResponseFormat(kind="json_schema", spec=schema, param="output_config.format")
    assert parsed.template_kwargs == {"reasoning_effort": "low"}
    bench.serve({"text": '{"sum": 3}'})
    message = await bench.open().anthropic.messages.parse(model="m", max_tokens=99, messages=USER, output_format=Answer)
    assert message.parsed_output == Answer(sum=3)


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ({"type": "xml"}, "output_config.format.type"),
        ("json", "output_config.format.type"),
        ({"type": "json_schema"}, "output_config.format.schema"),
    ],
)
async def test_an_output_format_that_cannot_be_kept_to_is_refused(bench, wanted, path):
    response = await post(bench.open(), output_config={"format": wanted})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(path + ": ")


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True, "thinking_budget": 2048}),
        ({"thinking": {"type": "between_tools"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "unheard of"}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": None, "format": None}}, {}),
    ],
)
async def test_thinking_and_effort_reach_the_template(fields, kwargs):
    assert parse(**fields).template_kwargs == kwargs


async def test_sampling_wishes_are_read():
    wishes = parse(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "", "b"], max_tokens=5).wishes
    assert (wishes.temperature, wishes.top_p, wishes.top_k, wishes.max_tokens) == (0.5, 0.9, 7, 5)
    assert wishes.stop == ("a", "b")


async def test_fields_without_effect_and_unknown_ones_are_accepted(bench):
    caller = bench.open()
    response = await post(
        caller,
        metadata={"user_id": json.dumps({"device_id": "d"})},
        service_tier="auto",
        speed="fast",
        container="c",
        mcp_servers=[{"type": "url", "url": "http://127.0.0.1:1", "name": "srv"}],
        inference_geo="eu",
        diagnostics={"previous_message_id": "msg_1"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        cache_control={"type": "ephemeral"},
        fallbacks=[{"model": "another"}],
        a_field_of_next_year={"deep": [1, {"er": None}]},
    )
    assert response.status_code == 200
    assert caller.session.counters == {}


async def test_null_is_as_good_as_nothing_in_optional_fields(bench):
    fields = ("system", "tools", "tool_choice", "stop_sequences", "stream", "temperature", "top_p", "top_k", "thinking")
    response = await post(bench.open(), **dict.fromkeys((*fields, "output_config")))
    assert response.status_code == 200
