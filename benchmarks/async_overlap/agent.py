"""The calculator with a slow tool: what a sandbox or a web page costs, mostly waiting."""

import asyncio
import random

from calculator.agent import Calculator
from molt.agents import ChatAgentRunner

TOOL_SECONDS = 0.5


class SlowCalculator(Calculator):
    """A tool answers after half a second, give or take."""

    async def run(self, ctx):
        """Wait as long as the tools of a rollout take, then solve it as usual."""
        await asyncio.sleep(random.uniform(1, 3) * TOOL_SECONDS)
        return await super().run(ctx)


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(SlowCalculator)
