"""OpenAI Chat Completions: whole replies and streams of chunks out."""

from collections.abc import Callable
from typing import Any

import msgspec

from molt.train.gateway.call import Content, Event, ModelCall, Reasoning, Reply, ToolCall

_encode = msgspec.json.Encoder().encode


class ChatCall(ModelCall, frozen=True, kw_only=True):
    """A Chat Completions request."""

    include_usage: bool = False
    logprobs: bool = False
    names_tool: bool = False
    """`tool_choice` names a function: a reply that calls it ends with `stop`."""


class ChatEncoder:
    """Writes the reply to one Chat Completions request."""

    def __init__(self, call: ChatCall, token_text: Callable[[int], str]) -> None:
        self._call = call
        self._token_text = token_text
        self._head = b""
        self._num_calls = 0
        self._unsent: list[dict[str, Any]] = []

    def whole(self, reply: Reply) -> bytes:
        """See `ReplyEncoder.whole`."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": self._finish_reason(reply)}
        choice["logprobs"] = self._logprobs(reply.token_ids, reply.logprobs) if self._call.logprobs else None
        body = {"id": reply.response_id, "object": "chat.completion", "created": reply.created, "model": reply.model}
        return _encode(body | {"choices": [choice], "usage": _usage(reply), "system_fingerprint": None})

    def start(self, reply: Reply) -> bytes:
        """See `ReplyEncoder.start`."""
        shared = {"id": reply.response_id, "object": "chat.completion.chunk", "created": reply.created}
        self._head = b"data: " + _encode(shared | {"model": reply.model})[:-1]
        return self._chunk({"role": "assistant", "content": ""})

    def events(self, events: list[Event], token_ids: list[int], logprobs: list[float]) -> bytes:
        """See `ReplyEncoder.events`."""
        if self._call.logprobs:
            self._unsent += self._logprobs(token_ids, logprobs)["content"]
        return b"".join([self._event(event) for event in events])

    def finish(self, reply: Reply) -> bytes:
        """See `ReplyEncoder.finish`."""
        frames = self._chunk({}, self._finish_reason(reply))
        if self._call.include_usage:
            frames += self._head + b',"choices":[],"usage":' + _encode(_usage(reply)) + b"}\n\n"
        return frames + b"data: [DONE]\n\n"

    def _event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._chunk({"content": text})
            case Reasoning(text):
                return self._chunk({"reasoning": text, "reasoning_content": text})
            case ToolCall(name, arguments, call_id):
                index, self._num_calls = self._num_calls, self._num_calls + 1
                opening = {"index": index, "id": call_id, "type": "function"}
                opening["function"] = {"name": name, "arguments": ""}
                rest = {"index": index, "function": {"arguments": arguments}}
                return self._chunk({"tool_calls": [opening]}) + self._chunk({"tool_calls": [rest]})

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if self._unsent:
            choice["logprobs"], self._unsent = {"content": self._unsent, "refusal": None}, []
        return self._head + b',"choices":[' + _encode(choice) + b"]}\n\n"

    def _finish_reason(self, reply: Reply) -> str:
        if reply.calls and reply.finish_reason == "stop" and not self._call.names_tool:
            return "tool_calls"
        return reply.finish_reason

    def _logprobs(self, token_ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        texts = [self._token_text(token_id) for token_id in token_ids]
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _usage(reply: Reply) -> dict[str, Any]:
    num_sampled = len(reply.token_ids)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": reply.prompt_tokens + num_sampled,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
    }
