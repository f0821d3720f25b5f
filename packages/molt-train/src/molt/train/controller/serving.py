"""The engines as the controller sees them: serving one policy version, refitted together, replaced when they die."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

from molt.train.engine.protocol import Engine
from molt.train.engine.router import Router
from molt.train.errors import ActorDeadError, ActorError, RunError, StallError
from molt.train.records.refit import Interrupted, RefitReport

HEALTH_INTERVAL_S = 2.0


class _EnginesLostError(RunError):
    """A refit failed half way, and the engines that took part were ended."""


class Fleet(Protocol):
    """The engines' processes, by number."""

    @property
    def engines(self) -> Sequence[Engine]:
        """What takes requests."""
        ...

    @property
    def actors(self) -> list[Any]:
        """Their handles, for the weight-transfer group."""
        ...

    async def fault(self, index: int) -> str | None:
        """Why an engine that was started can no longer serve; None: it can."""
        ...

    def stop(self, index: int, reason: str) -> None:
        """End an engine that can no longer serve."""
        ...

    async def restart(self, index: int) -> None:
        """Start a new one in its place, on the weights of the checkpoint. RunError when no restart is left."""
        ...


class WeightSource(Protocol):
    """The actor, as far as it sends weights."""

    async def connect(self, engines: list[Any], *, workers_per_engine: int) -> None:
        """Form the weight-transfer group with `engines`, in place of a former one."""
        ...

    async def refit(self, at_least: int) -> RefitReport:
        """Send the weights to them, to be served as the version that they are; none of a version below `at_least`."""
        ...


class AsLoaded:
    """Stands for an actor where nothing is trained: engines, started again ones too, hold `version` from the start."""

    def __init__(self, version: int) -> None:
        self._version = version

    async def connect(self, engines: list[Any], *, workers_per_engine: int) -> None:
        """There is no transfer group."""

    async def refit(self, at_least: int) -> RefitReport:  # noqa: ARG002 - there is only one version
        """Nothing is sent."""
        return RefitReport(version=self._version)


