"""Requests to the Messages wire as its clients send them, and its streams folded by hand."""
# ruff: noqa: TID252 - the folders of tests are no installed package

from typing import Any

from .replies import events

USER = [{"role": "user", "content": "1 + 2?"}]

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_CLAUDE_CODE_BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,thinking-token-count-2026-05-13,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24"
)
CLAUDE_CODE_HEADERS = {
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": _CLAUDE_CODE_BETAS,
    "x-claude-code-session-id": "00000000-0000-4000-8000-000000000000",
    "x-stainless-retry-count": "0",
}


def blocks(message: Any) -> list[dict[str, Any]]:
    """The content of an SDK's message, without what differs from call to call."""
    return [block.model_dump(exclude_none=True, exclude={"id", "signature"}) for block in message.content]


async def both(caller: Any, **kwargs: Any) -> Any:
    """The whole reply, checked against what the SDK folds of the stream."""
    kwargs = {"model": "m", "max_tokens": 500, "messages": USER, **kwargs}
    whole = await caller.anthropic.messages.create(**kwargs)
    async with caller.anthropic.messages.stream(**kwargs) as manager:
        folded = await manager.get_final_message()
    assert blocks(folded) == blocks(whole)
    assert (folded.stop_reason, folded.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert folded.usage.model_dump() == whole.usage.model_dump()
    return whole


async def post(caller: Any, path: str = "/v1/messages", **fields: Any) -> Any:
    """The response to a raw request: one user message unless others are given."""
    return await caller.post(path, {"model": "m", "max_tokens": 500, "messages": USER, **fields})


async def stream(caller: Any, **fields: Any) -> dict[str, Any]:
    """A streamed reply, folded."""
    return fold((await post(caller, stream=True, **fields)).content)


def fold(body: bytes) -> dict[str, Any]:
    """The message that a stream's frames add up to, with every rule of their order checked on the way.

    The input of a tool call stays the JSON text that was sent, under `json`.
    """
    frames = events(body)
    while frames[0][0] == "ping":  # while the call waited
        del frames[0]
    assert all(name == data["type"] for name, data in frames), "an unnamed event is lost on the SDK"
    names = [name for name, _ in frames]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert [names.count(name) for name in ("message_start", "message_delta", "message_stop")] == [1, 1, 1]
    message = frames[0][1]["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    open_block: dict[str, Any] | None = None
    for name, data in frames[2:-2]:
        if name == "ping":
            continue
        if name == "content_block_start":
            assert (open_block, data["index"]) == (None, len(message["content"]))
            open_block = data["content_block"]
            message["content"].append(open_block)
            if open_block["type"] == "tool_use":
                assert open_block.pop("input") == {}
                open_block["json"] = ""
            continue
        assert (open_block is not None, data["index"]) == (True, len(message["content"]) - 1)
        assert open_block is not None
        if name == "content_block_stop":
            assert open_block["type"] != "thinking" or open_block["signature"]
            open_block = None
        else:
            _grow(open_block, data["delta"])
    assert open_block is None
    return message | frames[-2][1]["delta"] | {"usage": frames[-2][1]["usage"]}


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "signature_delta":
        assert (block["type"], block["signature"]) == ("thinking", ""), "one signature, of a thinking block"
        block["signature"] = delta["signature"]
        return
    kind, field = _DELTAS[block["type"]]
    assert delta["type"] == kind, "a delta of another kind than its block"
    assert not block.get("signature"), "the signature comes last"
    target = "json" if block["type"] == "tool_use" else field
    block[target] += delta[field]


def claude_code(messages: list[Any], *, call: int) -> dict[str, Any]:
    """The body of Claude Code's request number `call`: its billing block is another each time."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch={call:05x};"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Use the tools.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
        "additionalProperties": False,
    }
    tools = [{"name": f"Tool{i}", "description": f"Tool number {i}.", "input_schema": schema} for i in range(24)]
    return {
        "model": "claude-opus-5",
        "messages": messages,
        "system": system,
        "tools": tools,
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
