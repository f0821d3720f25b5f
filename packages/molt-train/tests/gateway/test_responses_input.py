"""OpenAI Responses: what the items of a request say to the model, and which turns they continue."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import openai
import pytest

from .replies import call
from .responses_calls import APPLY_PATCH, CALCULATOR_TOOL, frames, post

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = {"role": "user", "content": "1 + 2?"}
THINKS = f"<think>\nfirst add\n</think>\n\nLet me see.\n{call('{}')}\n{call('{}')}"
PNG = "data:image/png;base64,iVBORw0KGgo="


async def prompt(bench, items, **body):
    """The prompt that the model is given for items, and the session's counters."""
    caller = bench.open()
    await post(caller, input=items, **body)
    return bench.decode(caller.turns[-1].context_ids), caller.session.counters


async def refused(bench, **body):
    response = await bench.open().post("/v1/responses", {"input": "hi", **body})
    error = response.json()["error"]
    return response.status_code, error["param"], error


def outputs(response):
    """Results for the calls of a reply."""
    return [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "3"}
        for item in response["output"]
        if "call_id" in item
    ]


@pytest.mark.parametrize(
    "items",
    [
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        [{"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
async def test_a_text_is_one_user_message_however_it_is_sent(bench, items):
    text, _ = await prompt(bench, items)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_instructions_and_developer_messages_are_system_text_in_the_order_sent(bench):
    items = [{"role": "developer", "content": "One."}, USER, {"role": "developer", "content": "Two."}, USER]
    text, _ = await prompt(bench, items, instructions="Zero.")
    assert [text.index(word) for word in ("Zero.", "One.", "1 + 2?", "Two.")] == sorted(
        text.index(word) for word in ("Zero.", "One.", "1 + 2?", "Two.")
    )
    assert text.startswith("<|im_start|>system\nZero.")


async def test_reasoning_text_and_calls_are_folded_to_one_assistant_turn(bench):
    items = [
        USER,
        {"type": "reasoning", "id": "a", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    text, counters = await prompt(bench, items)
    assert text.count("<|im_start|>assistant") == 2
    assert text.index("So.") < text.index('"arguments": {}') < text.index('"arguments": {"a": 1}')
    assert "<tool_response>\none\n</tool_response>" in text
    assert "<tool_response>\ntwo\n</tool_response>" in text
    assert counters["item_skipped.web_search_call"] == 1


NATIVE = {
    "local_shell": (
        {"type": "local_shell_call", "id": "l", "call_id": "1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "1", "call_id": "1", "output": "files"},
    ),
    "shell": (
        {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "files", "stderr": "", "outcome": None}]},
    ),
    "apply_patch": (
        {"type": "apply_patch_call", "call_id": "1", "operation": {"type": "delete_file", "path": "ls"}},
        {"type": "apply_patch_call_output", "call_id": "1", "status": "completed", "output": "files"},
    ),
    "tool_search": (
        {"type": "tool_search_call", "call_id": "1", "arguments": {"query": "ls"}},
        {"type": "tool_search_output", "call_id": "1", "tools": [{"type": "function", "name": "files"}]},
    ),
}


@pytest.mark.parametrize("name", list(NATIVE))
async def test_calls_of_the_vendor_s_own_tools_are_calls_and_results(bench, name):
    text, _ = await prompt(bench, [USER, *NATIVE[name]])
    assert f'"name": "{name}"' in text
    assert text.index("ls") < text.index("<tool_response>") < text.index("files")


@pytest.mark.parametrize(
    ("item", "counted"),
    [
        ({"type": "compaction", "encrypted_content": "x"}, "item_skipped.compaction"),
        (
            {"type": "mcp_approval_response", "approval_request_id": "x", "approve": True},
            "item_skipped.mcp_approval_response",
        ),
        ({"type": "additional_tools", "role": "developer", "tools": []}, "item_skipped.additional_tools"),
        ({"type": "image_generation_call", "id": "i", "result": "x"}, "item_skipped.image_generation_call"),
        ({"type": "of tomorrow", "role": "critic", "content": {"any": "thing"}}, "item_skipped.unknown"),
        ({"role": "user", "content": [{"type": "of tomorrow"}, {"type": "input_text", "text": "x"}]}, "part_skipped"),
    ],
)
async def test_an_item_that_says_nothing_to_the_model_is_skipped_and_counted(bench, item, counted):
    text, counters = await prompt(bench, [USER, item])
    assert text.startswith("<|im_start|>user\n1 + 2?<|im_end|>\n")
    assert counters[counted] == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG}],
                    }
                ]
            },
            "input[0].content[1].image_url",
        ),
        (
            {
                "input": [
                    USER,
                    {
                        "type": "function_call_output",
                        "call_id": "1",
                        "output": [{"type": "input_image", "image_url": "https://x"}],
                    },
                ]
            },
            "input[1].output[0].image_url",
        ),
        (
            {
                "input": [
                    USER,
                    {
                        "type": "computer_call_output",
                        "call_id": "1",
                        "output": {"type": "computer_screenshot", "image_url": PNG},
                    },
                ]
            },
            "input[1].output.image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [USER, {"type": "reasoning", "id": "r", "summary": []}, {"role": "assistant", "content": 3}]},
            "input[2].content",
        ),
        ({"input": [USER, {"type": "function_call_output", "call_id": 3, "output": ""}]}, "input[1].call_id"),
        ({"input": [{"content": "hi"}]}, "input[0]"),
        ({"input": [USER, 3]}, "input[1]"),
        ({"input": {"role": "user"}}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"previous_response_id": "resp_1", "conversation": "c"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_served_is_400_and_names_the_field(bench, body, param):
    status, named, error = await refused(bench, **body)
    assert (status, named, error["type"]) == (400, param, "invalid_request_error")


async def test_unknown_top_level_fields_are_accepted(bench):
    text, _ = await prompt(bench, "hi", client_metadata={"x": 1}, generate=None, of_tomorrow=[1])
    assert text == (await prompt(bench, "hi"))[0]


@pytest.mark.parametrize("keeps_ids", [True, False])
async def test_an_echoed_turn_is_continued_exactly_with_parallel_results(bench, keeps_ids):
    bench.serve({"text": THINKS}, {"text": "<think>\nok\n</think>\n\nThree."}, {"text": "Bye."})
    caller = bench.open()
    history = [USER]
    for follow in (outputs, lambda _: [USER], lambda _: []):
        response = await post(caller, input=history, tools=[CALCULATOR_TOOL], store=False)
        echoed = json.loads(json.dumps(response["output"]))
        for item in echoed:
            item.pop("status")
            if not keeps_ids:
                item.pop("id")
        history += [*echoed, *follow(response)]
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns[1:]] == [turn.turn_id for turn in turns[:-1]]
    assert bench.decode(turns[1].context_ids).count("<tool_response>") == 2
    assert not [name for name in caller.session.counters if name.startswith("forks")]
    assert all(turn.adopted for turn in turns)
    bench.check_exact(caller)


