"""Rollouts that take turns, beside others that block until those are done: in `run` or in `grade`, asleep or computing.

A rollout that is done with its turns leaves a file in the folder that its row names.
"""

import time
from pathlib import Path

import httpx

from molt.agents import ChatAgent, ChatAgentRunner


class BlockingAgent(ChatAgent):
    def run(self, ctx):
        if ctx.data["kind"] == "turns":
            return self.take_turns(ctx)
        if ctx.data["kind"] != "grade":
            block(ctx.data)
        return ctx.data["kind"]

    async def take_turns(self, ctx):
        headers = {"authorization": f"Bearer {ctx.api_key}"}
        async with httpx.AsyncClient(base_url=ctx.base_url, headers=headers, timeout=60) as client:
            for _ in range(ctx.data["num_turns"]):
                body = {"model": ctx.model_name, "messages": ctx.messages}
                (await client.post("chat/completions", json=body)).raise_for_status()
        (Path(ctx.data["folder"]) / ctx.rollout_id).touch()
        return "turns"

    def grade(self, ctx, answer):
        if ctx.data["kind"] == "grade":
            block(ctx.data)
        return 1.0


def block(row):
    """Until all the others are done. `compute` lets nobody else have the interpreter meanwhile."""
    folder, number = Path(row["folder"]), 0
    while len(list(folder.iterdir())) < row["num_others"]:
        if row["kind"] != "compute":
            time.sleep(0.01)
        for _ in range(100_000):
            number = (number * 31 + 7) % 1_000_003


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(BlockingAgent)
