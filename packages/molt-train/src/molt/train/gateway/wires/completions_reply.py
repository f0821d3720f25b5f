"""OpenAI Completions: whole replies and streams of chunks out."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from molt.train.gateway.call import Content, ModelCall, Reply, Step, TopLogprobs
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.openai_error import openai_error
from molt.train.gateway.wires.openai_reply import KEEPALIVE, finite, usage

_encode = msgspec.json.Encoder().encode


class CompletionsCall(ModelCall, frozen=True, kw_only=True):
    """A Completions request."""

    include_usage: bool = False
    logprobs: bool = False


class CompletionsEncoder:
    """Writes the reply to one Completions request: the choices of the first prompt, of the second, and so on."""

    def __init__(self, call: CompletionsCall, token_text: Callable[[int], str]) -> None:
        self._call = call
        self._token_text = token_text
        self._head, self._tail = b"", b"]}\n\n"
        self._offsets = [0] * (call.num_choices * len(call.raw_prompts))
        """Of each choice, the characters of its tokens so far."""

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.whole`."""
        choices = [
            {
                "index": reply.choice,
                "text": reply.content,
                "logprobs": self._logprobs(reply.choice, reply.token_ids, reply.logprobs, reply.top_logprobs),
                "finish_reason": reply.finish_reason,
            }
            for reply in replies
        ]
        counts = usage(replies, num_choices=self._call.num_choices)
        return _encode(_shared(replies[0]) | {"choices": choices, "usage": counts, "system_fingerprint": None})

    def start(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.start`."""
        self._head = b"data: " + _encode(_shared(replies[0]))[:-1]
        if self._call.include_usage:
            self._tail = b'],"usage":null}\n\n'
        return b""

    def step(self, step: Step) -> bytes:
        """See `ReplyEncoder.step`."""
        text = "".join([event.text for event in step.events if isinstance(event, Content)])
        logprobs = self._logprobs(step.choice, step.token_ids, step.logprobs, step.top_logprobs)
        if not text and not (logprobs and step.token_ids):
            return b""
        return self._chunk({"index": step.choice, "text": text, "logprobs": logprobs, "finish_reason": None})

    def keepalive(self) -> bytes:
        """See `ReplyEncoder.keepalive`."""
        return KEEPALIVE

    def failure(self, error: CallError, request_id: str) -> bytes:
        """See `ReplyEncoder.failure`."""
        return b"data: " + openai_error(error, request_id)[1] + b"\n\n"

    def finish(self, replies: Sequence[Reply]) -> bytes:
        """See `ReplyEncoder.finish`."""
        frames = b"".join(
            [
                self._chunk({"index": reply.choice, "text": "", "logprobs": None, "finish_reason": reply.finish_reason})
                for reply in replies
            ]
        )
        if self._call.include_usage:
            counts = _encode(usage(replies, num_choices=self._call.num_choices))
            frames += self._head + b',"choices":[],"usage":' + counts + b"}\n\n"
        return frames + b"data: [DONE]\n\n"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + b',"choices":[' + _encode(choice) + self._tail

    def _logprobs(
        self, choice: int, token_ids: list[int], logprobs: list[float], top_logprobs: list[TopLogprobs]
    ) -> dict[str, Any] | None:
        """The sampled token is among the likeliest of its place, whether it is one of them or not."""
        if not self._call.logprobs:
            return None
        tokens = [self._token_text(token_id) for token_id in token_ids]
        own = [{token: finite(logprob)} for token, logprob in zip(tokens, logprobs, strict=True)]
        tops = [{self._token_text(other): finite(logprob) for other, logprob in top} for top in top_logprobs]
        *offsets, self._offsets[choice] = accumulate(map(len, tokens), initial=self._offsets[choice])
        return {
            "tokens": tokens,
            "token_logprobs": [finite(logprob) for logprob in logprobs],
            "top_logprobs": [top | sampled for top, sampled in zip(tops, own, strict=True)] if tops else own,
            "text_offset": offsets,
        }


def _shared(first: Reply) -> dict[str, Any]:
    return {"id": first.response_id, "object": "text_completion", "created": first.created, "model": first.model}