async def test_the_sdk_s_own_items_can_be_sent_back(bench):
    bench.serve({"text": THINKS}, {"text": "Three."})
    caller = bench.open()
    first = await caller.openai.responses.create(model="m", input="hi", tools=[CALCULATOR_TOOL])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in first.output
        if item.type == "function_call"
    ]
    items = [{"role": "user", "content": "hi"}, *first.output, *results]
    second = await caller.openai.responses.create(model="m", input=items, tools=[CALCULATOR_TOOL])
    assert second.output_text == "Three."
    assert caller.turns[1].parent_turn_id == caller.turns[0].turn_id
    bench.check_exact(caller)


async def test_finished_items_of_a_cut_stream_are_one_turn_and_the_next_reply_another(bench):
    """Codex resends with the items it has, then with those of the next reply behind them: ids tell them apart."""
    bench.serve({"text": "One."}, {"text": "Two."}, {"text": "Three."})
    caller = bench.open()
    first = await post(caller, input=[USER])
    second = await post(caller, input=[USER, *first["output"]])
    await post(caller, input=[USER, *first["output"], *second["output"], USER])
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    bench.check_exact(caller)


async def test_a_broken_call_in_the_history_is_no_error(bench):
    items = [
        USER,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": '},
        {"type": "function_call_output", "call_id": "1", "output": "bad JSON"},
    ]
    text, _ = await prompt(bench, items)
    assert '{\\"a\\": ' in text or '{"a": ' in text


async def test_previous_response_id_continues_the_turn_with_new_items_only(bench):
    bench.serve({"text": THINKS}, {"text": "Three."}, {"text": "Bye."}, {"text": "Other."})
    caller = bench.open()
    first = await post(caller, input="1 + 2?", tools=[CALCULATOR_TOOL], instructions="Be brief.")
    ask = {"tools": [CALCULATOR_TOOL], "instructions": "Be brief."}
    second = await post(caller, previous_response_id=first["id"], input=outputs(first), **ask)
    assert second["previous_response_id"] == first["id"]
    third = (await frames(caller, previous_response_id=second["id"], input="Thanks.", store=False, **ask))[-1]
    assert third["type"] == "response.completed"
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    other = await post(caller, previous_response_id=first["id"], input=outputs(first), tools=[CALCULATOR_TOOL])
    text = bench.decode(caller.turns[-1].context_ids)
    assert other["instructions"] is None
    assert "Be brief." not in text, "instructions are not inherited"
    assert caller.turns[-1].opened_by == "system_changed"
    bench.check_exact(caller)


async def test_previous_response_id_of_a_streamed_reply_and_mixed_with_whole_histories(bench):
    bench.serve({"text": "One."}, {"text": "Two."}, {"text": "Three."})
    caller = bench.open()
    first = (await frames(caller, input=[USER]))[-1]["response"]
    second = await post(caller, input=[USER, *first["output"], USER])
    await post(caller, previous_response_id=second["id"], input=[USER])
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    bench.check_exact(caller)


