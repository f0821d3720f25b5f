"""Every wire's route, with the smallest request that it answers and the reader of its refusals."""

import json
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

USER = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Wire:
    """A route with the smallest request that it answers."""

    path: str
    request: dict[str, Any]
    history: str = ""
    """The field that has the conversation."""
    sdk: str = "openai"

    def body(self, **fields):
        return json.dumps(self.request | fields).encode()

    async def post(self, caller, content, **headers):
        """Send it by the vendor's SDK, which reads the error."""
        client = getattr(caller, self.sdk)
        path = self.path.removeprefix("/v1") if self.sdk == "openai" else self.path
        headers = {"content-type": "application/json", **headers}
        return await client.post(path, content=content, cast_to=object, options={"headers": headers})

    async def refused(self, caller, content, **headers):
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as raised:
            await self.post(caller, content, **headers)
        return self.check(raised.value.response)

    def check(self, response):
        """The body of the refusal in its own words: status, field, message."""
        body, request_id = response.json(), response.headers["request-id"]
        assert len(response.content) <= 4096
        assert request_id == response.headers["x-request-id"]
        error = body["error"]
        if self.sdk == "openai":
            assert (body.keys(), error.keys()) == ({"error"}, {"message", "type", "param", "code"})
        else:
            assert (body.keys(), error.keys()) == ({"type", "error", "request_id"}, {"type", "message"})
            assert (body["type"], body["request_id"]) == ("error", request_id)
        return response.status_code, error.get("param"), error["message"]


CHAT = Wire("/v1/chat/completions", {"model": "m", "messages": USER}, "messages")
RESPONSES = Wire("/v1/responses", {"model": "m", "input": USER}, "input")
MESSAGES = Wire("/v1/messages", {"model": "m", "max_tokens": 5, "messages": USER}, "messages", "anthropic")
COUNT = Wire("/v1/messages/count_tokens", {"model": "m", "messages": USER}, "messages", "anthropic")
COMPLETIONS = Wire("/v1/completions", {"model": "m", "prompt": "hi"})
EVERY = pytest.mark.parametrize("wire", [CHAT, RESPONSES, MESSAGES, COUNT, COMPLETIONS], ids=lambda wire: wire.path)
CONVERSING = pytest.mark.parametrize("wire", [CHAT, RESPONSES, MESSAGES, COUNT], ids=lambda wire: wire.path)


def nested(depth):
    return b"[" * depth + b"]" * depth


def with_raw(wire, field, raw):
    """The smallest request with a field as it is written."""
    return wire.body()[:-1] + f", {json.dumps(field)}: ".encode() + raw + b"}"
