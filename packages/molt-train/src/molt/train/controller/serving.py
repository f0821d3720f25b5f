"""The engines as the controller sees them: serving one policy version, refitted together, replaced when they die."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from molt.train.engine.protocol import Engine
from molt.train.engine.router import Router
from molt.train.errors import ActorError, StallError

HEALTH_INTERVAL_S = 2.0


class Fleet(Protocol):
    """The engines' processes."""

    @property
    def engines(self) -> Sequence[Engine]:
        """What takes requests, by number."""
        ...

    @property
    def actors(self) -> list[Any]:
        """Their handles, for the weight-transfer group."""
        ...

    async def dead(self) -> list[int]:
        """The numbers of those that are gone."""
        ...

    async def replace(self, indices: list[int]) -> None:
        """Start new ones under these numbers, on the weights of the checkpoint. RunError when no restart is left."""
        ...


class WeightSource(Protocol):
    """The actor, as far as it sends weights."""

    async def connect(self, engines: list[Any], *, workers_per_engine: int) -> None:
        """Form the weight-transfer group with `engines`, in place of a former one."""
        ...

    async def refit(self, version: int) -> None:
        """Send the weights to them, to be served as `version`."""
        ...


class Serving:
    """Keeps the router's engines on `version`. Only an engine that holds exactly that version gets requests."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        actor: WeightSource,
        *,
        workers_per_engine: int,
        on_event: Callable[[str, dict[str, Any]], None],
    ):
        self._fleet, self._router, self._actor = fleet, router, actor
        self._workers_per_engine = workers_per_engine
        self._on_event = on_event
        self._weights = asyncio.Lock()
        self._cached_before = self._prompt_before = 0
        self.version = 0

    async def open(self, version: int, *, send: bool) -> None:
        """Connect the actor with the engines and let them serve `version`, sent first unless they hold it already."""
        async with self._weights:
            await self._actor.connect(self._fleet.actors, workers_per_engine=self._workers_per_engine)
            if send:
                await self._actor.refit(version)
            self.version = version
            for index, engine in enumerate(self._fleet.engines):
                self._router.admit(index, engine)

    async def refit(self, version: int) -> None:
        """Send the actor's weights to every engine. Engines that did not get them whole are replaced.

        Raises RunError when the actor is at fault, or no restart is left.
        """
        async with self._weights:
            try:
                await self._actor.refit(version)
            except (ActorError, StallError) as error:
                # Some engine may hold a mixture of old and new: none of them serves again.
                self._on_event("refit_failed", {"version": version, "error": str(error)})
                self.version = version
                await self._replace(list(range(len(self._fleet.engines))))
            self.version = version

    def take_prefix_hit_rate(self) -> float:
        """Of the prompt tokens since the last call, the fraction that engines had in their prefix caches; else 0."""
        cached, prompt = self._router.num_cached_tokens, self._router.num_prompt_tokens
        num_cached, num_prompt = cached - self._cached_before, prompt - self._prompt_before
        self._cached_before, self._prompt_before = cached, prompt
        return num_cached / num_prompt if num_prompt else 0.0

    async def supervise(self) -> None:
        """Replace engines that die, until cancelled.

        Raises RunError when no restart is left.
        """
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            async with self._weights:
                dead = await self._fleet.dead()
                if dead:
                    await self._replace(dead)

    async def _replace(self, indices: list[int]) -> None:
        for index in indices:
            self._router.remove(index)
        await self._fleet.replace(indices)
        await self._actor.connect(self._fleet.actors, workers_per_engine=self._workers_per_engine)
        await self._actor.refit(self.version)
        for index in indices:
            self._router.admit(index, self._fleet.engines[index])
