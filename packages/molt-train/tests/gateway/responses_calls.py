"""Calls of the Responses wire that check a whole reply against its stream, frame by frame and as the SDK folds it."""
# ruff: noqa: TID252 - the folders of tests are no installed package

from typing import Any

from openai._models import validate_type
from openai.types.responses import Response, ResponseStreamEvent

from .replies import events

CALCULATOR_TOOL = {
    "type": "function",
    "name": "calculator",
    "description": "Compute.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'},
}
CALCULATOR_OFFER = {
    "type": "function",
    "function": {key: value for key, value in CALCULATOR_TOOL.items() if key != "type"},
}
PARTS = {"message": ("output_text", "text"), "reasoning": ("reasoning_text", "text")}
CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
_EVENT: Any = ResponseStreamEvent
TIMES = ("created_at", "completed_at")


async def post(caller: Any, **body: Any) -> dict[str, Any]:
    """A whole reply, which the SDK's own type takes."""
    response = await caller.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    validate_type(type_=Response, value=response.json())
    return response.json()


async def frames(caller: Any, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed reply, each taken by the SDK's own type, in an order that is allowed."""
    response = await caller.post("/v1/responses", {**body, "stream": True})
    assert response.status_code == 200, response.text
    return checked(response.content)


def checked(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream, checked as in `frames`."""
    named = events(content)
    data = [frame for _, frame in named]
    for name, frame in named:
        assert name == frame["type"]
        validate_type(type_=_EVENT, value=_with_known_code(frame))
    assert [frame["sequence_number"] for frame in data] == list(range(len(data)))
    check_order(data)
    return data


def _with_known_code(frame: dict[str, Any]) -> dict[str, Any]:
    """The vendor ends streams with `context_length_exceeded`, and Codex stops at it; the SDK's type has it not."""
    error = frame.get("response", {}).get("error")
    if error and error["code"] == "context_length_exceeded":
        return frame | {"response": frame["response"] | {"error": error | {"code": "server_error"}}}
    return frame


def check_order(data: list[dict[str, Any]]) -> None:
    """Created, in progress, the items one after the other and each under one identity, then one end."""
    assert [frame["type"] for frame in data[:2]] == ["response.created", "response.in_progress"]
    assert data[0]["response"] == data[1]["response"]
    assert (data[0]["response"]["output"], data[0]["response"]["status"]) == ([], "in_progress")
    assert [frame["type"] for frame in data if frame["type"] in ENDS] == [data[-1]["type"]]
    assert len({frame["response"]["id"] for frame in data if "response" in frame}) == 1
    done: list[dict[str, Any]] = []
    rest = [frame for frame in data[2:-1] if frame["type"] != "response.in_progress"]
    while rest:
        end = next((i for i, frame in enumerate(rest) if frame["type"] == "response.output_item.done"), None)
        if end is None:
            assert data[-1]["type"] == "response.failed"
            break
        done.append(check_item(rest[: end + 1], len(done)))
        rest = rest[end + 1 :]
    assert data[-1]["response"]["output"] == done


ENDS = ("response.completed", "response.incomplete", "response.failed")


def check_item(data: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The events of one item. Returns the item."""
    added, *middle, last = data
    item = last["item"]
    kind = item["type"]
    assert (added["type"], last["type"]) == ("response.output_item.added", "response.output_item.done")
    assert {frame["output_index"] for frame in data} == {index}
    assert {frame["item_id"] for frame in middle} == {item["id"]}
    for name in ("id", "type", "call_id", "name", "namespace", "role"):
        assert added["item"].get(name) == item.get(name)
    assert added["item"]["status"] == "in_progress"
    assert item["status"] in ("completed", "incomplete")
    event, field = (PARTS | CALLS)[kind]
    if kind in PARTS:
        assert added["item"]["content"] == []
        assert {frame["content_index"] for frame in middle} == {0}
        begun, *middle, ended = middle
        assert (begun["type"], ended["type"]) == ("response.content_part.added", "response.content_part.done")
        assert begun["part"]["text"] == ""
        assert ended["part"] == item["content"][0]
        text = ended["part"]["text"]
    else:
        assert added["item"][field] == ""
        text = item[field]
    *deltas, whole = middle
    assert whole["type"] == f"response.{event}.done"
    assert {frame["type"] for frame in deltas} <= {f"response.{event}.delta"}
    assert whole[field] == text == "".join(frame["delta"] for frame in deltas)
    if kind == "message":
        assert all("logprobs" in frame for frame in middle)
    return item


def said(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one sample to the next: ids and times."""
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    return {key: value for key, value in response.items() if key not in (*TIMES, "id")} | {"output": output}


async def both(caller: Any, **body: Any) -> dict[str, Any]:
    """The whole reply, checked against its stream and against what the SDK folds of one."""
    body = {"model": "m", "input": "1 + 2?", **body}
    whole = await post(caller, **body)
    data = await frames(caller, **body)
    assert said(data[-1]["response"]) == said(whole)
    if whole["status"] == "completed":
        async with caller.openai.responses.stream(**body) as stream:
            folded = (await stream.get_final_response()).model_dump(mode="json", by_alias=True, exclude_unset=True)
        for item in folded["output"]:
            item.pop("parsed_arguments", None)
            for part in item.get("content", ()):
                part.pop("parsed", None)
        assert said(folded)["output"] == said(whole)["output"]
        assert said(folded)["usage"] == said(whole)["usage"]
    return whole
