"""What an agent does on each wire: how it asks, what it reads of a whole or a streamed reply, what it sends back."""
# ruff: noqa: TID252 - the folders of tests are no installed package

from typing import Any

from . import messages_calls
from .replies import CALCULATOR, events
from .responses_calls import TIMES, checked

SEARCH = {"type": "function", "function": {"name": "search", "description": "Find.", "parameters": {"type": "object"}}}
TOOLS = {"none": [], "one": [CALCULATOR], "two": [CALCULATOR, SEARCH]}


class Chat:
    """Chat Completions: how its requests say what a step asks, and what its replies show."""

    path = "/v1/chat/completions"

    def start(self, number: int, bench: Any) -> list[Any]:
        return [{"role": "system", "content": f"conversation {number}"}]

    def said(self, word: str, bench: Any) -> list[Any]:
        return [{"role": "user", "content": word}]

    def body(self, history: list[Any], step: dict[str, Any]) -> dict[str, Any]:
        body = {"messages": history, "n": step["n"], "max_tokens": step["max_tokens"], "tools": TOOLS[step["tools"]]}
        body["parallel_tool_calls"] = step["choice"] != "one at a time"
        if body["tools"] and step["choice"] in ("none", "required"):
            body["tool_choice"] = step["choice"]
        elif body["tools"] and step["choice"] == "calculator":
            body["tool_choice"] = {"type": "function", "function": {"name": "calculator"}}
        return body | ({"stream_options": {"include_usage": True}} if step["stream"] else {})

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": reply["id"], "usage": reply["usage"]}
        for choice in reply["choices"]:
            message = choice["message"]
            calls = [
                (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
            ]
            texts = (message["content"], message.get("reasoning_content", ""))
            shown[choice["index"]] = (*texts, calls, choice["finish_reason"])
        return shown

    def folded(self, content: bytes) -> dict[str, Any]:
        frames = [data for _, data in events(content)]
        assert frames.pop() == "[DONE]"
        shown: dict[str, Any] = {"id": frames[-1]["id"], "usage": frames.pop()["usage"]}
        for frame in frames:
            (choice,) = frame["choices"]
            text, thoughts, calls, finish = shown.setdefault(choice["index"], ("", "", [], None))
            assert finish is None, "nothing of a choice comes behind its end"
            delta = choice["delta"]
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append((part["id"], part["function"]["name"], ""))
                called = calls[part["index"]]
                calls[part["index"]] = (*called[:2], called[2] + part["function"].get("arguments", ""))
            texts = (text + delta.get("content", ""), thoughts + delta.get("reasoning_content", ""))
            shown[choice["index"]] = (*texts, calls, choice["finish_reason"])
        return shown

    def echo(self, reply: dict[str, Any]) -> list[Any]:
        message = reply["choices"][-1]["message"]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in message.get("tool_calls", [])]
        return [message, *results]


class Messages:
    """Messages, as `Chat`."""

    path = "/v1/messages"
    start, said = Chat.start, Chat.said

    def body(self, history: list[Any], step: dict[str, Any]) -> dict[str, Any]:
        functions = [tool["function"] for tool in TOOLS[step["tools"]]]
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions
        ]
        kinds = {"none": "none", "required": "any", "calculator": "tool"}
        choice = {"type": kinds.get(step["choice"], "auto")}
        if step["choice"] == "calculator":
            choice["name"] = "calculator"
        elif step["choice"] == "one at a time":
            choice |= {"disable_parallel_tool_use": True}
        body = {"system": history[0]["content"], "messages": history[1:], "max_tokens": step["max_tokens"]}
        return body | ({"tools": tools, "tool_choice": choice} if tools else {})

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        return reply

    def folded(self, content: bytes) -> dict[str, Any]:
        return messages_calls.fold(content)

    def echo(self, reply: dict[str, Any]) -> list[Any]:
        content = [block for block in reply["content"] if block["type"] != "thinking"]
        uses = [block for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"} for use in uses]
        return [{"role": "assistant", "content": content}, *([{"role": "user", "content": results}] if results else [])]


class Responses:
    """Responses, as `Chat`."""

    path = "/v1/responses"
    start, said = Chat.start, Chat.said

    def body(self, history: list[Any], step: dict[str, Any]) -> dict[str, Any]:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS[step["tools"]]]
        body = {"input": history, "tools": tools, "max_output_tokens": step["max_tokens"]}
        body["parallel_tool_calls"] = step["choice"] != "one at a time"
        if tools and step["choice"] in ("none", "required"):
            body["tool_choice"] = step["choice"]
        elif tools and step["choice"] == "calculator":
            body["tool_choice"] = {"type": "function", "name": "calculator"}
        return body

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in reply.items() if key not in TIMES}

    def folded(self, content: bytes) -> dict[str, Any]:
        return self.whole(checked(content)[-1]["response"])

    def echo(self, reply: dict[str, Any]) -> list[Any]:
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "3"} for item in calls]
        return [*reply["output"], *results]


class Completions:
    """Completions with token ids, as `Chat`. What it goes on from is the row that it was sampled in."""

    path = "/v1/completions"

    def start(self, number: int, bench: Any) -> list[Any]:
        return bench.encode(f"<|im_start|>system\nconversation {number}<|im_end|>\n")

    def said(self, word: str, bench: Any) -> list[Any]:
        return bench.encode(f"<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n")

    def body(self, history: list[Any], step: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": history, "n": step["n"], "max_tokens": step["max_tokens"]}
        return body | ({"stream_options": {"include_usage": True}} if step["stream"] else {})

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        choices = {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in reply["choices"]}
        return {"id": reply["id"], "usage": reply["usage"]} | choices

    def folded(self, content: bytes) -> dict[str, Any]:
        frames = [data for _, data in events(content)]
        assert frames.pop() == "[DONE]"
        shown: dict[str, Any] = {"id": frames[-1]["id"], "usage": frames.pop()["usage"]}
        for choice in [choice for frame in frames for choice in frame["choices"]]:
            text, finish = shown.get(choice["index"], ("", None))
            assert finish is None, "nothing of a choice comes behind its end"
            shown[choice["index"]] = (text + choice["text"], choice["finish_reason"])
        return shown

    def echo(self, reply: dict[str, Any]) -> list[Any]:
        return []


WIRES = (Chat(), Messages(), Responses(), Completions())
