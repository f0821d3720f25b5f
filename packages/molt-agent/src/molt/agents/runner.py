"""AgentRunner: what an agent module exports."""

import abc
import sys
from collections.abc import Callable
from typing import Any

from molt.agents.context import Context
from molt.agents.errors import NoGraderError
from molt.agents.results import Result

FILE_MODULE_PREFIX = "molt_agent_file_"
"""Of the names of agent modules that are loaded from a file: an agent.py must not hide an installed package `agent`."""


class AgentRunner(abc.ABC):
    """Runs rollouts; one object serves a whole worker, many rollouts at once.

    `ChatAgentRunner` and `StepEnvRunner` are the two that users subclass.
    """

    @abc.abstractmethod
    async def run(self, ctx: Context) -> Any:
        """Run one rollout. Whatever it raises ends the attempt as `failed` or `infrastructure`.

        Returns:
            The Result; or, of a runner that has a `grade`, an answer for that.
        """

    @property
    def grades(self) -> bool:
        """Whether what `run` returns may be an answer, and `grade` takes it."""
        return type(self).grade is not AgentRunner.grade

    async def grade(self, ctx: Context, answer: Any) -> Result:  # noqa: ARG002 - for those who override it
        """Grade what `run` returned, now or in a later process.

        Args:
            ctx: The rollout. When an answer is graded again, no model stands behind its endpoint.
            answer: Plain JSON.

        Raises:
            NoGraderError: This runner has none.
        """
        raise NoGraderError(no_grader(self))

    async def close(self) -> None:  # noqa: B027 - a runner without resources has nothing to do here
        """Free what the runner holds. Called once, after the last rollout."""


def no_grader(runner: AgentRunner) -> str:
    """Say that an agent cannot grade, and how it could. Agents that were loaded from a file are named by its path."""
    name = type(runner).__module__
    if name.startswith(FILE_MODULE_PREFIX) and (module := sys.modules.get(name)):
        name = str(module.__file__)
    return f"{name} exports no grade: define `grade(self, ctx, answer)` in its ChatAgent"


def check_factory(factory: Callable[[], Any], *, runner: str, wanted: str) -> None:
    """Refuse, when the worker starts and not at each rollout, a factory that cannot make an agent.

    Raises:
        TypeError: `factory` is not callable, or a class that lacks a required method.
    """
    if not callable(factory):
        raise TypeError(f"{runner} takes the {wanted} class, not an object: each rollout gets a new one")
    if missing := getattr(factory, "__abstractmethods__", None):
        raise TypeError(f"{getattr(factory, '__name__', factory)} lacks {', '.join(sorted(missing))}")
