"""Anthropic Messages, replies: the order of frames, and what they add up to."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import anthropic
import jiter
import msgspec
import pytest

from molt.train.gateway.wires.messages_reply import MessagesEncoder

from .messages_calls import USER, blocks, both, fold, post, stream
from .replies import CALCULATOR_BLOCK, call, events

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS = [CALCULATOR_BLOCK]
ARGUMENTS = '{"b":2,  "a": 1, "note": "gr\\u00fc\\u00df"}'
FULL = f"<think>\nfirst add\n</think>\n\nLet me see: ünï😀.\n{call(ARGUMENTS)}\n{call('{}')}"


@pytest.mark.parametrize("chunks", [[], [1000], [1, 2, 3, 5, 8, 13]])
async def test_frames_add_up_to_the_whole_reply_and_arguments_byte_for_byte(bench, chunks):
    bench.serve({"text": FULL, "chunks": chunks})
    caller = bench.open()
    folded = await stream(caller, tools=TOOLS)
    whole = (await post(caller, tools=TOOLS)).json()
    assert [block.get("json") for block in folded["content"]] == [None, None, ARGUMENTS, "{}"]
    for block in folded["content"]:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    varying = [whole.pop("id"), folded.pop("id")]
    varying += [block.pop("id") for message in (whole, folded) for block in message["content"][2:]]
    assert folded == whole
    assert len(set(varying)) == 6
    assert [name[:4] for name in varying] == ["msg_"] * 2 + ["tool"] * 4
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize("chunks", [[], [1000], [1, 2, 3, 5, 8, 13]])
async def test_the_sdk_folds_a_stream_to_the_whole_reply(bench, chunks):
    bench.serve({"text": FULL, "chunks": chunks})
    caller = bench.open()
    message = await both(caller, tools=TOOLS)
    assert blocks(message) == [
        {"type": "thinking", "thinking": "first add"},
        {"type": "text", "text": "Let me see: ünï😀."},
        {"type": "tool_use", "name": "calculator", "input": json.loads(ARGUMENTS)},
        {"type": "tool_use", "name": "calculator", "input": {}},
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == caller.turns[0].prompt_length
    bench.check_exact(caller)


async def test_one_message_start_and_no_thinking_delta_in_a_text_block(bench):
    """litellm#32357, #33224, #30014. `fold` asserts both, whatever the pieces."""
    text = "<think>\nhm\n</think>\n\nhello"
    for size in range(1, len(bench.encode(text)) + 1):
        bench.serve({"text": text, "chunks": [size] * len(text)})
        folded = await stream(bench.open())
        assert [block["type"] for block in folded["content"]] == ["thinking", "text"]


async def test_no_empty_first_text_block(bench):
    """litellm#31560, #25852: a spurious empty text block came before thinking and tool calls."""
    bench.serve({"text": f"<think>\nhm\n</think>\n\n{call('{}')}"}, {"text": call("{}")}, {"text": "\n\n" + call("{}")})
    caller = bench.open()
    for expected in (["thinking", "tool_use"], ["tool_use"], ["tool_use"]):
        folded = await stream(caller, tools=TOOLS)
        assert [block["type"] for block in folded["content"]] == expected


async def test_the_first_text_after_thinking_is_not_lost(bench):
    """litellm#30765, with thinking and text in one chunk of the engine, and in two."""
    for chunks in ([1000], [7, 1000], [1]):
        bench.serve({"text": "<think>\nhm\n</think>\n\nThe first words.", "chunks": chunks})
        folded = await stream(bench.open())
        assert folded["content"][1] == {"type": "text", "text": "The first words."}


async def test_reasoning_is_not_dropped(bench):
    """litellm#29518."""
    bench.serve({"text": "<think>\nonly thoughts\n</think>\n\n"})
    message = await both(bench.open())
    assert blocks(message) == [{"type": "thinking", "thinking": "only thoughts"}]
    assert message.stop_reason == "end_turn"


async def test_arguments_in_the_first_chunk_are_sent(bench):
    """vllm#34053: the chunk that began a call had its arguments, which were lost."""
    bench.serve({"text": call('{"a": 1}'), "chunks": [1000]})
    folded = await stream(bench.open(), tools=TOOLS)
    assert folded["content"][0]["json"] == '{"a": 1}'


