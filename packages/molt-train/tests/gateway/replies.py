"""Texts that a policy may sample, requests that agents send, and streams folded back to replies."""

import json
from typing import Any

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALCULATOR_BLOCK = {
    "name": "calculator",
    "description": "Compute.",
    "input_schema": CALCULATOR["function"]["parameters"],
}


def call(arguments: str, name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def fold_chat(chunks: list[Any]) -> dict[str, Any]:
    """A reply folded by hand from chunks, checking the order of a stream on the way."""
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
    assert [choice.delta.role for choice in choices[1:]] == [None] * (len(choices) - 1)
    assert [choice.finish_reason is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    reply: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for choice in choices:
        extra = choice.delta.model_extra or {}
        assert not (choice.delta.content and reply["calls"]), "text may not follow a tool call"
        reply["content"] += choice.delta.content or ""
        reply["reasoning_content"] += extra.get("reasoning_content", "")
        for part in choice.delta.tool_calls or []:
            if part.id:
                assert part.index == len(reply["calls"])
                reply["calls"].append([part.function.name, ""])
            else:
                assert part.function.name is None
            reply["calls"][part.index][1] += part.function.arguments
    return reply | {"finish_reason": choices[-1].finish_reason}


def whole_chat(completion: Any) -> dict[str, Any]:
    """The same of a whole reply."""
    choice = completion.choices[0]
    return {
        "content": choice.message.content,
        "reasoning_content": (choice.message.model_extra or {}).get("reasoning_content", ""),
        "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
        "finish_reason": choice.finish_reason,
    }


def events(body: bytes) -> list[tuple[str | None, Any]]:
    """The frames of an event stream: name and data."""
    frames: list[tuple[str | None, Any]] = []
    for frame in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            frames.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return frames