async def test_an_unknown_previous_response_is_404(bench):
    bench.serve({"text": "hello"})
    mine = await post(bench.open(), input="hi")
    status, param, error = await refused(bench, previous_response_id=mine["id"])
    assert (status, param, error["code"]) == (404, "previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError):
        await bench.open().openai.responses.create(model="m", input="hi", previous_response_id="resp_x")


async def test_a_conversation_goes_on_where_it_was(bench):
    bench.serve({"text": "One."}, {"text": "Two."}, {"text": "Other."})
    caller = bench.open()
    first = await post(caller, input="a", conversation="conv_1")
    await post(caller, input="b", conversation={"id": "conv_1"})
    await post(caller, input="c", conversation="conv_2")
    assert first["conversation"] == {"id": "conv_1"}
    assert [turn.parent_turn_id for turn in caller.turns] == [None, caller.turns[0].turn_id, None]
    assert bench.decode(caller.turns[1].context_ids).count("<|im_start|>user") == 1


async def test_an_item_reference_stands_for_the_item(bench):
    bench.serve({"text": THINKS}, {"text": "Three."})
    caller = bench.open()
    first = await post(caller, input=[USER], tools=[CALCULATOR_TOOL])
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    del references[0]["type"]
    await post(caller, input=[USER, *references, *outputs(first)], tools=[CALCULATOR_TOOL])
    assert caller.turns[1].parent_turn_id == caller.turns[0].turn_id
    bench.check_exact(caller)


async def test_a_reference_to_no_item_of_the_session_is_404(bench):
    for item in ("msg_x", f"msg_{'a' * 24}_0"):
        status, param, _ = await refused(bench, input=[USER, {"type": "item_reference", "id": item}])
        assert (status, param) == (404, "input[1].id")


async def test_the_past_of_a_session_grows_by_what_is_new(bench):
    bench.serve({"text": "ok"})
    caller = bench.open()
    history = [USER]
    for _ in range(10):
        response = await post(caller, input=history)
        history = [*history, *response["output"], USER]
    # Of every turn: its user message, its output, and the output as the client sends it back.
    assert len(caller.session.past._nodes) <= 1 + 3 * 10


async def test_a_custom_call_that_is_echoed_is_the_turn(bench):
    patch = call('{"input": "*** Begin\\n+a"}', name="apply_patch")
    bench.serve({"text": patch}, {"text": "Done."})
    caller = bench.open()
    first = await post(caller, input=[USER], tools=[APPLY_PATCH])
    item = first["output"][0]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+a")
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "applied"}
    await post(caller, input=[USER, item, result], tools=[APPLY_PATCH])
    assert caller.turns[1].parent_turn_id == caller.turns[0].turn_id
    assert "echo_differs" not in caller.session.counters
    bench.check_exact(caller)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses/resp_1", 404),
        ("GET", "/v1/responses/resp_1/input_items", 404),
        ("DELETE", "/v1/responses/resp_1", 404),
        ("POST", "/v1/responses/resp_1/cancel", 404),
        ("POST", "/v1/responses/compact", 404),
        ("GET", "/v1/responses", 405),
    ],
)
async def test_routes_beside_it_have_a_typed_error(bench, method, path, status):
    caller = bench.open()
    auth = {"authorization": f"Bearer {caller.key}"}
    response = await caller.http.request(method, caller.url + path, headers=auth, content=b"{}")
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_of_replies_that_read_the_same_the_one_that_the_item_s_id_names_is_continued(bench):
    bench.serve(
        {"text": "<think>\none\n</think>\n\nSame."}, {"text": "<think>\ntwo\n</think>\n\nSame."}, {"text": "Bye."}
    )
    caller = bench.open()
    replies = [await post(caller, input=[USER], temperature=temperature) for temperature in (0.5, 0.6)]
    for reply in replies:
        await post(caller, input=[USER, *reply["output"], USER])
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns[2:]] == [turn.turn_id for turn in turns[:2]]
    bench.check_exact(caller)


@pytest.mark.parametrize(
    "body", [b'{"input": "\xff"}', b'{"input": [{"role": "user", "content": "\xff"}]}', b'{"input": [']
)
async def test_what_is_no_json_is_400(bench, body):
    response = await bench.open().post("/v1/responses", body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_an_input_that_begins_as_a_recent_one_is_read_from_where_it_goes_on(bench):
    bench.serve({"text": "ok"})
    caller = bench.open()
    turn = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "So."},
    ]
    result = {"type": "function_call_output", "call_id": "1", "output": "3"}
    call_item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    prompts = []
    for session in (caller, bench.open()):
        if session is caller:
            await post(session, input=[USER, *turn])
        await post(session, input=[USER, *turn, call_item, result])
        history = session.session.past._inputs[-1]
        prompts.append((history.all_messages(), history.positions, history.num_items))
    assert prompts[0] == prompts[1]
    response = await caller.post(
        "/v1/responses", {"input": [USER, *turn, call_item, result, {"role": "user", "content": 3}]}
    )
    assert response.json()["error"]["param"] == "input[5].content"
