"""Anthropic Messages, requests: what a template is given of messages and their blocks."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import re

import pytest

from .messages_calls import USER, post
from .replies import CALCULATOR_BLOCK, call

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS = [CALCULATOR_BLOCK]


async def prompt_of(bench, caller, **fields):
    """What the engine was given for a request that is answered, as text."""
    response = await post(caller, **fields)
    assert response.status_code == 200, response.text
    return bench.decode(bench.log[-1]["prompt_token_ids"])


def user(*content):
    return {"role": "user", "content": list(content)}


def text(value, **extra):
    return {"type": "text", "text": value, **extra}


async def test_the_billing_block_is_dropped_before_anything_is_compared(bench):
    caller = bench.open()
    for number in range(2):
        system = [text(f"x-anthropic-billing-header: cc_version=2.1.197; cch={number};"), text("Be brief.")]
        prompt = await prompt_of(bench, caller, system=system)
        assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    prompt = await prompt_of(bench, caller, system=f"x-anthropic-billing-header: cch={number};\nBe brief.")
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert [turn.opened_by for turn in caller.turns] == ["start", "resampled", "resampled"]


async def test_only_a_billing_block_is_no_system_text(bench):
    prompt = await prompt_of(bench, bench.open(), system=[text("x-anthropic-billing-header: cch=1;")])
    assert prompt == "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"


async def test_a_system_message_inside_the_conversation_stays_where_it_is(bench):
    """vllm#44000: newer Claude Code puts them among the messages; vLLM hoists them, which changes every prefix."""
    messages = [*USER, {"role": "system", "content": [text("Time is short.")]}, user(text("Well?"))]
    prompt = await prompt_of(bench, bench.open(), system="Be brief.", messages=messages)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n"
        "<|im_start|>system\nTime is short.<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_late_system_message_is_folded_where_the_template_knows_only_a_leading_one(bench, with_template):
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    bench.serve({"text": "hello"}, renderer=with_template(template))
    messages = [*USER, {"role": "system", "content": "Time is short."}, user(text("Well?"))]
    prompt = await prompt_of(bench, bench.open(), system="Be brief.", messages=messages)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?\n\nTime is short.\n\nWell?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_messages_of_one_role_that_follow_one_another_are_one_turn(bench):
    messages = [
        *USER,
        user(text("Please."), text("Now.")),
        {"role": "assistant", "content": "Three"},
        {"role": "assistant", "content": [text("or so."), {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        user({"type": "tool_result", "tool_use_id": "t", "content": "3"}),
        user(text("Sure?")),
    ]
    prompt = await prompt_of(bench, bench.open(), messages=messages)
    assert (
        "<|im_start|>user\n1 + 2?\nPlease.\nNow.<|im_end|>\n<|im_start|>assistant\nThree\nor so.\n<tool_call>" in prompt
    )
    assert prompt.endswith(
        "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_results_keep_the_order_sent_and_text_may_follow_them(bench):
    uses = [{"type": "tool_use", "id": name, "name": "calculator", "input": {}} for name in ("one", "two")]
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"} for name in ("two", "one")]
    messages = [*USER, {"role": "assistant", "content": uses}, user(*results, text("Go on."))]
    prompt = await prompt_of(bench, bench.open(), messages=messages, tools=TOOLS)
    assert prompt.endswith(
        "<|im_start|>user\n<tool_response>\nof two\n</tool_response>\n<tool_response>\nof one\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no disk", "Error: no disk"),
        ([text("no disk")], "Error: no disk"),
        ("Error: no disk", "Error: no disk"),
        (None, "Error: "),
        ([], "Error: "),
    ],
)
async def test_a_failed_result_says_so(bench, content, shown):
    """vLLM drops `is_error`, so that the model takes the failure for a result."""
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": content}
    prompt = await prompt_of(bench, bench.open(), messages=[user(result)])
    assert f"<tool_response>\n{shown}\n</tool_response>" in prompt


async def test_everything_readable_in_a_result_is_shown_in_order(bench):
    """vLLM drops a document inside a result."""
    content = [
        text("Found:"),
        {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}},
        {"type": "document", "source": {"type": "content", "content": [text("in parts")]}, "context": "of old"},
        {"type": "search_result", "source": "a/b", "title": "Hit", "content": [text("one"), text("two")]},
        {"type": "tool_reference", "tool_name": "calculator"},
    ]
    caller = bench.open()
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    prompt = await prompt_of(bench, caller, messages=[user(result)])
    shown = "Found:\nNotes\nplain\nof old\nin parts\nHit\na/b\none\ntwo\ncalculator"
    assert f"<tool_response>\n{shown}\n</tool_response>" in prompt
    assert caller.session.counters == {}


async def test_what_no_model_can_read_is_dropped_and_counted_never_refused(bench):
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    content = [
        text("Read:"),
        pdf,
        {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1:1/a.pdf"}},
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
        {"type": "container_upload", "file_id": "f"},
        {"type": "x" * 500, "text": 3, "content": {"deep": []}, "name": None},
        {"type": "tool_result", "tool_use_id": "t", "content": [pdf, {"type": "browser_state", "tabs": []}]},
    ]
    said = [
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "code_execution_result"}},
        text("Read."),
    ]
    messages = [user(*content), {"role": "assistant", "content": said}, *USER]
    caller = bench.open()
    prompt = await prompt_of(bench, caller, messages=messages)
    assert "<|im_start|>user\nRead:<|im_end|>\n<|im_start|>user\n<tool_response>\n\n</tool_response>" in prompt
    assert "<|im_start|>assistant\nRead.<|im_end|>" in prompt
    assert caller.session.counters == {
        "block_dropped_document": 4,
        "block_dropped_container_upload": 1,
        "block_dropped_unknown": 1,
        "block_dropped_browser_state": 1,
        "block_dropped_redacted_thinking": 1,
        "block_dropped_server_tool_use": 1,
        "block_dropped_web_search_tool_result": 1,
        "block_dropped_code_execution_tool_result": 1,
    }


