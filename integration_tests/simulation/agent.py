"""The agent: one to three model calls, and an end that the seed decides. `molt-agent work` loads this module."""

import asyncio
import contextlib
import json
import os
import signal
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx

import molt.agents.cli
from integration_tests.simulation.api import RecordingApi, Settings
from integration_tests.simulation.scenario import Behaviour, behaviour_of
from molt.agents import Result
from molt.agents import runner as sdk
from molt.agents.context import Context
from molt.agents.errors import InfrastructureError

AGENT = __name__
SETTINGS = "MOLT_SIMULATION"
"""The environment variable with the settings of a worker process."""
NUM_TRIES = 4
GIVE_UP_S = 0.02
"""How long an answer is waited for by an agent that gives up."""
_TLS = httpx.create_ssl_context()  # takes longer than a rollout's calls


class AgentRunner(sdk.AgentRunner):
    """Runs rollouts as `behaviour_of` says. Without settings it is that of a worker process, which `kill` ends."""

    def __init__(self, settings: Settings | None = None, *, kill: Callable[[], None] | None = None) -> None:
        if settings is None:
            settings = Settings(**json.loads(os.environ[SETTINGS]))
            # The command makes its client right after it has loaded this module.
            molt.agents.cli.ControlApi = partial(RecordingApi, settings=settings)  # type: ignore[assignment]
        self._seed = settings.seed
        self._kill = kill or partial(os.kill, os.getpid(), signal.SIGKILL)
        self._http = httpx.AsyncClient(verify=_TLS, timeout=30.0)

    async def run(self, ctx: Context) -> Result:
        plan = behaviour_of(self._seed, ctx.data["id"], ctx.rollout_id, ctx.attempt)
        if plan.ending == "deadly":
            self._kill()
            await asyncio.Event().wait()
        messages = list(ctx.messages)
        for number, pause_s in enumerate(plan.pauses_s):
            await asyncio.sleep(pause_s)
            if plan.discards[number]:
                await self._discard(ctx, messages, limit_s=GIVE_UP_S if plan.gives_up[number] else None)
            messages.append(await self._call(ctx, messages))
            messages.append({"role": "user", "content": f"And after that, in step {number}?"})
        return await _end(plan)

    async def close(self) -> None:
        await self._http.aclose()

    async def _discard(self, ctx: Context, messages: list[Any], *, limit_s: float | None) -> None:
        """Ask, and do not go on with the answer, which may not even be waited for."""
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(limit_s):
                await self._call(ctx, messages)

    async def _call(self, ctx: Context, messages: list[Any]) -> dict[str, Any]:
        """One chat completion, sent again as the SDKs send it where the connection breaks or the server is busy."""
        headers = {"authorization": f"Bearer {ctx.api_key}", "idempotency-key": uuid.uuid4().hex}
        body = {"model": ctx.model_name, "messages": messages}
        for num_retries in range(NUM_TRIES):
            headers["x-stainless-retry-count"] = str(num_retries)
            is_last = num_retries == NUM_TRIES - 1
            try:
                response = await self._http.post(f"{ctx.base_url}/chat/completions", json=body, headers=headers)
                if is_last or response.headers.get("x-should-retry") == "false" or response.status_code < 500:
                    return response.raise_for_status().json()["choices"][0]["message"]
            except httpx.TransportError:
                if is_last:
                    raise
            await asyncio.sleep(0.1 * 2**num_retries)
        raise AssertionError("the last try returns or raises")


async def _end(plan: Behaviour) -> Result:
    match plan.ending:
        case "failed":
            raise ValueError("the agent does not know how to go on")
        case "infrastructure":
            raise InfrastructureError("the sandbox is gone")
        case "timeout":
            await asyncio.Event().wait()
    return Result(reward=plan.reward, truncated=plan.ending == "truncated")
