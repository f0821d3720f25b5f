"""The actor ranks as one: start, train, refit, checkpoint."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from molt.train.actor.memory_plan import ModelShape, Role
from molt.train.actor.setup import RankSetup
from molt.train.cluster.placement import Placement
from molt.train.cluster.runtime import node_address
from molt.train.cluster.weight_sync import RayWeightSync
from molt.train.errors import ActorError, StallError
from molt.train.experience import PayloadStore
from molt.train.records.window import RankWindow, Scores, StepReport, TrainWindow


class _RankProcess:
    """The Ray actor of a rank. What it wraps is imported in its own process alone: it brings torch and AutoModel."""

    def __init__(self, setup: RankSetup, store: PayloadStore):
        from molt.train.actor.rank import ActorRank, CriticRank

        self._rank = CriticRank(setup, store) if setup.role == "critic" else ActorRank(setup, store)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rank, method)(*args, **kwargs)


class _Ranks:
    """Processes of one process group."""

    def __init__(self, setup: RankSetup, store: PayloadStore, *, placement: Placement, timeout_s: float):
        remote: Any = ray.remote(_RankProcess)  # Ray's types do not follow `remote`
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": placement.gpus_per_rank,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        }
        self._name, self._timeout_s = setup.role, timeout_s
        self._processes = [
            remote.options(**options).remote(msgspec.structs.replace(setup, rank=rank), store)
            for rank in range(setup.world_size)
        ]

    async def start(self) -> dict[Role, ModelShape]:
        host, port = node_address()
        return (await self.on_all("start", f"tcp://{host}:{port}"))[0]

    async def on_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` alike on every rank; the answers in their order."""
        return await self._gather([rank.call.remote(method, *args, **kwargs) for rank in self._processes], method)

    async def on_shares(self, method: str, shares: Callable[[int], Any], **kwargs: Any) -> list[Any]:
        """Call `method` on every rank with what `shares` gives for its number; the answers in their order."""
        calls = [rank.call.remote(method, shares(number), **kwargs) for number, rank in enumerate(self._processes)]
        return await self._gather(calls, method)

    def kill(self) -> None:
        for rank in self._processes:
            ray.kill(rank)

    async def _gather(self, calls: list[Any], method: str) -> list[Any]:
        name = self._name
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), self._timeout_s)
        except TimeoutError:
            raise StallError(f"{name} ranks did not finish {method!r} within {self._timeout_s:.0f} s") from None
        except RayTaskError as error:
            raise ActorError(f"{name} rank failed in {method!r}: {error.cause}") from error
        except RayActorError as error:
            raise ActorError(
                f"a rank of the {name} died in {method!r}; its output is in the run folder's logs/, and the same "
                "command goes on from the last checkpoint"
            ) from error


class ActorGroup:
    """All ranks of the policy, and of a critic that has ranks of its own, as one.

    Every call runs on all of them at once, under a limit of `timeout_s` with a name. Raises ActorError when a rank died
    or refused, StallError when the limit passed.
    """

    def __init__(self, setup: RankSetup, store: PayloadStore, *, placement: Placement, timeout_s: float):
        self._timeout_s, self._transfer = timeout_s, placement.transfer
        self._actor = _Ranks(setup, store, placement=placement, timeout_s=timeout_s)
        self._critic: _Ranks | None = None
        if setup.has_critic and setup.critic.placement == "own":
            own = msgspec.structs.replace(setup, role="critic")
            self._critic = _Ranks(own, store, placement=placement, timeout_s=timeout_s)

    async def start(self) -> dict[Role, ModelShape]:
        """Load the models on every rank. Returns the shapes of those that a rank of the policy holds."""
        return (await asyncio.gather(*(ranks.start() for ranks in self._groups)))[0]

    async def score(self, window: TrainWindow) -> list[Scores]:
        """What the algorithm needs of each row before its advantages: rank by rank, microbatch by microbatch, in order.

        Old log-probs for a divergence in the reward and for distillation, reference log-probs with a divergence,
        teacher log-probs for distillation, values for `gae`.
        """
        found = await asyncio.gather(*(ranks.on_shares("score", window.share) for ranks in self._groups))
        scores, *values = [list(itertools.chain.from_iterable(shares)) for shares in found]
        if not values:
            return scores
        return [
            msgspec.structs.replace(score, values=critic.values)
            for score, critic in zip(scores, values[0], strict=True)
        ]

    async def train(
        self, windows: Sequence[TrainWindow], *, kl_coef: float = 0.0, supervised: bool = False
    ) -> StepReport:
        """One update: an optimizer step for each of `windows`, which are the parts of one window.

        Args:
            windows: Rows with advantages, and with what else `score` gave.
            kl_coef: Weight of the divergence in the loss, where it adapts; the configured one with a fixed weight.
            supervised: Raise the likelihood of every action token, whatever else the rows hold.
        """

        def shares(rank: int) -> list[RankWindow]:
            return [window.share(rank) for window in windows]

        step = windows[0].step
        if supervised:
            return (await self._actor.on_shares("train_supervised", shares, step=step))[0]
        update = self._actor.on_shares("train", shares, step=step, kl_coef=kl_coef)
        if self._critic is None:
            return (await update)[0]
        reports, metrics = await asyncio.gather(update, self._critic.on_shares("train", shares, step=step))
        return msgspec.structs.replace(reports[0], metrics=reports[0].metrics | metrics[0])

    async def save(self, folder: Path, *, step: int, progress: Mapping[str, Any]) -> None:
        """Write a checkpoint of the state after update `step`; `progress`, JSON values by name, is the caller's own."""
        calls = [self._actor.on_all("save", str(folder), step=step, progress=dict(progress))]
        if self._critic is not None:
            calls.append(self._critic.on_all("save", str(folder), step=step))
        await asyncio.gather(*calls)

    async def export(self, folder: Path) -> None:
        """Write the policy's weights as a Hugging Face folder."""
        await self._actor.on_all("export", str(folder))

    async def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """Resume from a checkpoint; returns its step, and the `progress` that was saved with it."""
        loaded = await asyncio.gather(*(ranks.on_all("load", str(folder)) for ranks in self._groups))
        return loaded[0][0]

    async def peak_bytes(self) -> int:
        """The most memory that a rank of the policy has held since it started."""
        return max(await self._actor.on_all("peak_bytes"))

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
        await self._actor.on_all("connect", init, client, transfer=self._transfer)

    async def refit(self, version: int) -> None:
        """Send the weights to the engines, which serve them as `version`."""
        await self._actor.on_all("refit", version)

    def kill(self) -> None:
        """End the ranks' processes."""
        for ranks in self._groups:
            ranks.kill()

    @property
    def _groups(self) -> list[_Ranks]:
        return [self._actor] if self._critic is None else [self._actor, self._critic]
