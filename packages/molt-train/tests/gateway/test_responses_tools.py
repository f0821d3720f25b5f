"""OpenAI Responses: tools offered to the model, and their calls on the way back."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import pytest

from molt.train.gateway.wires.custom_tool import CustomInput, input_of
from molt.train.gateway.wires.responses import ResponsesDialect
from molt.train.gateway.wires.responses_tools import offered_tools

from .replies import call
from .responses_calls import APPLY_PATCH, CALCULATOR_TOOL, both, frames, post

pytestmark = pytest.mark.asyncio(loop_scope="session")

SPAWN = {
    "type": "function",
    "name": "spawn_agent",
    "description": "Start one.",
    "parameters": {"type": "object", "properties": {"task": {"type": "string"}}},
    "strict": False,
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Agents.",
    "tools": [SPAWN, {"type": "custom", "name": "note", "description": "Take a note."}],
}
WEB_SEARCH = {"type": "web_search", "external_web_access": True}
HOSTED = [
    WEB_SEARCH,
    {"type": "image_generation"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "s", "server_url": "https://x"},
    {"type": "local_shell"},
]


def offered(tools):
    return {
        schema["function"]["name"]: schema["function"] for schema in offered_tools(json.dumps(tools).encode()).schemas
    }


def chosen(choice, tools=(), **body):
    body = {"input": "hi", "tools": list(tools), "tool_choice": choice, **body}
    return ResponsesDialect().parse(json.dumps(body).encode()).tool_choice


async def test_vllm_46737_a_namespace_s_member_is_offered_flat_and_called_by_its_bare_name(bench):
    arguments = '{"task": "look"}'
    bench.serve({"text": call(arguments, name="multi_agent_v1__spawn_agent")})
    caller = bench.open()
    response = await both(caller, tools=[CALCULATOR_TOOL, AGENTS])
    (item,) = response["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "spawn_agent", "multi_agent_v1")
    assert item["arguments"] == arguments
    assert response["tools"] == [CALCULATOR_TOOL, AGENTS]
    text = bench.decode(caller.turns[0].context_ids)
    assert '"name": "multi_agent_v1__spawn_agent"' in text
    assert caller.session.counters["namespace_description_omitted"] == 2, "once for each spelling of the list"


async def test_a_namespaced_call_that_is_echoed_is_the_turn(bench):
    bench.serve({"text": call("{}", name="multi_agent_v1__spawn_agent")}, {"text": "Done."})
    caller = bench.open()
    first = await post(caller, input="hi", tools=[AGENTS])
    (item,) = first["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
    await post(caller, input=[{"role": "user", "content": "hi"}, item, result], tools=[AGENTS])
    assert caller.turns[1].parent_turn_id == caller.turns[0].turn_id
    assert "echo_differs" not in caller.session.counters
    bench.check_exact(caller)


async def test_a_namespace_s_custom_member_keeps_both(bench):
    bench.serve({"text": call('{"input": "remember"}', name="multi_agent_v1__note")})
    (item,) = (await both(bench.open(), tools=[AGENTS]))["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "multi_agent_v1", "note")
    assert item["input"] == "remember"


async def test_vllm_56285_every_item_has_one_identity_from_its_first_event_to_the_response(bench):
    text = f"<think>\na\n</think>\n\nb\n{call('{}')}\n{call('{}', 'multi_agent_v1__note')}\n{call('{}')}"
    bench.serve({"text": text})
    data = await frames(bench.open(), input="hi", tools=[CALCULATOR_TOOL, AGENTS])  # checks it, event by event
    output = data[-1]["response"]["output"]
    assert len({item["id"] for item in output}) == 5
    assert len({item["call_id"] for item in output[2:]}) == 3


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
async def test_llama_cpp_20156_and_ollama_17618_hosted_tools_are_left_out_and_echoed(bench, tool):
    bench.serve({"text": "hello"})
    caller = bench.open()
    response = await both(caller, tools=[tool, CALCULATOR_TOOL])
    assert response["tools"] == [tool, CALCULATOR_TOOL]
    text = bench.decode(caller.turns[0].context_ids)
    assert "calculator" in text
    assert tool["type"] not in text
    assert caller.session.counters["tool_omitted.hosted"] == 2, "once for each spelling of the list: ours, the SDK's"


async def test_vllm_49493_a_request_with_hosted_tools_only_has_no_tools(bench):
    bench.serve({"text": call("{}", "web_search")})
    caller = bench.open()
    response = await both(caller, tools=HOSTED)
    assert response["output"][0]["content"][0]["text"] == call("{}", "web_search")
    assert "<tools>" not in bench.decode(caller.turns[0].context_ids)


@pytest.mark.parametrize("tools", [[], None])
async def test_no_tools_are_no_tools(bench, tools):
    bench.serve({"text": call("{}")})
    response = await both(bench.open(), **({} if tools is None else {"tools": tools}))
    assert response["output"][0]["type"] == "message"


async def test_tool_choice_none_shows_calls_as_text(bench):
    bench.serve({"text": call("{}")})
    response = await both(bench.open(), tools=[CALCULATOR_TOOL], tool_choice="none")
    assert response["output"][0]["content"][0]["text"] == call("{}")


async def test_without_parallel_calls_one_is_shown_and_all_are_recorded(bench):
    bench.serve({"text": f"{call('{}')}\n{call('{}')}"})
    caller = bench.open()
    response = await both(caller, tools=[CALCULATOR_TOOL], parallel_tool_calls=False)
    assert len(response["output"]) == 1
    assert caller.turns[0].token_ids == [*bench.encode(f"{call('{}')}\n{call('{}')}<|im_end|>")]


async def test_a_call_of_a_tool_that_is_not_offered_goes_out_as_it_is(bench):
    bench.serve({"text": call("{}", "nobody__knows")})
    (item,) = (await both(bench.open(), tools=[AGENTS]))["output"]
    assert (item["type"], item["name"]) == ("function_call", "nobody__knows")
    assert "namespace" not in item


TOOLS = [CALCULATOR_TOOL, AGENTS, APPLY_PATCH, WEB_SEARCH]


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("auto", "auto", ()),
        ("none", "none", ()),
        ("required", "required", ()),
        (None, "auto", ()),
        ({"type": "function", "name": "calculator"}, "required", ("calculator",)),
        ({"type": "custom", "name": "apply_patch"}, "required", ("apply_patch",)),
        (
            {"type": "function", "name": "spawn_agent", "namespace": "multi_agent_v1"},
            "required",
            ("multi_agent_v1__spawn_agent",),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "calculator"}]},
            "auto",
            ("calculator",),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "namespace", "name": "multi_agent_v1"}, {"type": "web_search"}],
            },
            "required",
            ("multi_agent_v1__spawn_agent", "multi_agent_v1__note"),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none", ()),
    ],
)
async def test_every_shape_of_tool_choice(choice, mode, names):
    found = chosen(choice, TOOLS)
    assert (found.mode, found.names) == (mode, names)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "nobody"},
        {"type": "custom", "name": "nobody"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "nobody"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        {"type": "allowed_tools", "mode": "sometimes", "tools": []},
        {"type": "web_search"},
        {"type": "file_search"},
        "sometimes",
    ],
)
async def test_a_tool_choice_that_cannot_be_met_is_400(bench, choice):
    response = await bench.open().post("/v1/responses", {"input": "hi", "tools": TOOLS, "tool_choice": choice})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, "tool_choice", "invalid_request_error")


@pytest.mark.parametrize("tools", [[], [WEB_SEARCH]])
async def test_a_call_cannot_be_required_where_there_is_nothing_to_call(bench, tools):
    response = await bench.open().post("/v1/responses", {"input": "hi", "tools": tools, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function"}], "tools[0].name"),
        ([WEB_SEARCH, {"type": "custom"}], "tools[1].name"),
        ([{"type": "namespace", "tools": [SPAWN]}], "tools[0].name"),
        ([{**AGENTS, "tools": [SPAWN, {"type": "function"}]}], "tools[0].tools[1].name"),
        ([{"type": "function", "name": "f", "parameters": "x"}], "tools[0].parameters"),
        ({"type": "function"}, "tools"),
    ],
)
async def test_a_malformed_tool_is_400_and_named(bench, tools, param):
    response = await bench.open().post("/v1/responses", {"input": "hi", "tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_strict_functions_and_parallel_calls_are_told_to_the_sampler():
    tools = [{**CALCULATOR_TOOL, "strict": True}, {**SPAWN, "strict": False}]
    assert chosen("auto", tools).strict == ("calculator",)
    assert chosen("auto", tools).max_calls is None
    assert chosen("auto", tools, parallel_tool_calls=False).max_calls == 1


@pytest.mark.parametrize(
    ("sent", "kind", "spec"),
    [
        ({"type": "json_object"}, "json_object", None),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            "json_schema",
            {"type": "object"},
        ),
    ],
)
async def test_the_form_of_the_text_is_told_to_the_sampler(sent, kind, spec):
    call = ResponsesDialect().parse(json.dumps({"input": "hi", "text": {"format": sent}}).encode())
    assert call.response_format is not None
    assert (call.response_format.kind, call.response_format.spec) == (kind, spec)


@pytest.mark.parametrize(
    ("effort", "kwargs"),
    [
        ("low", {"reasoning_effort": "low"}),
        ("none", {"reasoning_effort": "none", "enable_thinking": False}),
        (None, {}),
    ],
)
async def test_reasoning_effort_is_told_to_the_template(effort, kwargs):
    body = {"input": "hi", "reasoning": {"effort": effort, "summary": "auto"}}
    assert ResponsesDialect().parse(json.dumps(body).encode()).template_kwargs == kwargs


async def test_a_custom_tool_is_a_function_of_one_text_and_tells_its_format():
    function = offered([APPLY_PATCH])["apply_patch"]
    assert function["parameters"] == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    assert function["description"].startswith("Edit files.\n\n")
    assert APPLY_PATCH["format"]["definition"] in function["description"]
    assert "custom_grammar_not_enforced" in offered_tools(json.dumps([APPLY_PATCH]).encode()).notes


CUSTOM = [
    ('{"input": "plain"}', "plain"),
    ('{ "input" :\n"a\\n\\"b\\\\\\u00fc\\ud83d\\ude00", "other": 1}', 'a\n"b\\ü😀'),
    ('{"input": "lone \\ud83d\\ud83d\\ude00 \\ud83d!"}', "lone \ufffd😀 \ufffd!"),
    ('{"patch": "x"}', '{"patch": "x"}'),
    ('{"input": 5}', '{"input": 5}'),
]


@pytest.mark.parametrize(("arguments", "text"), CUSTOM)
async def test_custom_input_is_the_same_however_its_arguments_are_cut(arguments, text):
    assert input_of(arguments) == text
    for first in range(len(arguments)):
        for second in range(first, len(arguments)):
            reading = CustomInput()
            pieces = (arguments[:first], arguments[first:second], arguments[second:])
            assert "".join(map(reading.feed, pieces)) == text


async def test_custom_input_is_streamed_as_it_is_sampled(bench):
    bench.serve({"text": call('{"input": "*** Begin\\n+one two three"}', name="apply_patch")})
    data = await frames(bench.open(), input="hi", tools=[APPLY_PATCH])
    deltas = [frame["delta"] for frame in data if frame["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == "*** Begin\n+one two three"


def codex_item(role, number, text):
    return {"id": f"msg_{number}", "type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


async def test_freellmapi_96_a_session_of_codex(bench):
    """The body of Codex 0.171: two developer messages, seven functions, a namespace, a grammar, a hosted tool."""
    patch = '{"input": "*** Begin Patch\\n+hi\\n*** End Patch"}'
    bench.serve(
        {"text": f"<think>\nlook first\n</think>\n\nI look.\n{call('{}', 'function_0')}\n{call(patch, 'apply_patch')}"},
        {"text": f"<think>\nask\n</think>\n\n{call('{}', 'multi_agent_v1__spawn_agent')}"},
        {"text": "Done."},
    )
    caller = bench.open()
    body = {
        "model": "gpt-of-codex",
        "tools": [
            *({**SPAWN, "name": f"function_{number}"} for number in range(7)),
            AGENTS,
            APPLY_PATCH,
            {**WEB_SEARCH, "search_content_types": ["text"]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
    }
    items = [
        codex_item("developer", 1, "<permissions>"),
        codex_item("developer", 2, "<skills>"),
        codex_item("user", 3, "Patch it."),
    ]
    for turn in range(3):
        data = await frames(caller, input=items, client_metadata={"turn": turn}, **body)
        output = [
            {key: value for key, value in item.items() if key != "status"} for item in data[-1]["response"]["output"]
        ]
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
            for item in output
            if "call_id" in item
        ]
        items += [*output, *results]
    calls = [item for item in items if "name" in item]
    assert [(item["name"], item.get("namespace")) for item in calls] == [
        ("function_0", None),
        ("apply_patch", None),
        ("spawn_agent", "multi_agent_v1"),
    ]
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert not [name for name in caller.session.counters if name.startswith("forks")]
    assert turns[0].sampling["max_tokens"] > 0
    bench.check_exact(caller)
