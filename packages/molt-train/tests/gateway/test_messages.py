"""Anthropic Messages through the real anthropic SDK: whole, streamed, counted, and in tool loops."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import pytest

from .replies import CALCULATOR_BLOCK, call, events

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "1 + 2?"}]
ARGUMENTS = '{"b":2,  "a": 1, "note": "gr\\u00fc\\u00df"}'
FULL = f"<think>\nfirst add\n</think>\n\nLet me see: ünï😀.\n{call(ARGUMENTS)}\n{call('{}')}"


def blocks(message):
    return [block.model_dump(exclude_none=True, exclude={"id", "signature"}) for block in message.content]


async def both(caller, **kwargs):
    """The whole reply, checked against what the SDK folds of the stream."""
    kwargs = {"model": "m", "max_tokens": 500, "messages": USER, **kwargs}
    whole = await caller.anthropic.messages.create(**kwargs)
    async with caller.anthropic.messages.stream(**kwargs) as manager:
        folded = await manager.get_final_message()
    assert blocks(folded) == blocks(whole)
    assert (folded.stop_reason, folded.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert folded.usage.model_dump() == whole.usage.model_dump()
    return whole


@pytest.mark.parametrize("chunks", [[], [1000], [1, 2, 3, 5, 8, 13]])
async def test_whole_and_stream_show_thinking_text_and_calls(bench, chunks):
    bench.serve({"text": FULL, "chunks": chunks})
    caller = bench.open()
    message = await both(caller, tools=[CALCULATOR_BLOCK])
    assert blocks(message) == [
        {"type": "thinking", "thinking": "first add"},
        {"type": "text", "text": "Let me see: ünï😀."},
        {"type": "tool_use", "name": "calculator", "input": json.loads(ARGUMENTS)},
        {"type": "tool_use", "name": "calculator", "input": {}},
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == caller.turns[0].prompt_length
    bench.check_exact(caller)


async def test_the_frames_of_a_stream_come_in_order(bench):
    bench.serve({"text": FULL})
    caller = bench.open()
    body = {"max_tokens": 500, "messages": USER, "tools": [CALCULATOR_BLOCK], "stream": True}
    frames = events((await caller.post("/v1/messages?beta=true", body)).content)
    assert all(name == data["type"] for name, data in frames)
    names = [name for name, _ in frames]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert frames[0][1]["message"]["stop_reason"] is None
    index, kind, signed = -1, None, 0
    for name, data in frames[2:-2]:
        if name == "content_block_start":
            assert (kind, data["index"]) == (None, index + 1), "blocks never interleave, indices are contiguous"
            index, kind = data["index"], data["content_block"]["type"]
            assert data["content_block"].get("input", {}) == {}
        elif name == "content_block_stop":
            kind = None
        else:
            assert data["index"] == index
            allowed = {
                "text": ["text_delta"],
                "thinking": ["thinking_delta", "signature_delta"],
                "tool_use": ["input_json_delta"],
            }
            assert data["delta"]["type"] in allowed[kind]
            signed += data["delta"]["type"] == "signature_delta"
    assert (index, signed) == (3, 1)
    sent = [
        data["delta"]["partial_json"]
        for name, data in frames
        if name == "content_block_delta" and "partial_json" in data["delta"]
    ]
    assert sent == [ARGUMENTS, "{}"]


async def test_a_tool_loop_is_one_row_and_a_failed_tool_says_so(bench):
    bench.serve(
        {"text": f"<think>\nhm\n</think>\n\nAdding.\n{call('{}')}\n{call('{}')}"},
        {"text": "It failed."},
        {"text": "Bye."},
    )
    caller = bench.open()
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc=1"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    first = await caller.anthropic.messages.create(
        model="m", max_tokens=99, system=system, messages=USER, tools=[CALCULATOR_BLOCK]
    )
    one, two = [block.id for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": one, "content": "3"},
        {"type": "tool_result", "tool_use_id": two, "is_error": True, "content": [{"type": "text", "text": "no disk"}]},
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    system[0]["text"] = "x-anthropic-billing-header: cc=2"
    messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await caller.anthropic.messages.create(
        model="m", max_tokens=99, system=system, messages=messages, tools=[CALCULATOR_BLOCK]
    )
    results[2].pop("cache_control")
    messages += [{"role": "assistant", "content": second.content}, {"role": "system", "content": "Time is short."}]
    messages += [{"role": "user", "content": "Well?"}]
    await caller.anthropic.messages.create(
        model="m", max_tokens=99, system="Be brief.", messages=messages, tools=[CALCULATOR_BLOCK]
    )
    bench.check_exact(caller)
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert "billing" not in bench.decode(turns[0].context_ids)
    assert bench.decode(turns[1].context_ids) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nError: no disk\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bench.decode(turns[2].context_ids) == (
        "\n<|im_start|>system\nTime is short.<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_stop_reasons(bench):
    bench.serve({"text": "alpha beta STOP gamma"}, max_model_len=60)
    caller = bench.open()
    stopped = await both(caller, max_tokens=40, stop_sequences=["zzz", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "alpha beta "
    assert (await both(caller, max_tokens=2)).stop_reason == "max_tokens"
    assert (await both(caller, max_tokens=40)).stop_reason == "end_turn"
    filler = [{"role": "user", "content": "x" * 44}]
    assert (await both(caller, messages=filler)).stop_reason == "model_context_window_exceeded"
    bench.serve({"text": call("{}") + " and more", "finish_reason": "length"})
    assert (await both(bench.open(), tools=[CALCULATOR_BLOCK])).stop_reason == "tool_use"


async def test_count_tokens_is_what_the_call_is_given_and_records_nothing(bench):
    bench.serve({"text": "<think>\nlong thoughts\n</think>\n\nhello"})
    caller = bench.open()
    kwargs = {"model": "m", "system": "Be brief.", "tools": [CALCULATOR_BLOCK]}
    counted = await caller.anthropic.messages.count_tokens(messages=USER, **kwargs)
    assert caller.turns == []
    first = await caller.anthropic.messages.create(messages=USER, max_tokens=50, **kwargs)
    assert counted.input_tokens == first.usage.input_tokens
    longer = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    counted = await caller.anthropic.messages.count_tokens(messages=longer, **kwargs)
    second = await caller.anthropic.messages.create(messages=longer, max_tokens=50, **kwargs)
    assert counted.input_tokens == second.usage.input_tokens == caller.turns[1].prompt_length
    assert len(caller.turns) == 2


async def test_a_last_assistant_message_is_the_beginning_of_the_reply(bench):
    bench.serve({"text": "B)"})
    caller = bench.open()
    given = [*USER, {"role": "assistant", "content": "The answer is ("}]
    message = await both(caller, messages=given)
    assert message.content[0].text == "B)"
    assert bench.decode(caller.turns[0].context_ids).endswith("<|im_start|>assistant\nThe answer is (")
    after = [*USER, {"role": "assistant", "content": "The answer is (B)"}, {"role": "user", "content": "sure?"}]
    await caller.anthropic.messages.create(model="m", max_tokens=9, messages=after)
    assert caller.turns[2].parent_turn_id == caller.turns[1].turn_id
    bench.check_exact(caller)


async def test_zero_tokens_warm_a_cache_and_sample_nothing(bench):
    caller = bench.open()
    message = await both(caller, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert (caller.turns, bench.log) == ([], [])


async def test_what_no_model_can_read_is_dropped_and_counted(bench):
    caller = bench.open()
    content = [
        {"type": "text", "text": "Read:"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a plain document"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
        {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "found"}]},
        {"type": "container_upload", "file_id": "f"},
    ]
    tools = [CALCULATOR_BLOCK, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": content}], "tools": tools}
    assert (await caller.post("/v1/messages", body)).status_code == 200
    prompt = bench.decode(caller.turns[0].context_ids)
    assert "Read:\na plain document\nfound<|im_end|>" in prompt
    assert "web_search" not in prompt
    assert caller.session.counters == {
        "block_dropped_document": 1,
        "block_dropped_container_upload": 1,
        "tool_without_schema_omitted": 1,
    }


async def test_thinking_switched_off_closes_it_in_the_prompt_and_hides_it(bench):
    bench.serve({"text": "<think>\nhm\n</think>\n\nhello"})
    caller = bench.open()
    message = await both(caller, thinking={"type": "disabled"})
    assert blocks(message) == [{"type": "text", "text": "hello"}]
    assert bench.decode(caller.turns[0].context_ids).endswith("<think>\n\n</think>\n\n")


async def test_tool_choice(bench):
    bench.serve({"text": call("{}") + call("{}")})
    caller = bench.open()
    tools = [CALCULATOR_BLOCK]
    one = await both(caller, tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(one.content) == 1
    none = await both(caller, tools=tools, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    forced = await both(caller, tools=tools, tool_choice={"type": "tool", "name": "calculator"})
    assert forced.stop_reason == "tool_use"
    assert caller.session.counters["tool_choice_not_enforced"] == 2
