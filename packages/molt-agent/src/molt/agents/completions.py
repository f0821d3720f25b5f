"""One chat completion under a session, whole: how the framework calls the model for an environment."""

from typing import Any

import msgspec

from molt.agents._http import JsonClient
from molt.agents.context import Context
from molt.agents.errors import ServerError
from molt.agents.protocol import SamplingParams

REPLY_LIMIT_S = 600.0
"""Longest silence while a reply is generated; the rollout's deadline is usually nearer."""
OUTAGE_LIMIT_S = 30.0
"""How long calls that fail for the endpoint's sake are tried again."""


class Reply(msgspec.Struct, frozen=True):
    """One assistant message, as the endpoint gave it, without its empty fields."""

    message: dict[str, Any]
    finish_reason: str | None


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class CompletionClient:
    """Calls `{base_url}/chat/completions` of any number of sessions over connections that they share."""

    def __init__(self) -> None:
        self._http = JsonClient()

    async def complete(self, ctx: Context, messages: list[Any], sampling_params: SamplingParams) -> Reply:
        """Sample the next assistant message.

        Raises:
            ServerError: The endpoint refused the call; see its subclasses.
        """
        body: dict[str, Any] = {
            "model": ctx.model_name,
            "messages": messages,
            "max_tokens": sampling_params.max_tokens,
            "temperature": sampling_params.temperature,
            "top_p": sampling_params.top_p,
        }
        if sampling_params.stop:
            body["stop"] = sampling_params.stop
        if ctx.tools:
            body["tools"] = ctx.tools
        completion = await self._http.post(
            f"{ctx.base_url}/chat/completions",
            body,
            _Completion,
            api_key=ctx.api_key,
            timeout_s=REPLY_LIMIT_S,
            give_up_s=OUTAGE_LIMIT_S,
        )
        if not completion.choices:
            raise ServerError(f"{ctx.base_url}: a chat completion without choices")
        choice = completion.choices[0]
        # Endpoints fill in fields (`refusal: null`, `tool_calls: []`) that some of them refuse in a request.
        return Reply({k: v for k, v in choice.message.items() if v not in (None, [])}, choice.finish_reason)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
