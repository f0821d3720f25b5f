"""Anthropic Messages as Claude Code speaks it: its first request, a long conversation, its probes, its counting."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .messages_calls import CLAUDE_CODE_HEADERS, USER, claude_code, fold, post
from .replies import CALCULATOR_BLOCK, call

ARGUMENTS = '{"path": "a"}'

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def ask(caller, messages, number=0):
    """Claude Code's request, and its stream folded."""
    body = claude_code(messages, call=number)
    response = await caller.post("/v1/messages?beta=true", body, **CLAUDE_CODE_HEADERS)
    assert response.status_code == 200, response.text
    return fold(response.content)


def echo(message):
    """A reply as Claude Code sends it back: the input parsed, and nothing else changed."""
    content = []
    for block in message["content"]:
        kept = dict(block)
        if kept["type"] == "tool_use":
            kept["input"] = {"path": "a"} if kept.pop("json") else {}
        content.append(kept)
    return {"role": "assistant", "content": content}


async def test_a_request_of_claude_code_is_served(bench):
    """agent-lightning#267: three system blocks, 24 tools, a system message in the middle, beta fields and headers."""
    bench.serve({"text": f"<think>\nlook first\n</think>\n\nReading.\n{call('{}', name='Tool3')}"})
    caller = bench.open()
    reminder = {"type": "text", "text": "Reminder.", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Read a."}, reminder]},
        {"role": "system", "content": [{"type": "text", "text": "The date is known."}]},
    ]
    reply = await ask(caller, messages)
    assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
    assert (reply["stop_reason"], reply["model"]) == ("tool_use", "claude-opus-5")
    prompt = bench.decode(caller.turns[0].context_ids)
    assert prompt.startswith("<|im_start|>system\nYou are Claude Code.\nUse the tools.")
    assert prompt.count('"type": "function"') == 24
    assert (
        "<|im_start|>user\nRead a.\nReminder.<|im_end|>\n<|im_start|>system\nThe date is known.<|im_end|>\n" in prompt
    )
    assert "billing" not in prompt
    assert caller.turns[0].client["x-claude-code-session-id"] == CLAUDE_CODE_HEADERS["x-claude-code-session-id"]
    assert caller.turns[0].client["anthropic-version"] == "2023-06-01"


async def test_five_turns_with_moving_marks_and_a_changing_billing_block_are_one_row(bench):
    thought = "<think>\nlook\n</think>\n\nReading."
    replies = [f"{thought}\n{call(ARGUMENTS, name=f'Tool{number}')}" for number in range(4)]
    bench.serve(*[{"text": reply} for reply in replies], {"text": "Done."})
    caller = bench.open()
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Read a.", **mark}]},
        {"role": "system", "content": "The date is known."},
    ]
    for number in range(5):
        reply = await ask(caller, messages, number)
        # The mark moves on to the newest block, and the newest only.
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = [
                    {key: value for key, value in block.items() if key != "cache_control"}
                    for block in message["content"]
                ]
        messages.append(echo(reply))
        if reply["stop_reason"] == "tool_use":
            used = reply["content"][-1]["id"]
            result = {"tool_use_id": used, "type": "tool_result", "content": f"content {number}", **mark}
            messages.append({"role": "user", "content": [result]})
    turns = caller.turns
    assert [turn.parent_turn_id for turn in turns] == [None, *[turn.turn_id for turn in turns[:4]]]
    assert [turn.opened_by for turn in turns] == ["start", None, None, None, None]
    assert set(caller.session.counters) == {"max_tokens_clamped"}
    bench.check_exact(caller)


async def test_probes_need_no_key_and_do_not_say_whether_the_session_exists(bench):
    """headroom#2032: Claude Code asks HEAD of its base URL first, and takes 405 for an endpoint that is down."""
    caller = bench.open()
    for url in (caller.url, bench.url + "/s/of-nobody", caller.url + "/"):
        response = await bench.http.head(url, headers={"user-agent": "Bun/1.4.0"})
        assert (response.status_code, response.content) == (200, b"")


async def test_count_tokens_is_what_the_call_is_given_and_records_nothing(bench):
    """vllm#44576, litellm#30043: a broken count stops Claude Code, a wrong one delays its compaction."""
    bench.serve({"text": "<think>\nlong thoughts\n</think>\n\nhello"})
    caller = bench.open()
    kwargs = {"model": "m", "system": "Be brief.", "tools": [CALCULATOR_BLOCK], "thinking": {"type": "adaptive"}}
    counted = await caller.anthropic.messages.count_tokens(messages=USER, **kwargs)
    assert (caller.turns, caller.session.counters, bench.log) == ([], {}, [])
    first = await caller.anthropic.messages.create(messages=USER, max_tokens=50, **kwargs)
    assert caller.turns[0].opened_by == "start"
    assert counted.input_tokens == first.usage.input_tokens
    longer = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    counted = await caller.anthropic.messages.count_tokens(messages=longer, **kwargs)
    beta = await caller.anthropic.beta.messages.count_tokens(messages=longer, **kwargs)
    second = await caller.anthropic.messages.create(messages=longer, max_tokens=50, **kwargs)
    assert counted.input_tokens == beta.input_tokens == second.usage.input_tokens == caller.turns[1].prompt_length
    assert len(caller.turns) == 2


async def test_count_tokens_counts_what_does_not_fit_and_reads_all_that_a_call_may_have(bench):
    bench.serve({"text": "hello"}, max_model_len=40)
    caller = bench.open()
    body = claude_code([{"role": "user", "content": "x " * 500}], call=0)
    response = await caller.post("/v1/messages/count_tokens?beta=true", body, **CLAUDE_CODE_HEADERS)
    assert response.status_code == 200
    assert set(response.json()) == {"input_tokens"}
    assert response.json()["input_tokens"] > 500
    refused = await caller.post("/v1/messages", body, **CLAUDE_CODE_HEADERS)
    count = response.json()["input_tokens"]
    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {count} tokens > 40 maximum",
    }


async def test_count_tokens_needs_no_engine(bench):
    bench.serve({"text": "", "error": "dead"})
    caller = bench.open()
    assert (await post(caller)).status_code == 529
    counted = await caller.anthropic.messages.count_tokens(model="m", messages=USER)
    assert counted.input_tokens == len(bench.encode("<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"))
