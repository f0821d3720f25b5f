"""The actor ranks as one: start, train, refit, checkpoint, start anew."""

import asyncio
import itertools
import os
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
from molt.train.cluster.weight_sync import TRANSFER_TIMEOUT_S, RayWeightSync
from molt.train.errors import ActorDeadError, ActorError, PayloadLostError, RunError
from molt.train.observe.stacks import listen
from molt.train.observe.waits import Waits
from molt.train.records.experience import PayloadStore
from molt.train.records.refit import RefitReport
from molt.train.records.window import RankWindow, Scores, StepReport, TrainWindow

OnChange = Callable[[str, dict[str, Any]], None]
DEATH_GRACE_S = 10.0
"""How long the failure of one rank waits for another's death to show: that may be why a collective failed."""
HEALTH_TIMEOUT_S = 30.0


class _RankProcess:
    """The Ray actor of a rank. What it wraps is imported in its own process alone: it brings torch and AutoModel."""

    def __init__(self, setup: RankSetup, store: PayloadStore):
        from molt.train.actor.rank import ActorRank, CriticRank

        if setup.stacks:
            listen(Path(setup.stacks), f"{setup.role}-{setup.rank}")
        self._rank = CriticRank(setup, store) if setup.role == "critic" else ActorRank(setup, store)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rank, method)(*args, **kwargs)

    def pid(self) -> int:
        return os.getpid()


