"""Env: an environment, in the manner of Gymnasium, for which the framework calls the model."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypedDict

from molt.agents.context import Context
from molt.agents.results import Result
from molt.agents.runner import AgentRunner, check_factory

if TYPE_CHECKING:
    from molt.agents.completions import CompletionClient

MAX_TURNS = 32


class StepState(TypedDict):
    """What `Env.step` gets."""

    action_text: str
    """The text of the model's reply; empty where it only reasoned or called tools."""
    observation_text: str
    """The text of the user message that the reply answers."""
    label: Any
    messages: list[Any]
    """The conversation so far, the reply last."""
    turn: int
    """0 for the first action."""
    data: dict[str, Any]
    """The task row as given."""
    finish_reason: str | None
    """Of the reply: `stop`, `length` (cut at `max_tokens`), `tool_calls`, ..."""


class Env(abc.ABC):
    """One episode. Each rollout gets an object of its own, made without arguments.

    Every method may be async, or plain: plain code runs in a thread and may block.
    """

    def reset(self, task: dict[str, Any]) -> Any:  # noqa: ARG002 - for those who override it
        """Prepare the episode of `task`, the row as given.

        Returns:
            An opening observation that follows the row's own messages: text, sent as one user message, or a list of
            chat messages, sent as they are; None for none. Or an awaitable of it.
        """
        return None

    @abc.abstractmethod
    def step(self, state: StepState) -> Result | Awaitable[Result]:
        """Judge one action. `Result(reward)` ends the episode; `terminated=False` with an `observation` goes on."""

    def close(self) -> Any:
        """Free what the episode holds. Always called, also after an error or at the deadline."""
        return None


class StepEnvRunner(AgentRunner):
    """Runs an Env: calls the model, whole replies, and steps the environment until the episode ends.

    The reward of the rollout is the sum of the rewards of its steps. An episode that has neither terminated nor been
    truncated after `max_turns` replies is `truncated`.

    Args:
        env: The class, or anything that makes an environment when called without arguments.
        max_turns: Most model calls in one episode.
    """

    def __init__(self, env: Callable[[], Env], *, max_turns: int = MAX_TURNS) -> None:
        check_factory(env, runner="StepEnvRunner", wanted="environment")
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}: use 1 or more")
        self._make_env = env
        self._max_turns = max_turns
        self._client: CompletionClient | None = None

    async def run(self, ctx: Context) -> Result:
        """Run one episode of a new environment.

        Raises:
            InvalidResultError: A step returned no valid Result, or asked for another turn without an observation.
            ServerError: The model endpoint refused a call, or was unavailable for too long.
        """
        # These load httpx and asyncio: for those who run environments, not for those who import them.
        from molt.agents.completions import CompletionClient
        from molt.agents.episode import run_episode

        if self._client is None:
            self._client = CompletionClient()
        return await run_episode(self._make_env(), ctx, client=self._client, max_turns=self._max_turns)

    async def close(self) -> None:
        """Close the connections to the model endpoint."""
        if self._client is not None:
            await self._client.close()
