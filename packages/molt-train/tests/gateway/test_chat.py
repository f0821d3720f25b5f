"""Chat Completions through the real openai SDK: whole, streamed, and in tool loops."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .replies import CALCULATOR, call, events, fold_chat, whole_chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "1 + 2?"}]
ARGUMENTS = '{"b":2,  "a": 1, "note": "gr\\u00fc\\u00df \\ud83d\\ude00 <b>"}'
FULL = f"<think>\nfirst add\n</think>\n\nLet me see: ünï😀.\n{call(ARGUMENTS)}\n{call('{}')}"


async def stream(caller, messages=USER, **kwargs):
    chunks = await caller.openai.chat.completions.create(model="m", messages=messages, stream=True, **kwargs)
    return [chunk async for chunk in chunks]


async def test_a_whole_reply_shows_reasoning_text_and_calls(bench):
    bench.serve({"text": FULL})
    caller = bench.open()
    completion = await caller.openai.chat.completions.create(model="any name", messages=USER, tools=[CALCULATOR])
    assert whole_chat(completion) == {
        "content": "Let me see: ünï😀.",
        "reasoning_content": "first add",
        "calls": [["calculator", ARGUMENTS], ["calculator", "{}"]],
        "finish_reason": "tool_calls",
    }
    assert completion.model == "any name"
    turn = caller.turns[0]
    assert completion.id == turn.response_id
    assert completion.usage.prompt_tokens == turn.prompt_length
    assert completion.usage.completion_tokens == len(turn.token_ids)
    think = bench.encode("</think>")[0]
    assert completion.usage.completion_tokens_details.reasoning_tokens == turn.token_ids.index(think) + 1
    assert len({tool_call.id for tool_call in completion.choices[0].message.tool_calls}) == 2
    bench.check_exact(caller)


async def test_every_field_of_a_whole_reply_is_there_and_no_other(bench, monkeypatch):
    bench.serve({"text": FULL})
    generate = bench.scripted.generate

    async def cached(request):
        return msgspec.structs.replace(await generate(request), num_cached_tokens=4)

    monkeypatch.setattr(bench.scripted, "generate", cached)
    caller = bench.open()
    response = await caller.post("/v1/chat/completions", {"model": "m", "messages": USER, "tools": [CALCULATOR]})
    body, turn = response.json(), caller.turns[0]
    calls = body["choices"][0]["message"]["tool_calls"]
    assert body == {
        "id": turn.response_id,
        "object": "chat.completion",
        "created": body["created"],
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Let me see: ünï😀.",
                    "refusal": None,
                    "reasoning": "first add",
                    "reasoning_content": "first add",
                    "tool_calls": [
                        {
                            "id": calls[0]["id"],
                            "type": "function",
                            "function": {"name": "calculator", "arguments": ARGUMENTS},
                        },
                        {
                            "id": calls[1]["id"],
                            "type": "function",
                            "function": {"name": "calculator", "arguments": "{}"},
                        },
                    ],
                },
                "finish_reason": "tool_calls",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": turn.prompt_length,
            "completion_tokens": len(turn.token_ids),
            "total_tokens": turn.prompt_length + len(turn.token_ids),
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": turn.token_ids.index(bench.encode("</think>")[0]) + 1},
        },
        "system_fingerprint": None,
    }


@pytest.mark.parametrize("end", ["</think>", call("{}"), ""])
async def test_reasoning_is_counted_to_what_ends_it(bench, end):
    bench.serve({"text": "<think>\nfirst add\n" + end})
    caller = bench.open()
    completion = await caller.openai.chat.completions.create(model="m", messages=USER, tools=[CALCULATOR])
    before = len(bench.encode("<think>\nfirst add\n"))
    counted = {"</think>": before + 1, "": before + 1}.get(end, before)  # the end of the mark, or of the reply
    assert completion.usage.completion_tokens_details.reasoning_tokens == counted


@pytest.mark.parametrize("chunks", [[], [1000], [1, 2, 3, 5, 8, 13]])
async def test_a_stream_folds_to_the_whole_reply(bench, chunks):
    bench.serve({"text": FULL, "chunks": chunks})
    caller = bench.open()
    whole = whole_chat(await caller.openai.chat.completions.create(model="m", messages=USER, tools=[CALCULATOR]))
    assert fold_chat(await stream(caller, tools=[CALCULATOR])) == whole
    bench.check_exact(caller)


async def test_the_sdks_own_accumulator_gives_the_whole_reply(bench):
    strict = {**CALCULATOR["function"], "strict": True}
    bench.serve({"text": FULL})
    caller = bench.open()
    tools = [{"type": "function", "function": strict}]
    async with caller.openai.chat.completions.stream(model="m", messages=USER, tools=tools) as manager:
        final = await manager.get_final_completion()
    whole = await caller.openai.chat.completions.create(model="m", messages=USER, tools=tools)
    assert whole_chat(final) == whole_chat(whole)


async def test_a_stream_ends_with_usage_and_done_and_names_no_vendor_extras(bench):
    bench.serve({"text": "hello world"})
    caller = bench.open()
    body = {"model": "m", "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    response = await caller.post("/v1/chat/completions", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == response.headers["request-id"]
    frames = [data for _, data in events(response.content)]
    assert frames[-1] == "[DONE]"
    assert frames[-2]["choices"] == []
    assert frames[-2]["usage"]["completion_tokens"] == len(caller.turns[0].token_ids)
    assert not {"token_ids", "prompt_token_ids", "stop_reason"} & {key for frame in frames[:-1] for key in frame}


async def test_a_client_that_names_no_model_is_answered_by_the_served_one(bench):
    caller = bench.open()
    assert (await caller.post("/v1/chat/completions", {"messages": USER})).json()["model"] == "policy"


async def test_stream_options_without_stream_are_ignored(bench):
    caller = bench.open()
    body = {"messages": USER, "stream_options": {"include_usage": True}, "tools": [], "nobody_knows": 1}
    assert (await caller.post("/v1/chat/completions", body)).json()["choices"][0]["message"]["content"] == "hello"


async def test_log_probs_are_those_of_the_record_whole_and_streamed(bench):
    bench.serve({"text": "hello world", "logprob": -0.25, "chunks": [2]})
    caller = bench.open()
    whole = await caller.openai.chat.completions.create(model="m", messages=USER, logprobs=True)
    expected = [bench.decode([token_id]) for token_id in caller.turns[0].token_ids]
    assert [(item.token, item.logprob) for item in whole.choices[0].logprobs.content] == [(t, -0.25) for t in expected]
    chunks = await stream(caller, logprobs=True)
    streamed = [item.token for c in chunks if c.choices[0].logprobs for item in c.choices[0].logprobs.content]
    assert streamed == expected
    plain = await caller.openai.chat.completions.create(model="m", messages=USER)
    assert plain.choices[0].logprobs is None


async def test_a_tool_loop_of_several_turns_is_one_row(bench):
    bench.serve(
        {"text": call('{"a": 1, "b": 2}') + "\n" + call('{"a": 3, "b": 4}')},
        {"text": f"<think>\nnow add\n</think>\n\n{call('{}')}"},
        {"text": "The answer is 10."},
    )
    caller = bench.open()
    messages = [{"role": "system", "content": "Use tools."}, *USER]
    for streamed in (True, False, True):
        if streamed:
            async with caller.openai.chat.completions.stream(
                model="m",
                messages=messages,
                tools=[{**CALCULATOR, "function": {**CALCULATOR["function"], "strict": True}}],
            ) as manager:
                message = (await manager.get_final_completion()).choices[0].message
        else:
            completion = await caller.openai.chat.completions.create(
                model="m",
                messages=messages,
                tools=[{**CALCULATOR, "function": {**CALCULATOR["function"], "strict": True}}],
            )
            message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": tool_call.id, "content": f"result {index}"}
            for index, tool_call in enumerate(message.tool_calls or [])
        ]
    rows = bench.check_exact(caller)
    first, second, third = caller.turns
    assert (first.opened_by, second.parent_turn_id, third.parent_turn_id) == ("start", first.turn_id, second.turn_id)
    assert all(turn.adopted and turn.status == "delivered" for turn in caller.turns)
    results = "<tool_response>\nresult 0\n</tool_response>\n<tool_response>\nresult 1\n</tool_response>"
    assert bench.decode(second.context_ids) == f"\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"
    assert bench.decode(rows[third.turn_id]).endswith("assistant\nThe answer is 10.<|im_end|>")
    assert not caller.session.counters


async def test_finish_reasons_are_those_of_the_engine_unless_a_call_is_whole(bench):
    """vllm#53269 and vllm#47963: a call that the length limit cuts ends with `length`, whole and streamed."""
    bench.serve(
        {"match": "cut", "text": "one two", "finish_reason": "length"},
        {
            "match": "open call",
            "text": '<tool_call>\n{"name": "calculator", "arguments": {"a"',
            "finish_reason": "length",
        },
        {"match": "broken call", "text": call('{"a": 2')},
        {"match": "ended call", "text": call("{}") + "\n<tool_call>\n{", "finish_reason": "length"},
        {"text": call("{}")},
    )
    caller = bench.open()

    async def finish(text, **kwargs):
        messages = [{"role": "user", "content": text}]
        completion = await caller.openai.chat.completions.create(
            model="m", messages=messages, tools=[CALCULATOR], **kwargs
        )
        assert fold_chat(await stream(caller, messages, tools=[CALCULATOR], **kwargs)) == whole_chat(completion)
        return whole_chat(completion)

    assert (await finish("cut"))["finish_reason"] == "length"
    opened = await finish("open call")
    assert opened == {
        "content": "",
        "reasoning_content": "",
        "calls": [["calculator", '{"a"']],
        "finish_reason": "length",
    }
    assert (await finish("broken call"))["finish_reason"] == "stop", "there is no call to be run"
    assert (await finish("ended call"))["finish_reason"] == "length"
    assert (await finish("x"))["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "calculator"}}
    assert (await finish("x", tool_choice=named))["finish_reason"] == "stop"
    assert (await finish("x", max_tokens=3))["finish_reason"] == "length"


async def test_calls_are_text_where_no_tool_may_be_called(bench):
    text = call('{"a": 1}')
    bench.serve({"text": text})
    caller = bench.open()
    for kwargs in ({}, {"tools": [CALCULATOR], "tool_choice": "none"}):
        whole = whole_chat(await caller.openai.chat.completions.create(model="m", messages=USER, **kwargs))
        assert whole == {"content": text, "reasoning_content": "", "calls": [], "finish_reason": "stop"}
        assert fold_chat(await stream(caller, **kwargs)) == whole
    assert {tuple(turn.token_ids) for turn in caller.turns} == {(*bench.encode(text), *bench.encode("<|im_end|>"))}


async def test_without_parallel_calls_a_second_call_stays_in_the_record_only(bench):
    bench.serve({"text": call("{}") + call('{"a": 1}')})
    caller = bench.open()
    kwargs = {"tools": [CALCULATOR], "parallel_tool_calls": False}
    whole = whole_chat(await caller.openai.chat.completions.create(model="m", messages=USER, **kwargs))
    assert whole["calls"] == [["calculator", "{}"]]
    assert fold_chat(await stream(caller, **kwargs)) == whole
    assert caller.session.counters["tool_call_hidden"] == 2
    assert bench.decode(caller.turns[0].token_ids).count("<tool_call>") == 2


async def test_stop_strings_end_the_text_and_stay_in_the_record(bench):
    bench.serve({"text": "alpha beta STOP gamma"})
    caller = bench.open()
    whole = whole_chat(await caller.openai.chat.completions.create(model="m", messages=USER, stop=["STOP", "zzz"]))
    assert (whole["content"], whole["finish_reason"]) == ("alpha beta ", "stop")
    assert fold_chat(await stream(caller, stop="STOP")) == whole
    assert bench.decode(caller.turns[0].token_ids).startswith("alpha beta STOP")
    bench.check_exact(caller)


async def test_content_may_be_parts_null_or_absent(bench):
    bench.serve({"text": "ok"})
    caller = bench.open()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "hm"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{bad"}}],
        },
        {"role": "function", "name": "f", "content": "old"},
    ]
    response = await caller.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 200
    prompt = bench.decode(caller.turns[0].context_ids)
    assert "<|im_start|>system\nrules<|im_end|>" in prompt
    assert "<|im_start|>user\none\ntwo<|im_end|>" in prompt
    assert '{"name": "f", "arguments": {bad}' in prompt
    assert "<tool_response>\nold\n</tool_response>" in prompt


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "{}", "hi", "é", "😀", "{", '"', "\\", "<", "</",
     '\n{"name": "f", "arguments": {"x": "é</tool_call>"}}\n', '{"name": "f", "arguments": {"a":1}}', "STOP", "ST"]
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=12), st.lists(st.integers(1, 5), max_size=6), st.booleans())
async def test_any_sampled_stream_folds_to_its_whole_reply(bench, pieces, chunks, stops):
    bench.serve({"text": "".join(pieces), "chunks": chunks})
    caller = bench.open()
    kwargs = {"tools": [CALCULATOR], "stop": ["STOP"]} if stops else {"tools": [CALCULATOR]}
    whole = whole_chat(await caller.openai.chat.completions.create(model="m", messages=USER, **kwargs))
    assert fold_chat(await stream(caller, **kwargs)) == whole
    bench.check_exact(caller)
