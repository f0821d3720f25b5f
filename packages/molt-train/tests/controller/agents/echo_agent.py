"""An agent that calls no model, and so starts fast. A task with a `gate`, a named pipe, waits until that is opened."""

from pathlib import Path

from molt.agents import ChatAgent, ChatAgentRunner, Result


class Echo(ChatAgent):
    def run(self, ctx):
        if gate := ctx.data.get("gate"):
            Path(gate).read_bytes()
        return Result(reward=float(ctx.label))


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Echo)
