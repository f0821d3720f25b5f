"""ChatAgent: an agent that calls the model itself, through any SDK."""

import abc
from collections.abc import Awaitable, Callable

from molt.agents.context import Context
from molt.agents.results import Result
from molt.agents.runner import AgentRunner, check_factory


class ChatAgent(abc.ABC):
    """One rollout of an agent that calls the model under `ctx.base_url` or `ctx.session_url`.

    Each rollout gets an object of its own, made without arguments.
    """

    @abc.abstractmethod
    def run(self, ctx: Context) -> Result | Awaitable[Result]:
        """Do the task and grade the outcome. Async, or plain: plain code runs in a thread and may block."""


class ChatAgentRunner(AgentRunner):
    """Runs a ChatAgent.

    Args:
        agent: The class, or anything that makes an agent when called without arguments.
    """

    def __init__(self, agent: Callable[[], ChatAgent]) -> None:
        check_factory(agent, runner="ChatAgentRunner", wanted="agent")
        self._make_agent = agent

    async def run(self, ctx: Context) -> Result:
        """Run a new agent on `ctx`."""
        from molt.agents.calls import call  # asyncio: for those who run agents, not for those who import them

        return await call(self._make_agent().run, ctx)
