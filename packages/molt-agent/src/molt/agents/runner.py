"""AgentRunner: what an agent module exports."""

import abc
from collections.abc import Callable
from typing import Any

from molt.agents.context import Context
from molt.agents.results import Result


class AgentRunner(abc.ABC):
    """Runs rollouts; one object serves a whole worker, many rollouts at once.

    `ChatAgentRunner` and `StepEnvRunner` are the two that users subclass.
    """

    @abc.abstractmethod
    async def run(self, ctx: Context) -> Result:
        """Run one rollout. Whatever it raises ends the attempt as `failed` or `infrastructure`."""

    async def close(self) -> None:  # noqa: B027 - a runner without resources has nothing to do here
        """Free what the runner holds. Called once, after the last rollout."""


def check_factory(factory: Callable[[], Any], *, runner: str, wanted: str) -> None:
    """Refuse, when the worker starts and not at each rollout, a factory that cannot make an agent.

    Raises:
        TypeError: `factory` is not callable, or a class that lacks a required method.
    """
    if not callable(factory):
        raise TypeError(f"{runner} takes the {wanted} class, not an object: each rollout gets a new one")
    if missing := getattr(factory, "__abstractmethods__", None):
        raise TypeError(f"{getattr(factory, '__name__', factory)} lacks {', '.join(sorted(missing))}")
