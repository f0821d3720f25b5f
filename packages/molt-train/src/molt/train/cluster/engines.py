"""Engines as Ray actors: one handle each, and the fleet that starts, watches and restarts them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from molt.train.engine.protocol import EngineChunk, EngineRequest
from molt.train.engine.vllm import VllmEngine, VllmSetup
from molt.train.errors import EngineDeadError, EngineError, RunError, StallError
from molt.train.observe.waits import Waits

START_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 30.0


class RayEngine:
    """`engine.protocol.Engine` over one engine actor."""

    body: type[VllmEngine] = VllmEngine
    """What the actor runs."""

    def __init__(self, setup: VllmSetup):
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        remote = ray.remote(self.body).options(
            num_cpus=0,
            num_gpus=setup.gpus,
            max_concurrency=4096,
            # On CUDA vLLM chooses its processes itself.
            runtime_env={"env_vars": {} if setup.gpus else env},
        )
        self.actor: Any = remote.remote(setup)  # Ray's types do not follow `remote`

    async def start(self) -> int:
        """Load the model; returns the actor's process id."""
        try:
            return await asyncio.wait_for(self.actor.start.remote(), START_TIMEOUT_S)
        except TimeoutError:
            raise StallError(f"an engine did not start within {START_TIMEOUT_S:.0f} s") from None
        except (RayActorError, RayTaskError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise RunError(f"an engine did not start, see the run folder's logs/: {reason}") from error

    async def generate(self, request: EngineRequest) -> EngineChunk:
        """The whole generation at once."""
        try:
            return await self.actor.generate.remote(request)
        except RayActorError as error:
            raise EngineDeadError(f"request {request.request_id}: the engine's process is gone") from error
        except RayTaskError as error:
            raise _cause(error, request.request_id) from None

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """The generation as it is sampled."""
        try:
            async for ref in self.actor.stream.options(num_returns="streaming").remote(request):
                yield await ref
        except RayActorError as error:
            raise EngineDeadError(f"request {request.request_id}: the engine's process is gone") from error
        except RayTaskError as error:
            raise _cause(error, request.request_id) from None

    async def abort(self, request_id: str) -> None:
        """Stop a generation; a dead engine has none."""
        try:
            await self.actor.abort.remote(request_id)
        except RayActorError:
            return

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone or does not answer."""
        try:
            await asyncio.wait_for(self.actor.check_health.remote(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer within {HEALTH_TIMEOUT_S:.0f} s") from None
        except RayActorError as error:
            raise EngineDeadError(f"the engine's process is gone: {str(error).strip().splitlines()[-1]}") from None
        except RayTaskError as error:
            raise EngineDeadError(str(error.cause)) from None

    def kill(self) -> None:
        """End the engine's processes; vLLM's own end with the actor."""
        ray.kill(self.actor)


def _cause(error: RayTaskError, request_id: str) -> EngineError:
    if isinstance(error.cause, EngineError):
        return error.cause
    return EngineError(f"request {request_id}: {error.cause!r}")


class EngineFleet:
    """All engines of a run, by number. `on_change` is told of starts, deaths and restarts.

    A restarted engine holds the weights of the checkpoint that it was started from, so it must be refitted before it
    serves; that is its caller's to do.
    """

    def __init__(
        self,
        setup: VllmSetup,
        *,
        on_change: Callable[[str, dict[str, Any]], None],
        make: Callable[[VllmSetup], RayEngine] = RayEngine,
        waits: Waits | None = None,
    ):
        self._setup, self._make, self._waits = setup, make, waits or Waits()
        self._on_change = on_change
        self._restarts_left = setup.engine.max_restarts
        self.engines: list[RayEngine] = [make(self._nth(i)) for i in range(setup.engine.num_engines)]

    def _nth(self, index: int) -> VllmSetup:
        return msgspec.structs.replace(self._setup, seed=self._setup.seed + index)

    @property
    def actors(self) -> list[Any]:
        """The Ray handles, for the weight-transfer group."""
        return [engine.actor for engine in self.engines]

    async def start(self) -> None:
        """Start all engines."""
        pids = await asyncio.gather(*(engine.start() for engine in self.engines))
        for index, pid in enumerate(pids):
            self._on_change("engine_started", {"engine": index, "pid": pid})

    async def fault(self, index: int) -> str | None:
        """Why an engine that was started can no longer serve: it is gone, unfit, or does not answer. None: it can."""
        try:
            await self.engines[index].check_health()
        except EngineDeadError as error:
            return str(error)
        return None

    def stop(self, index: int, reason: str) -> None:
        """End an engine that can no longer serve."""
        self._on_change("engine_died", {"engine": index, "reason": reason, "restarts_left": self._restarts_left})
        self.engines[index].kill()

    async def restart(self, index: int) -> None:
        """Start a new engine in place of one that was stopped. One that does not start costs a restart, too.

        Raises RunError when no restart is left.
        """
        while self._restarts_left:
            self._restarts_left -= 1
            engine = self.engines[index] = self._make(self._nth(index))
            try:
                with self._waits.on(f"a new engine {index} to start", limit_s=START_TIMEOUT_S):
                    pid = await engine.start()
            except RunError as error:
                self.stop(index, str(error))
            else:
                self._on_change("engine_restarted", {"engine": index, "pid": pid})
                return
        raise RunError(f"engine {index} died and engine.max_restarts = {self._setup.engine.max_restarts} is spent")

    def kill(self) -> None:
        """End all engines."""
        for engine in self.engines:
            engine.kill()