async def test_a_call_without_arguments_has_an_empty_input(bench):
    bench.serve({"text": '<tool_call>\n{"name": "calculator"}\n</tool_call>'}, {"text": call("{}")})
    caller = bench.open()
    for _ in range(2):
        message = await caller.anthropic.messages.create(model="m", max_tokens=500, messages=USER, tools=TOOLS)
        assert message.content[0].input == {}
        assert (await stream(caller, tools=TOOLS))["content"][0]["json"] in ("", "{}")


async def test_a_call_cut_by_length_shows_its_beginning_and_says_max_tokens(bench):
    """The stream has the JSON so far; the whole reply what the SDK's own accumulator makes of the same."""
    text = call('{"a": 1, "note": "a long note"}')
    bench.serve({"text": text})
    caller = bench.open()
    shown = 0
    for max_tokens in range(1, len(bench.encode(text))):
        message = await both(caller, max_tokens=max_tokens, tools=TOOLS)
        folded = await stream(caller, max_tokens=max_tokens, tools=TOOLS)
        assert message.stop_reason == folded["stop_reason"]
        for block, sent in zip(message.content, folded["content"], strict=True):
            if block.type == "tool_use":
                assert text[text.index('{"a"') :].startswith(sent["json"])
                assert block.input == (
                    jiter.from_json(sent["json"].encode(), partial_mode=True) if sent["json"] else {}
                )
                shown += message.stop_reason == "max_tokens"
    assert shown > 3
    bench.check_exact(caller)


async def test_a_call_cut_behind_a_complete_one_says_max_tokens(bench):
    text = call("{}") + '<tool_call>\n{"name": "calculator", "arguments": {"a": 12'
    bench.serve({"text": text, "finish_reason": "length"})
    message = await both(bench.open(), tools=TOOLS)
    assert [block.type for block in message.content] == ["tool_use", "tool_use"]
    assert message.stop_reason == "max_tokens"


async def test_a_stop_string_inside_a_call_is_named(bench):
    bench.serve({"text": call('{"a": "one HALT two"}')})
    message = await both(bench.open(), tools=TOOLS, stop_sequences=["HALT"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "HALT")


async def test_a_stop_string_inside_a_later_call_is_named_too(bench):
    bench.serve({"text": call("{}") + call('{"a": "one HALT two"}')})
    message = await both(bench.open(), tools=TOOLS, stop_sequences=["HALT"])
    assert [block.type for block in message.content] == ["tool_use", "tool_use"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "HALT")


async def test_a_call_whose_json_breaks_is_a_block_of_its_own(bench):
    bench.serve({"text": call('{"a": 1, oops}') + call('{"b": 2}')})
    message = await both(bench.open(), tools=TOOLS)
    assert [block.input for block in message.content] == [{"a": 1}, {"b": 2}]
    assert message.stop_reason == "tool_use"


async def test_signatures_are_the_same_for_the_same_thoughts(bench):
    """vLLM signs with a random uuid, so that no two echoes of a turn are equal."""
    bench.serve({"text": "<think>\nhm\n</think>\n\nhello"}, {"text": "<think>\nhm, no\n</think>\n\nhello"})
    caller = bench.open()
    whole = [(await post(caller)).json()["content"][0]["signature"] for _ in range(2)]
    bench.serve({"text": "<think>\nhm\n</think>\n\nhello"}, {"text": "<think>\nhm, no\n</think>\n\nhello"})
    caller = bench.open()
    streamed = [(await stream(caller))["content"][0]["signature"] for _ in range(2)]
    assert whole == streamed
    assert len({*whole, ""}) == 3


async def test_input_tokens_leave_out_cached_ones_and_thinking_is_counted(bench, monkeypatch):
    text = "<think>\nhm\n</think>\n\nhello"
    bench.serve({"text": text})
    run = bench.scripted.stream

    async def cached(request):
        async for chunk in run(request):
            yield msgspec.structs.replace(chunk, num_cached_tokens=4)

    generate = bench.scripted.generate

    async def cached_whole(request):
        return msgspec.structs.replace(await generate(request), num_cached_tokens=4)

    monkeypatch.setattr(bench.scripted, "stream", cached)
    monkeypatch.setattr(bench.scripted, "generate", cached_whole)
    caller = bench.open()
    usage = (await both(caller)).usage
    turn = caller.turns[0]
    assert usage.cache_read_input_tokens == 4
    assert usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + 4 == turn.prompt_length
    assert usage.output_tokens == len(turn.token_ids)
    assert usage.output_tokens_details.thinking_tokens == len(bench.encode("<think>\nhm\n</think>"))
    begun = events((await post(caller, stream=True)).content)[0][1]["message"]["usage"]
    assert (begun["input_tokens"], begun["cache_read_input_tokens"]) == (usage.input_tokens, 4), "known from the start"


async def test_an_engine_that_dies_in_mid_stream_is_an_error_event_and_no_end(bench):
    bench.serve({"text": "half a sentence", "error": "dead", "chunks": [1]})
    caller = bench.open()
    response = await post(caller, stream=True)
    frames = events(response.content)
    name, data = frames[-1]
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "overloaded_error")
    assert data["request_id"] == response.headers["request-id"]
    assert "message_stop" not in [name for name, _ in frames]
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        async with caller.anthropic.messages.stream(model="m", max_tokens=9, messages=USER) as manager:
            await manager.get_final_message()


