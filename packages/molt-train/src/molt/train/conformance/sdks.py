"""The vendors' own SDKs, with the strictest validation that they have, in a plain tool loop."""

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from molt.agents.protocol import SessionCredentials
from molt.train.conformance.cell import ANSWER, FINAL_TEXT, NOTES, SUM, Cell, CellError, tool_call
from molt.train.records.turn import Wire

MAX_TURNS = 5
MAX_TOKENS = 1000
REPLIES = (tool_call("read_file", name=NOTES), tool_call("write_file", name=ANSWER, text=SUM), FINAL_TEXT)
TOOLS: dict[str, list[str]] = {"read_file": ["name"], "write_file": ["name", "text"]}
DISTRIBUTIONS = {"openai-python": "openai", "anthropic-python": "anthropic"}


def sdk_version(client: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return version(DISTRIBUTIONS[client])
    except PackageNotFoundError:
        return None


def sdk_cells() -> list[Cell]:
    """Every wire that the SDKs speak, whole and streamed."""
    return [
        Cell(client=client, wire=wire, mode=mode, replies=replies, drive=drive)
        for client, wire, replies, drive in _WIRES
        for mode in ("whole", "streamed")
    ]


class _Files:
    """The tools, on files in memory."""

    def __init__(self, cell: Cell) -> None:
        self.texts = {NOTES: cell.notes}

    def call(self, tool: str, arguments: dict[str, str]) -> str:
        if tool == "read_file":
            return self.texts[arguments["name"]]
        self.texts[arguments["name"]] = arguments["text"]
        return f"wrote {arguments['name']}"

    def check(self, final_text: str | None) -> None:
        if self.texts.get(ANSWER) != SUM:
            raise CellError(f"{ANSWER} holds {self.texts.get(ANSWER)!r}, not {SUM!r}")
        if final_text != FINAL_TEXT:
            raise CellError(f"the last text is {final_text!r}, not {FINAL_TEXT!r}")


def _parameters(names: list[str]) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _openai(session: SessionCredentials, *, strict: bool = True) -> Any:
    import openai

    return openai.OpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, _strict_response_validation=strict
    )


def _chat(cell: Cell, session: SessionCredentials) -> None:
    functions = [{"name": name, "parameters": _parameters(names), "strict": True} for name, names in TOOLS.items()]
    tools = [{"type": "function", "function": function} for function in functions]
    files = _Files(cell)
    messages: list[Any] = [{"role": "user", "content": cell.prompt}]
    with _openai(session) as client:
        for _ in range(MAX_TURNS):
            request: dict[str, Any] = {"model": session.model_name, "messages": messages, "tools": tools}
            if cell.mode == "streamed":
                with client.chat.completions.stream(**request) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**request).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return files.check(message.content)
            for call in message.tool_calls:
                output = files.call(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    raise _endless()


def _responses(cell: Cell, session: SessionCredentials) -> None:
    tools = [
        {"type": "function", "name": name, "parameters": _parameters(names), "strict": True}
        for name, names in TOOLS.items()
    ]
    files = _Files(cell)
    items: list[Any] = [{"role": "user", "content": cell.prompt}]
    with _openai(session) as client:
        for _ in range(MAX_TURNS):
            request: dict[str, Any] = {"model": session.model_name, "input": items, "tools": tools}
            if cell.mode == "streamed":
                with client.responses.stream(**request) as stream:
                    response = stream.get_final_response()
            else:
                response = client.responses.create(**request)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return files.check(response.output_text)
            for call in calls:
                output = files.call(call.name, json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    raise _endless()


def _completions(cell: Cell, session: SessionCredentials) -> None:
    request: dict[str, Any] = {"model": session.model_name, "prompt": cell.prompt, "max_tokens": MAX_TOKENS}
    # The SDK's own type of a streamed completion has no place for a finish reason that is not there yet.
    with _openai(session, strict=cell.mode == "whole") as client:
        if cell.mode == "streamed":
            chunks = list(client.completions.create(**request, stream=True))
            text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        else:
            text = client.completions.create(**request).choices[0].text
    if text != FINAL_TEXT:
        raise CellError(f"the text is {text!r}, not {FINAL_TEXT!r}")


def _messages(cell: Cell, session: SessionCredentials) -> None:
    import anthropic

    tools = [{"name": name, "input_schema": _parameters(names)} for name, names in TOOLS.items()]
    files = _Files(cell)
    messages: list[Any] = [{"role": "user", "content": cell.prompt}]
    client: Any = anthropic.Anthropic(
        base_url=session.session_url, api_key=session.api_key, max_retries=0, _strict_response_validation=True
    )
    with client:
        for _ in range(MAX_TURNS):
            request: dict[str, Any] = {"model": session.model_name, "messages": messages, "tools": tools}
            num_tokens = client.messages.count_tokens(**request).input_tokens
            if cell.mode == "streamed":
                with client.messages.stream(**request, max_tokens=MAX_TOKENS) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**request, max_tokens=MAX_TOKENS)
            usage = message.usage
            num_input = usage.input_tokens + (usage.cache_read_input_tokens or 0)
            if num_tokens != num_input:
                raise CellError(f"count_tokens said {num_tokens}, but the model was given {num_input}")
            calls = [block for block in message.content if block.type == "tool_use"]
            messages.append({"role": "assistant", "content": message.content})
            if not calls:
                return files.check("".join(block.text for block in message.content if block.type == "text"))
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": files.call(call.name, call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    raise _endless()


def _endless() -> CellError:
    return CellError(f"the model still calls tools after {MAX_TURNS} turns")


_WIRES: tuple[tuple[str, Wire, tuple[str, ...], Callable[[Cell, SessionCredentials], None]], ...] = (
    ("openai-python", "chat", REPLIES, _chat),
    ("openai-python", "responses", REPLIES, _responses),
    ("openai-python", "completions", (FINAL_TEXT,), _completions),
    ("anthropic-python", "messages", REPLIES, _messages),
)