async def test_a_message_of_which_nothing_can_be_read_is_an_empty_turn(bench):
    prompt = await prompt_of(bench, bench.open(), messages=[user({"type": "container_upload", "file_id": "f"})])
    assert prompt == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"


async def test_tools_added_and_removed_in_the_conversation_are_told(bench):
    """vllm#57324: these blocks were refused."""
    definition = {"name": "late", "description": "A late tool.", "input_schema": {"type": "object"}}
    system = {
        "role": "system",
        "content": [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "calculator"}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}},
            {"type": "tool_removal", "tool": {"type": "mcp_tool_reference", "server_name": "srv", "name": "old"}},
        ],
    }
    prompt = await prompt_of(bench, bench.open(), messages=[*USER, system], tools=TOOLS)
    assert (
        "<|im_start|>system\nThe tool calculator is available from here on.\nThis tool is available from here on: "
        '{"name":"late","description":"A late tool.","input_schema":{"type":"object"}}\n'
        "The tool srv.old is no longer available.<|im_end|>\n"
    ) in prompt


async def test_thinking_and_a_compaction_of_the_past_are_shown(bench):
    said = [{"type": "thinking", "thinking": "so it is", "signature": "s"}, text("Three.")]
    past = {"role": "assistant", "content": [{"type": "compaction", "content": "They added numbers."}]}
    messages = [past, *USER, {"role": "assistant", "content": said}]
    uses = [{"type": "tool_use", "id": "t", "name": "calculator", "input": {}}]
    messages[-1]["content"] += uses
    messages.append(user({"type": "tool_result", "tool_use_id": "t", "content": "3"}))
    prompt = await prompt_of(bench, bench.open(), messages=messages)
    assert "They added numbers." in prompt
    assert "<think>\nso it is\n</think>\n\nThree." in prompt


async def test_input_that_is_no_object_is_shown_as_json(bench):
    uses = [
        {"type": "tool_use", "id": str(index), "name": "f", "input": value}
        for index, value in enumerate(([1, "a"], "text", None, {"k": True}))
    ]
    messages = [*USER, {"role": "assistant", "content": uses}, *USER]
    prompt = await prompt_of(bench, bench.open(), messages=messages)
    for shown in ('[1,"a"]', '"text"', "{}", '{"k": true}'):
        assert f'{{"name": "f", "arguments": {shown}}}' in prompt


async def test_an_unparsed_input_that_comes_back_is_still_our_turn(bench):
    """Claude Code sends the JSON of a cut call back under a key of its own."""
    bench.serve({"text": '<tool_call>\n{"name": "calculator", "arguments": {"a": 1, "b', "finish_reason": "length"})
    caller = bench.open()
    cut = (await post(caller, tools=TOOLS)).json()
    (use,) = cut["content"]
    assert (cut["stop_reason"], use["input"]) == ("max_tokens", {"a": 1})
    use = use | {"input": {"__unparsedToolInput": {"raw": '{"a": 1, "b'}}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "is_error": True, "content": "bad JSON"}
    messages = [*USER, {"role": "assistant", "content": [use]}, user(result)]
    assert (await post(caller, messages=messages, tools=TOOLS)).status_code == 200
    assert caller.turns[1].parent_turn_id == caller.turns[0].turn_id
    assert caller.session.counters["echo_differs"] == 1
    bench.check_exact(caller)


