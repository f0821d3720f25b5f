"""OpenAI Chat Completions: whole replies and streams of chunks out."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from molt.train.gateway.call import (
    Content,
    Event,
    ModelCall,
    Reasoning,
    Reply,
    Step,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    TopLogprobs,
)

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
        self._num_calls: Counter[int] = Counter()

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.whole`."""
        first = replies[0]
        body = {"id": first.response_id, "object": "chat.completion", "created": first.created, "model": first.model}
        choices = [self._choice(reply) for reply in replies]
        return _encode(body | {"choices": choices, "usage": _usage(replies), "system_fingerprint": None})

    def start(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.start`."""
        first = replies[0]
        shared = {"id": first.response_id, "object": "chat.completion.chunk", "created": first.created}
        self._head = b"data: " + _encode(shared | {"model": first.model})[:-1]
        return b"".join([self._chunk(reply.choice, {"role": "assistant", "content": ""}) for reply in replies])

    def step(self, step: Step) -> bytes:
        """See `ReplyEncoder.step`."""
        chunks = [self._delta(step.choice, event) for event in step.events]
        deltas = [delta for delta in chunks if delta is not None]
        logprobs = self._logprobs(step.token_ids, step.logprobs, step.top_logprobs) if self._call.logprobs else None
        if logprobs and not deltas:
            deltas = [{}]
        frames = [self._chunk(step.choice, delta) for delta in deltas[1:]]
        return b"".join([self._chunk(step.choice, delta, logprobs=logprobs) for delta in deltas[:1]] + frames)

    def finish(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.finish`."""
        frames = b"".join([self._chunk(reply.choice, {}, self._finish_reason(reply)) for reply in replies])
        if self._call.include_usage:
            frames += self._head + b',"choices":[],"usage":' + _encode(_usage(replies)) + b"}\n\n"
        return frames + b"data: [DONE]\n\n"

    def _choice(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
        choice: dict[str, Any] = {"index": reply.choice, "message": message}
        choice["finish_reason"] = self._finish_reason(reply)
        wanted = self._call.logprobs
        choice["logprobs"] = self._logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs) if wanted else None
        return choice

    def _delta(self, choice: int, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case ToolCallStart(name, call_id):
                index, self._num_calls[choice] = self._num_calls[choice], self._num_calls[choice] + 1
                opening = {"index": index, "id": call_id, "type": "function"}
                return {"tool_calls": [opening | {"function": {"name": name, "arguments": ""}}]}
            case ToolCallArguments(text):
                index = self._num_calls[choice] - 1
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case ToolCallEnd():
                return None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if logprobs:
            choice["logprobs"] = logprobs
        return self._head + b',"choices":[' + _encode(choice) + b"]}\n\n"

    def _finish_reason(self, reply: Reply) -> str:
        whole = reply.calls and reply.calls[-1].complete
        if whole and reply.finish_reason == "stop" and not self._call.names_tool:
            return "tool_calls"
        return reply.finish_reason

    def _logprobs(
        self, token_ids: list[int], logprobs: list[float], top_logprobs: list[TopLogprobs]
    ) -> dict[str, Any] | None:
        tops = top_logprobs or [[]] * len(token_ids)
        content = [
            self._token(token_id, logprob) | {"top_logprobs": [self._token(*other) for other in top]}
            for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None} if content else None

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    num_sampled = sum(len(reply.token_ids) for reply in replies)
    num_prompt = replies[0].prompt_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)},
    }
