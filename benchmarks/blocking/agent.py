"""Rollouts that take turns, beside others that block: in `run` or in `grade`, asleep or computing."""

import time

import httpx

from molt.agents import ChatAgent, ChatAgentRunner


class MixedAgent(ChatAgent):
    """Does what the `kind` of its task row says."""

    def run(self, ctx):
        """Take turns, block, or do nothing."""
        if ctx.data["kind"] == "turns":
            return self.take_turns(ctx)
        if ctx.data["kind"] == "run":
            time.sleep(ctx.data["seconds"])
        if ctx.data["kind"] == "compute":
            compute(ctx.data["seconds"])
        return []

    async def take_turns(self, ctx):
        """The seconds of each turn."""
        seconds = []
        headers = {"authorization": f"Bearer {ctx.api_key}"}
        async with httpx.AsyncClient(base_url=ctx.base_url, headers=headers, timeout=60) as client:
            for _ in range(ctx.data["num_turns"]):
                started = time.perf_counter()
                body = {"model": ctx.model_name, "messages": ctx.messages}
                response = await client.post("chat/completions", json=body)
                response.raise_for_status()
                seconds.append(time.perf_counter() - started)
        return seconds

    def grade(self, ctx, answer):  # noqa: ARG002 - every answer is right
        """Block, where that is asked for."""
        if ctx.data["kind"] == "grade":
            time.sleep(ctx.data["seconds"])
        return 1.0


def compute(seconds):
    """Python code that lets nobody else have the interpreter."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number = (number * 31 + 7) % 1_000_003


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(MixedAgent)
