"""An async agent whose executor thread never ends."""

import asyncio
import threading

from molt.agents import ChatAgent, ChatAgentRunner


class StuckAgent(ChatAgent):
    async def run(self, ctx):
        await asyncio.to_thread(threading.Event().wait)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(StuckAgent)
