"""ScriptedModel: a chat completions endpoint that answers from a script, whole or streamed."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from molt.agents.protocol import Lease, SamplingParams, SessionCredentials
from molt.agents.testing.loopback import LoopbackServer, Request, Response

API_KEY = "scripted-session-key"


class ToolCall(msgspec.Struct, frozen=True):
    """One call that the model makes. Arguments given as a string are sent as they are, JSON or not."""

    name: str
    arguments: dict[str, Any] | str


class ScriptedReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the model answers to one request."""

    text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    """By default `tool_calls` where there are any, else `stop`."""
    status: int = 200
    """Another status makes it an error of the OpenAI kind, with `text` as its message."""
    code: str | None = None
    """Of an error: what the SDK shows as `error.code`."""
    headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    wait_for: asyncio.Event | None = None
    """Answer only once this is set."""


class ModelRequest(msgspec.Struct, frozen=True):
    """A request as it arrived; header names are lower case."""

    headers: dict[str, str]
    body: dict[str, Any]


Script = Callable[[dict[str, Any]], str | ScriptedReply]


class ScriptedModel(LoopbackServer):
    """Serves `/v1/chat/completions`, under any prefix and to any key, while entered with `async with`.

    Args:
        script: Replies in order, of which the last repeats; or a function from the request's body to a reply, for
            agents that call the model concurrently. A string is a reply's text.
    """

    def __init__(self, script: Sequence[str | ScriptedReply] | Script) -> None:
        super().__init__()
        if not callable(script) and not script:
            raise ValueError("script has no replies: give at least one")
        self.requests: list[ModelRequest] = []
        self._script: Script = script if callable(script) else _in_order(script)
        self._numbers = itertools.count(1)

    @property
    def base_url(self) -> str:
        """For SDKs of the OpenAI kind."""
        return f"{self.url}/v1"

    def session(self) -> SessionCredentials:
        """Give the credentials of a session on this model."""
        return SessionCredentials(
            session_id="scripted-session",
            session_url=self.url,
            base_url=self.base_url,
            api_key=API_KEY,
            model_name="scripted",
        )

    def lease(self, task: dict[str, Any], *, timeout_s: float = 10.0) -> Lease:
        """Make a lease on `task` for `molt.agents.rollout.run_lease`."""
        return Lease(
            lease_id="scripted-lease",
            rollout_id="scripted-rollout",
            group_id="scripted-group",
            attempt=1,
            task=task,
            session=self.session(),
            sampling_params=SamplingParams(),
            timeout_s=timeout_s,
        )

    async def handle(self, request: Request) -> Response:
        """Answer one request by the script."""
        if not request.path.endswith("/v1/chat/completions"):
            return _error(404, f"no route {request.path}", None)
        body = msgspec.json.decode(request.body, type=dict[str, Any])
        self.requests.append(ModelRequest(request.headers, body))
        reply = self._script(body)
        if isinstance(reply, str):
            reply = ScriptedReply(text=reply)
        if reply.wait_for is not None:
            await reply.wait_for.wait()
        if reply.status != 200:
            return msgspec.structs.replace(
                _error(reply.status, reply.text or "scripted error", reply.code), headers=reply.headers
            )
        head = {"id": f"chatcmpl-{next(self._numbers)}", "created": 0, "model": body.get("model")}
        usage = _usage(body, reply)
        if body.get("stream"):
            options: dict[str, Any] = body.get("stream_options") or {}
            headers = {"content-type": "text/event-stream; charset=utf-8", **reply.headers}
            return Response(
                headers=headers, chunks=_stream(head, reply, usage if options.get("include_usage") else None)
            )
        choice = {"index": 0, "message": _message(reply), "finish_reason": _finish_reason(reply), "logprobs": None}
        completion = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        return Response(headers=reply.headers, body=msgspec.json.encode(completion))


def _in_order(replies: Sequence[str | ScriptedReply]) -> Script:
    remaining = itertools.chain(replies, itertools.repeat(replies[-1]))
    return lambda _: next(remaining)


def _error(status: int, message: str, code: str | None) -> Response:
    detail = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return Response(status=status, body=msgspec.json.encode({"error": detail}))


def _finish_reason(reply: ScriptedReply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")


def _calls(reply: ScriptedReply) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(reply.tool_calls):
        raw = call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode()
        calls.append({"id": f"call_{i}", "type": "function", "function": {"name": call.name, "arguments": raw}})
    return calls


def _message(reply: ScriptedReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    return {**message, "tool_calls": _calls(reply)} if reply.tool_calls else message


def _usage(body: dict[str, Any], reply: ScriptedReply) -> dict[str, int]:
    """Words stand for tokens."""
    num_prompt = sum(len(str(message.get("content")).split()) for message in body.get("messages", []))
    num_completion = len((reply.text or "").split()) + len(reply.tool_calls)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


async def _stream(head: dict[str, Any], reply: ScriptedReply, usage: dict[str, int] | None) -> AsyncIterator[bytes]:
    """Yield server-sent events: the role, text word by word, each call in pieces, the end, usage, `[DONE]`."""
    for delta in _deltas(reply):
        yield _event(head, [{"index": 0, "delta": delta, "finish_reason": None}])
    yield _event(head, [{"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}])
    if usage is not None:
        yield _event(head, [], usage)
    yield b"data: [DONE]\n\n"


def _deltas(reply: ScriptedReply) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in re.findall(r"\s*\S+|\s+$", reply.text or "")]
    for i, call in enumerate(_calls(reply)):
        arguments: str = call["function"]["arguments"]
        opening = {**call, "index": i, "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [opening]})
        half = len(arguments) // 2
        deltas += [
            {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}
            for piece in (arguments[:half], arguments[half:])
        ]
    return deltas


def _event(head: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    chunk = {**head, "object": "chat.completion.chunk", "choices": choices, "usage": usage}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