class _Ranks:
    """Processes of one process group."""

    def __init__(self, setup: RankSetup, store: PayloadStore, *, placement: Placement, timeout_s: float, waits: Waits):
        remote: Any = ray.remote(_RankProcess)  # Ray's types do not follow `remote`
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": placement.gpus_per_rank,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        }
        self._name, self._timeout_s, self._waits = setup.role, timeout_s, waits
        self._num_calls = 0
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

    async def pids(self) -> list[int]:
        """Their process ids: soon, unless a rank is at work."""
        return await self._gather([rank.pid.remote() for rank in self._processes], "pid", timeout_s=HEALTH_TIMEOUT_S)

    @property
    def are_at_work(self) -> bool:
        """Whether a call is under way, which notices itself when a rank dies."""
        return self._num_calls > 0

    def kill(self) -> None:
        for rank in self._processes:
            ray.kill(rank)

    async def _gather(self, calls: list[Any], method: str, *, timeout_s: float | None = None) -> list[Any]:
        limit_s = timeout_s or self._timeout_s
        answers = [asyncio.ensure_future(call) for call in calls]
        self._num_calls += 1
        try:
            with self._waits.on(f"the {self._name} ranks to {method}", limit_s=limit_s):
                await asyncio.wait(answers, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
                if any(answer.done() and _failed(answer) for answer in answers):
                    await self._await_death(answers)
            self._raise_failure(answers, method, limit_s=limit_s)
            return [answer.result() for answer in answers]
        finally:
            self._num_calls -= 1
            for answer in answers:
                answer.cancel()

    async def _await_death(self, answers: list[asyncio.Future[Any]]) -> None:
        """Give a rank that died time to show it: the others may have failed first, in a collective with it."""
        end = asyncio.get_running_loop().time() + DEATH_GRACE_S
        while not any(answer.done() and _is_death(answer) for answer in answers):
            left = end - asyncio.get_running_loop().time()
            running = [answer for answer in answers if not answer.done()]
            if left <= 0 or not running:
                return
            await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _raise_failure(self, answers: list[asyncio.Future[Any]], method: str, *, limit_s: float) -> None:
        name, done = self._name, [answer for answer in answers if answer.done()]
        if any(map(_is_death, done)):
            raise ActorDeadError(
                f"a rank of the {name} died in {method!r}; its output is in the run folder's logs/, and the same "
                "command goes on from the last checkpoint"
            )
        for error in [answer.exception() for answer in done]:
            if isinstance(error, RayTaskError):
                if isinstance(error.cause, PayloadLostError):
                    raise error.cause from None
                raise ActorError(f"{name} rank failed in {method!r}: {error.cause}") from error
            if error is not None:
                raise error
        if len(done) < len(answers):
            raise ActorDeadError(f"{name} ranks did not finish {method!r} within {limit_s:.0f} s")


def _tell_nobody(_kind: str, _detail: dict[str, Any]) -> None: ...


def _failed(answer: asyncio.Future[Any]) -> bool:
    return answer.exception() is not None


def _is_death(answer: asyncio.Future[Any]) -> bool:
    """Whether the rank's process is gone. An error that its code raised is no death, even if that is of an engine's."""
    error = answer.exception()
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


class ActorGroup:
    """All ranks of the policy, and of a critic that has ranks of its own, as one.

    Every call runs on all of them at once, under a limit of `timeout_s` with a name. Raises ActorDeadError when a rank
    died, or the limit passed, other ActorErrors when one refused.

    Args:
        setup: Of every rank.
        store: Where rows' payloads are.
        placement: GPUs of a rank.
        timeout_s: Of each call.
        waits: Told of every call while it lasts.
        on_change: Told of starts, deaths and restarts.
    """

    def __init__(
        self,
        setup: RankSetup,
        store: PayloadStore,
        *,
        placement: Placement,
        timeout_s: float,
        waits: Waits | None = None,
        on_change: OnChange | None = None,
    ):
        self._setup, self._store, self._placement = setup, store, placement
        self._timeout_s, self._waits, self._on_change = timeout_s, waits or Waits(), on_change or _tell_nobody
        self._restarts_left = setup.actor.max_restarts
        self._groups = self._make()

    async def start(self) -> dict[Role, ModelShape]:
        """Load the models on every rank. Returns the shapes of those that a rank of the policy holds."""
        shapes = await self._load_all()
        self._on_change("actor_started", {"pids": await self._pids()})
        return shapes

    async def restart(self, cause: ActorError) -> None:
        """End what is left of the ranks, and start new ones, with the weights that the run began with.

        They are in no transfer group with the engines. Raises RunError when no restart is left, and as `start` does.
        """
        self._on_change("actor_died", {"error": str(cause), "restarts_left": self._restarts_left})
        if self._restarts_left == 0:
            raise RunError(f"{cause} (actor.max_restarts = {self._setup.actor.max_restarts} is spent)") from cause
        self._restarts_left -= 1
        self.kill()
        self._groups = self._make()
        await self._load_all()
        self._on_change("actor_restarted", {"pids": await self._pids()})

    async def check_health(self) -> None:
        """Raises ActorDeadError when a rank that is not at work is gone, or does not answer.

        One at work answers nothing else: a transfer to an engine that hangs takes longer than a sign of life may.
        """
        await asyncio.gather(*(ranks.pids() for ranks in self._groups if not ranks.are_at_work))

    async def score(self, window: TrainWindow) -> list[Scores]:
        """What the algorithm needs of each row before its advantages: rank by rank, microbatch by microbatch, in order.

        Old log-probs for a divergence in the reward and for distillation, reference log-probs with a divergence,
        teacher log-probs for distillation, values for `gae`. Raises PayloadLostError as `train` does.
        """
        await self._reload(lambda rank: [window.share(rank)])
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

        Raises:
            PayloadLostError: A row's payload is gone from the object store. No rank has begun.
        """

        def shares(rank: int) -> list[RankWindow]:
            return [window.share(rank) for window in windows]

        step = windows[0].step
        await self._reload(shares)
        if supervised:
            return (await self._actor.on_shares("train_supervised", shares, step=step))[0]
        update = self._actor.on_shares("train", shares, step=step, kl_coef=kl_coef)
        if self._critic is None:
            return (await update)[0]
        reports, metrics = await asyncio.gather(update, self._critic.on_shares("train", shares, step=step))
        return msgspec.structs.replace(reports[0], metrics=reports[0].metrics | metrics[0])

    async def _reload(self, shares: Callable[[int], list[RankWindow]]) -> None:
        """Have every rank fetch what it will work on, before any of them waits for another."""
        await asyncio.gather(*(ranks.on_shares("reload", shares) for ranks in self._groups))

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
            "timeout_s": TRANSFER_TIMEOUT_S,
        }
        client = RayWeightSync(engines, workers_per_engine=workers_per_engine, timeout_s=self._timeout_s)
        await self._actor.on_all("connect", init, client, transfer=self._placement.transfer)

    async def refit(self, at_least: int) -> RefitReport:
        """Send the weights to the engines, which serve them as the version that they are; none below `at_least`."""
        return (await self._actor.on_all("refit", at_least))[0]

    def kill(self) -> None:
        """End the ranks' processes."""
        for ranks in self._groups:
            ranks.kill()

    def _make(self) -> list[_Ranks]:
        """New processes: the ranks of the policy, then those of a critic that has its own."""
        setups = [self._setup]
        if self._setup.has_critic and self._setup.critic.placement == "own":
            setups.append(msgspec.structs.replace(self._setup, role="critic"))
        return [
            _Ranks(setup, self._store, placement=self._placement, timeout_s=self._timeout_s, waits=self._waits)
            for setup in setups
        ]

    async def _load_all(self) -> dict[Role, ModelShape]:
        return (await asyncio.gather(*(ranks.start() for ranks in self._groups)))[0]

    async def _pids(self) -> list[int]:
        return list(itertools.chain(*await asyncio.gather(*(ranks.pids() for ranks in self._groups))))

    @property
    def _actor(self) -> _Ranks:
        return self._groups[0]

    @property
    def _critic(self) -> _Ranks | None:
        return self._groups[1] if len(self._groups) > 1 else None
