"""The actor ranks as one: start, train, refit, checkpoint."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from molt.train.actor.setup import RankSetup
from molt.train.cluster.placement import Placement
from molt.train.cluster.runtime import node_address
from molt.train.cluster.weight_sync import RayWeightSync
from molt.train.errors import ActorError, StallError
from molt.train.experience import PayloadStore
from molt.train.records.window import StepReport, TrainWindow


class _RankProcess:
    """The Ray actor of a rank. What it wraps is imported in its own process alone: it brings torch and AutoModel."""

    def __init__(self, setup: RankSetup, store: PayloadStore):
        from molt.train.actor.rank import ActorRank

        self._rank = ActorRank(setup, store)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rank, method)(*args, **kwargs)


class ActorGroup:
    """All ranks. Every call runs on all of them at once, under a limit of `timeout_s` with a name.

    Raises ActorError when a rank died or refused, StallError when the limit passed.
    """

    def __init__(self, setup: RankSetup, store: PayloadStore, *, placement: Placement, timeout_s: float):
        remote: Any = ray.remote(_RankProcess)  # Ray's types do not follow `remote`
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": placement.gpus_per_rank,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        }
        self._timeout_s, self._transfer = timeout_s, placement.transfer
        self._ranks = [
            remote.options(**options).remote(msgspec.structs.replace(setup, rank=rank), store)
            for rank in range(setup.world_size)
        ]

    async def start(self) -> int:
        """Load the policy on every rank. Returns its number of parameters on rank 0."""
        host, port = node_address()
        return (await self._on_all("start", f"tcp://{host}:{port}"))[0]

    async def train(self, windows: Sequence[TrainWindow], *, supervised: bool = False) -> StepReport:
        """One update: an optimizer step for each of `windows`, which are the parts of one window."""
        method = "train_supervised" if supervised else "train"
        calls = [
            actor.call.remote(method, [window.share(rank) for window in windows], step=windows[0].step)
            for rank, actor in enumerate(self._ranks)
        ]
        return (await self._gather(calls, method))[0]

    async def save(self, folder: Path, *, step: int) -> None:
        """Write a checkpoint of the state after update `step`."""
        await self._on_all("save", str(folder), step=step)

    async def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        await self._on_all("export", str(folder))

    async def load(self, folder: Path) -> int:
        """Resume from a checkpoint; returns its step."""
        return (await self._on_all("load", str(folder)))[0]

    async def connect(self, engines: list[Any], *, workers_per_engine: int) -> None:
        """Form the weight-transfer group with `engines`, in place of a former one."""
        host, port = node_address()
        init = {
            "host": host,
            "port": port,
            "world_size": 1 + len(engines) * workers_per_engine,
            "timeout_s": self._timeout_s,
        }
        client = RayWeightSync(engines, workers_per_engine=workers_per_engine, timeout_s=self._timeout_s)
        await self._on_all("connect", init, client, transfer=self._transfer)

    async def refit(self, version: int) -> None:
        """Send the weights to the engines, which serve them as `version`."""
        await self._on_all("refit", version)

    def kill(self) -> None:
        """End the ranks' processes."""
        for rank in self._ranks:
            ray.kill(rank)

    async def _on_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return await self._gather([rank.call.remote(method, *args, **kwargs) for rank in self._ranks], method)

    async def _gather(self, calls: list[Any], method: str) -> list[Any]:
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), self._timeout_s)
        except TimeoutError:
            raise StallError(f"actor ranks did not finish {method!r} within {self._timeout_s:.0f} s") from None
        except RayTaskError as error:
            raise ActorError(f"actor rank failed in {method!r}: {error.cause}") from error
        except RayActorError as error:
            raise ActorError(
                f"an actor rank died in {method!r}; its output is in the run folder's logs/, and the same command goes "
                "on from the last checkpoint"
            ) from error