class Serving:
    """Keeps the router's engines on one version. Only an engine that holds it whole gets requests.

    An engine is `serving`, `ready` (it runs, and waits for its first weights) or `down` (it was ended, and a new one
    is being started). Weights are sent to all that run, one refit at a time. While a new engine starts, the others
    serve and are refitted.
    """

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
        self._standing: dict[int, Literal["serving", "ready", "down"]] = dict.fromkeys(
            range(len(fleet.engines)), "ready"
        )
        self._starting = {index: asyncio.Lock() for index in self._standing}
        self._group: dict[int, Engine] | None = None
        """Who is in the transfer group; None: it has to be formed first."""
        self._sent: int | None = None
        """Version that this actor, since it was last started, has sent to all that run."""
        self._cached_before = self._prompt_before = 0
        self._interrupted = Interrupted()
        self.version = 0
        """What the engines serve, or served last."""
        self.offered = 0
        """What they were sent last, whole or not: some may have served it for a moment before another failed."""

    async def open(self, version: int, *, send: bool) -> None:
        """Connect the actor with the engines and let them serve `version`, sent first unless they hold it already.

        Raises RunError when that fails: no request was served yet.
        """
        async with self._weights:
            self.offered = version
            if send:
                await self._send(version)
            else:
                await self._connect()
                self.version = version
                self._admit(dict(enumerate(self._fleet.engines)))
            self._group_or_raise()

    async def refit(self, version: int) -> None:
        """Send the actor's weights, which are of `version`, to every engine, and serve them.

        Engines that did not get them whole are replaced; it returns when others serve `version` in their place. Raises
        ActorDeadError when the actor died, so that it has to be started anew and to `reconnect`; other RunErrors when
        it is at fault otherwise, or no restart is left.
        """
        async with self._weights:
            if self._sent == version:
                return  # the replacement of an engine has brought it to all
            self.offered = version
            if self._running():
                with contextlib.suppress(_EnginesLostError):
                    await self._send(version)
        while self.version != version or "serving" not in self._standing.values():
            with contextlib.suppress(_EnginesLostError):  # as often as there are restarts
                await self._revive(self._standing)
                if self.version != version:
                    raise ActorError(f"the actor holds version {self.version}, and was to send version {version}")

    @contextlib.asynccontextmanager
    async def detached(self) -> AsyncIterator[None]:
        """No weights are sent in the block, whose actor is being started anew. Engines that die wait for its end."""
        async with self._weights:
            self._group = self._sent = None
            yield

    async def reconnect(self) -> None:
        """Form the transfer group with an actor that was started anew. No weights are sent, and engines go on serving.

        Those that are ready serve after the next refit.
        """
        async with self._weights:
            self._group = self._sent = None
            await self._connect()

    def take_prefix_hit_rate(self) -> float:
        """Of the prompt tokens since the last call, the fraction that engines had in their prefix caches; else 0."""
        cached, prompt = self._router.num_cached_tokens, self._router.num_prompt_tokens
        num_cached, num_prompt = cached - self._cached_before, prompt - self._prompt_before
        self._cached_before, self._prompt_before = cached, prompt
        return num_cached / num_prompt if num_prompt else 0.0

    def take_interrupted(self) -> Interrupted:
        """What became of the generations that refits found under way since the last call."""
        taken, self._interrupted = self._interrupted, Interrupted()
        return taken

    async def supervise(self) -> None:
        """Replace engines that die or hang, until cancelled.

        Raises RunError when no restart is left.
        """
        watchers = [asyncio.create_task(self._watch(index)) for index in self._standing]
        try:
            await asyncio.gather(*watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, index: int) -> None:
        """Find out when an engine can no longer serve, and replace it.

        One that hangs in a refit is ended, so that the refit fails.
        """
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if self._standing[index] == "down":
                # Who trains with the actor sees what is wrong with it, and reconnects. Lost engines are revived again.
                with contextlib.suppress(_EnginesLostError, ActorError, StallError):
                    await self._revive([index])
                continue
            engine = self._fleet.engines[index]
            fault = await self._fleet.fault(index)
            if fault is not None and self._fleet.engines[index] is engine:
                self._take_out([index], fault)

    async def _revive(self, indices: Iterable[int]) -> None:
        """Start engines in place of those that are down, and send all that run the weights that the actor holds.

        Not those of an older version than engines serve: the next refit brings newer ones.
        """
        await asyncio.gather(*(self._start(index) for index in indices))
        async with self._weights:
            if "ready" in self._standing.values():
                await self._send(self.version if "serving" in self._standing.values() else 0)

    async def _start(self, index: int) -> None:
        async with self._starting[index]:
            if self._standing[index] == "down":
                await self._fleet.restart(index)
                self._standing[index] = "ready"

    async def _send(self, at_least: int) -> None:
        """Have all that run serve what the actor holds, unless that is older than `at_least`.

        Where it fails, some may hold a mixture of old and new: none of those that took part serves again.

        Raises:
            _EnginesLostError: It failed half way.
            ActorDeadError: The same, since the actor died.
            ActorError: The actor cannot send; no engine was touched.
        """
        if self._group is None or self._group != self._running():
            await self._connect()
        group = self._group_or_raise()
        try:
            report = await self._actor.refit(at_least)
        except (ActorError, StallError) as error:
            self._on_event("refit_failed", {"at_least": at_least, "engines": sorted(group), "error": str(error)})
            self._group = self._sent = None
            self._take_out([i for i, engine in group.items() if self._fleet.engines[i] is engine], "a refit failed")
            if isinstance(error, ActorDeadError):
                raise
            raise _EnginesLostError(str(error)) from error
        if not report.sent:
            return
        self.version = self._sent = report.version
        self.offered = max(self.offered, report.version)
        self._interrupted += report.interrupted
        self._admit(group)

    async def _connect(self) -> None:
        """Form the transfer group with all that run; one that turns out to be gone is left out.

        Raises what the actor raised when no engine is at fault. None is disturbed.
        """
        self._group = None
        while group := self._running():
            try:
                await self._actor.connect(
                    [self._fleet.actors[index] for index in group], workers_per_engine=self._workers_per_engine
                )
            except (ActorError, StallError):
                faults = {index: await self._fleet.fault(index) for index in group}
                found = {index: fault for index, fault in faults.items() if fault is not None}
                if not found:
                    raise
                for index, fault in found.items():
                    self._take_out([index], fault)
            else:
                self._group = group
                return

    def _running(self) -> dict[int, Engine]:
        return {i: self._fleet.engines[i] for i, standing in self._standing.items() if standing != "down"}

    def _group_or_raise(self) -> dict[int, Engine]:
        if not self._group:
            raise ActorError("no engine is up to take weights")
        return self._group

    def _admit(self, group: dict[int, Engine]) -> None:
        """Let those serve that took part in a refit, and have not been replaced since."""
        for index, engine in group.items():
            if self._standing[index] == "ready" and self._fleet.engines[index] is engine:
                self._standing[index] = "serving"
                self._router.admit(index, engine)

    def _take_out(self, indices: Iterable[int], reason: str) -> None:
        for index in indices:
            if self._standing[index] != "down":
                self._standing[index] = "down"
                self._router.remove(index)
                self._fleet.stop(index, reason)