async def test_a_ping_between_any_two_deltas_is_skipped_by_the_sdk(bench, monkeypatch):
    bench.serve({"text": FULL, "chunks": [1] * 200})
    step = MessagesEncoder.step
    monkeypatch.setattr(MessagesEncoder, "step", lambda self, given: self.keepalive() + step(self, given))
    caller = bench.open()
    message = await both(caller, tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    body = (await post(caller, tools=TOOLS, stream=True)).content
    assert body.count(b"event: ping") > 50
    assert [block.get("json") for block in fold(body)["content"]] == [None, None, ARGUMENTS, "{}"]


async def test_the_beta_route_gives_the_same(bench):
    bench.serve({"text": FULL})
    caller = bench.open()
    kwargs = {
        "model": "m",
        "max_tokens": 500,
        "messages": USER,
        "tools": TOOLS,
        "betas": ["context-management-2025-06-27"],
    }
    whole = await caller.anthropic.beta.messages.create(**kwargs)
    async with caller.anthropic.beta.messages.stream(**kwargs) as manager:
        folded = await manager.get_final_message()
    assert blocks(folded) == blocks(whole)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert caller.turns[0].client["anthropic-beta"] == "context-management-2025-06-27"
    assert caller.turns[0].client["anthropic-version"]


async def test_zero_tokens_warm_a_cache_and_sample_nothing(bench):
    caller = bench.open()
    message = await both(caller, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert (caller.turns, bench.log) == ([], [])


async def test_max_tokens_is_clamped_not_refused(bench):
    """Claude Code asks for 32000, LiteLLM for 128000, whatever the window."""
    bench.serve({"text": "hello"}, max_model_len=200)
    caller = bench.open()
    for max_tokens in (32000, 128000, 10**30):
        assert (await post(caller, max_tokens=max_tokens)).json()["stop_reason"] == "end_turn"
    assert caller.session.counters["max_tokens_clamped"] == 3
    assert [turn.sampling["max_tokens"] + turn.prompt_length for turn in caller.turns] == [200] * 3


async def test_max_tokens_is_required(bench):
    response = await bench.open().post("/v1/messages", {"model": "m", "messages": USER})
    assert response.status_code == 400
    assert "max_tokens" in response.json()["error"]["message"]


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
    assert (await both(bench.open(), tools=TOOLS)).stop_reason == "tool_use"


async def test_thinking_switched_off_closes_it_in_the_prompt_and_hides_it(bench):
    bench.serve({"text": "<think>\nhm\n</think>\n\nhello"})
    caller = bench.open()
    message = await both(caller, thinking={"type": "disabled"})
    assert blocks(message) == [{"type": "text", "text": "hello"}]
    assert bench.decode(caller.turns[0].context_ids).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "adaptive", "display": "omitted"},
        {"type": "between_tools"},
        {"type": "of a later year", "depth": 3},
        None,
    ],
)
async def test_thinking_of_any_kind_is_accepted_and_shown(bench, thinking):
    bench.serve({"text": "<think>\nhm\n</think>\n\nhello"})
    caller = bench.open()
    folded = await stream(caller, thinking=thinking)
    assert [block["type"] for block in folded["content"]] == ["thinking", "text"]
    assert bench.decode(caller.turns[0].context_ids).endswith("<|im_start|>assistant\n")
