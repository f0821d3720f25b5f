"""ChatAgent: an agent that calls the model itself, through any SDK."""

import abc
from collections.abc import Awaitable, Callable
from typing import Any

from molt.agents.context import Context
from molt.agents.errors import NoGraderError
from molt.agents.results import Result, check_grade
from molt.agents.runner import AgentRunner, check_factory, no_grader


class ChatAgent(abc.ABC):
    """One rollout of an agent that calls the model under `ctx.base_url` or `ctx.session_url`.

    Each rollout gets an object of its own, made without arguments.
    """

    @abc.abstractmethod
    def run(self, ctx: Context) -> Any:
        """Do the task. Async, or plain: plain code runs in a thread and may block.

        Returns:
            A Result; or, where the class has a `grade`, the answer to be graded: anything that JSON can say, but None.
        """

    def grade(self, ctx: Context, answer: Any) -> "Result | float | Awaitable[Result | float]":
        """Grade an answer. Optional; async, or plain, as `run`.

        It is called on an object of its own, so that answers can be graded again without running the agent: all it
        knows is the rollout and the answer, as plain JSON.
        """
        raise NotImplementedError


class ChatAgentRunner(AgentRunner):
    """Runs a ChatAgent.

    Args:
        agent: The class, or anything that makes an agent when called without arguments.
    """

    def __init__(self, agent: Callable[[], ChatAgent]) -> None:
        check_factory(agent, runner="ChatAgentRunner", wanted="agent")
        self._make_agent = agent

    async def run(self, ctx: Context) -> Any:
        """Run a new agent on `ctx`."""
        from molt.agents.calls import call  # asyncio: for those who run agents, not for those who import them

        return await call(self._make_agent().run, ctx)

    @property
    def grades(self) -> bool:
        """Whether the agent's class has a `grade`."""
        return type(self).grade is not ChatAgentRunner.grade or _has_grade(self._make_agent())

    async def grade(self, ctx: Context, answer: Any) -> Result:
        """Have a new agent grade an answer.

        Raises:
            NoGraderError: The agent's class has no `grade`.
            InvalidResultError: It returned neither a number nor a valid Result.
        """
        from molt.agents.calls import call

        agent = self._make_agent()
        if not _has_grade(agent):
            raise NoGraderError(no_grader(self))
        return check_grade(await call(agent.grade, ctx, answer))


def _has_grade(agent: object) -> bool:
    return getattr(type(agent), "grade", ChatAgent.grade) is not ChatAgent.grade