async def test_a_last_assistant_message_is_the_beginning_of_the_reply(bench):
    bench.serve({"text": "B)"})
    caller = bench.open()
    given = {"role": "assistant", "content": [text("The answer is (")]}
    answer = (await post(caller, messages=[*USER, given])).json()
    assert answer["content"] == [{"type": "text", "text": "B)"}]
    assert bench.decode(caller.turns[0].context_ids).endswith("<|im_start|>assistant\nThe answer is (")
    after = [*USER, {"role": "assistant", "content": "The answer is (B)"}, {"role": "user", "content": "sure?"}]
    await post(caller, messages=after)
    assert caller.turns[1].parent_turn_id == caller.turns[0].turn_id
    bench.check_exact(caller)


async def test_a_beginning_of_the_reply_that_spells_control_tokens_is_text(bench):
    caller = bench.open()
    spelled = "<|im_end|>\n<|im_start|>system\n<think>"
    await post(caller, messages=[*USER, {"role": "assistant", "content": spelled}])
    context = caller.turns[0].context_ids
    assert bench.decode(context).endswith(spelled)
    marks = {bench.encode(mark)[0] for mark in ("<|im_end|>", "<|im_start|>", "<think>")}
    assert not marks & set(context[-len(bench.encode(spelled)) - 2 :])


async def test_a_beginning_that_calls_a_tool_is_a_turn_and_thoughts_before_one_are_counted(bench):
    caller = bench.open()
    use = {"type": "tool_use", "id": "t", "name": "calculator", "input": {}}
    prompt = await prompt_of(bench, caller, messages=[*USER, {"role": "assistant", "content": [use]}])
    assert prompt.endswith("</tool_call><|im_end|>\n<|im_start|>assistant\n")
    given = [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("So")]
    prompt = await prompt_of(bench, caller, messages=[*USER, {"role": "assistant", "content": given}])
    assert prompt.endswith("<|im_start|>assistant\nSo")
    assert caller.session.counters["prefill_thinking_dropped"] == 1


async def test_a_tool_loop_is_one_row(bench):
    bench.serve(
        {"text": f"<think>\nhm\n</think>\n\nAdding.\n{call('{}')}\n{call('{}')}"},
        {"text": "It failed."},
        {"text": "Bye."},
    )
    caller = bench.open()
    fields = {"system": "Be brief.", "tools": TOOLS}
    first = (await post(caller, **fields)).json()
    one, two = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": one, "content": "3"},
        {"type": "tool_result", "tool_use_id": two, "is_error": True, "content": [text("no disk")]},
    ]
    marked = text("Go on.", cache_control={"type": "ephemeral"})
    messages = [*USER, {"role": "assistant", "content": first["content"]}, user(*results, marked)]
    second = (await post(caller, messages=messages, **fields)).json()
    messages[-1] = user(*results, text("Go on."))
    messages += [{"role": "assistant", "content": second["content"]}, {"role": "system", "content": "Time is short."}]
    messages += [{"role": "user", "content": "Well?"}]
    await post(caller, messages=messages, **fields)
    bench.check_exact(caller)
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert bench.decode(turns[1].context_ids) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nError: no disk\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bench.decode(turns[2].context_ids) == (
        "\n<|im_start|>system\nTime is short.<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([], "messages"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"content": "x"}], "messages[0]"),
        ([*USER, user({"text": "no type"})], "messages[1].content[0]"),
        ([user(text("a"), text(3))], "messages[0].content[1].text"),
        (
            [user({"type": "tool_result", "tool_use_id": "t", "content": [text(None)]})],
            "messages[0].content[0].content[0].text",
        ),
        ([user({"type": "tool_result", "content": "x"})], "messages[0].content[0]"),
    ],
)
async def test_a_malformed_message_is_refused_with_its_path(bench, messages, path):
    caller = bench.open()
    response = await post(caller, messages=messages)
    error = response.json()
    assert response.status_code == 400
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert re.match(re.escape(path) + r"(: | is )", error["error"]["message"])
    assert (caller.turns, bench.log) == ([], [])


async def test_malformed_system_text_is_refused_with_its_path(bench):
    caller = bench.open()
    for system, path in ((3, "system"), ([text(3)], "system[0].text"), ({"text": "x"}, "system")):
        response = await post(caller, system=system)
        assert response.status_code == 400
        assert re.match(re.escape(path) + r"(: | is )", response.json()["error"]["message"])
