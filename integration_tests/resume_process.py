"""Runs the training loop on a real rank, without engines and without workers: its windows lie in the ledger.

A life is one process of a run, which may kill itself at a point that it is told. Importing AutoModel takes many
seconds: one process does it, and forks the lives off.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from molt.train.actor.setup import RankSetup
from molt.train.config import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    OptimizerConfig,
    PoolConfig,
    RolloutConfig,
    TrainConfig,
)
from molt.train.controller.admission import Admission
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.collect import Collector
from molt.train.controller.learning import Learning
from molt.train.controller.results import experiences_into
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.training import Parts, TrainingLoop
from molt.train.errors import ActorDeadError
from molt.train.experience import LocalPayloadStore
from molt.train.observe.journal import Journal
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.refit import Interrupted
from molt.train.window import plan_of

NUM_UPDATES = 5
CONFIG = Config(
    train=TrainConfig(num_updates=NUM_UPDATES, groups_per_update=2, max_staleness=NUM_UPDATES, checkpoint_every=2),
    rollout=RolloutConfig(group_size=3),
    actor=ActorConfig(optimizer=OptimizerConfig(lr=1e-2, schedule="cosine")),
    # A divergence with a coefficient that adapts, and two optimizer steps an update: all that has to be kept.
    algorithm=AlgorithmConfig(estimator="grpo", updates_per_window=2, kl_coef=0.1, kl_target=0.01, kl_horizon=20),
)

UNDISTURBED = "undisturbed"
KILLED = ("score 3", "refit 4", "saved 4", "committed 4", "record 5", "recorded 5", "saved 5", "committed 5")
"""Where a life kills itself: after the call, for the update. `saved`: the checkpoint is written, and has not its name;
`record`: before the window is in the ledger."""
RANKS_DIE = ("train 3", "train 4")
"""Where the ranks die with the step made and their answer lost, in a life that goes on."""


def live(folder: Path, model: Path) -> subprocess.Popen[bytes]:
    """Start the lives of every run below `folder`, one folder a run, named after where it dies."""
    program = "import sys; from integration_tests.resume_process import main; main(*sys.argv[1:])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-c", program, str(folder), str(model)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=Path(__file__).parent.parent)


def main(path: str, model: str) -> None:
    """Have every run die where its name says, and live to its end."""
    from molt.train.actor import rank  # the lives are forked with it

    del rank
    for point in (UNDISTURBED, *KILLED, *RANKS_DIE):
        folder = Path(path) / point
        codes = [_fork(folder, model, point)]
        if point in KILLED:
            codes.append(_fork(folder, model, UNDISTURBED))
        expected = [-signal.SIGKILL, 0] if point in KILLED else [0]
        assert codes == expected, f"{point}: exit codes {codes}"


def _fork(folder: Path, model: str, point: str) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=run_life, args=(folder, model, point))
    process.start()
    process.join()
    return process.exitcode


def run_life(folder: Path, model: str, point: str) -> None:
    """One process of the run in `folder`."""
    asyncio.run(_Life(RunFolder(folder), model, point).train())


class _Life:
    """The loop and what it works with; `point` says where it ends."""

    def __init__(self, folder: RunFolder, model: str, point: str):
        self._folder, self._point = folder, point
        self._store = LocalPayloadStore()
        self._actor = _Actor(model, self._store, self)
        self.is_dead = False

    async def train(self) -> None:
        ledger = _Ledger(self._folder.ledger, self)
        pool = make_pool(ledger, self._store)
        shapes = await self._actor.start()
        learning = Learning(CONFIG, self._actor, plan_of(CONFIG, hidden_size=shapes["policy"].hidden_size))
        admission, stall = Admission(CONFIG, pool, []), _NoStall()
        with Journal(self._folder.metrics) as journal:
            loop = TrainingLoop(
                CONFIG,
                Parts(
                    pool=pool,
                    actor=self._actor,
                    learning=learning,
                    serving=_Serving(self),
                    admission=admission,
                    collector=Collector(CONFIG, pool, admission, learning, stall),
                    checkpoints=_Checkpoints(self._folder.checkpoints, self),
                    journal=journal,
                    stall=stall,
                    evaluation=None,
                    memory=_NoMemory(),
                    on_update=(),
                ),
            )
            await loop.resume()
            await loop.run()
        ledger.close()

    def at(self, call: str, step: int) -> None:
        """Kill this process, or say that the ranks are dead, if this is the point for it."""
        if self._point == f"{call} {step}" and not self.is_dead:
            if self._point in KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            self.is_dead = True
            raise ActorDeadError(f"a rank died in {call!r}")


class _Actor:
    """The rank of a group of one, in this process. A restart makes another one."""

    def __init__(self, model: str, store: LocalPayloadStore, life: _Life):
        self._model, self._store, self._life = model, store, life
        self._meetings, self._num_starts = Path(model).parent, 0

    async def start(self) -> Any:
        from molt.train.actor.rank import ActorRank

        self._num_starts += 1
        self._rank = ActorRank(setup_of(self._model), self._store)
        return self._rank.start(f"file://{self._meetings}/meeting-{os.getpid()}-{self._num_starts}")

    async def restart(self, cause: Exception) -> None:
        import torch

        del cause
        torch.distributed.destroy_process_group()
        await self.start()

    async def check_health(self) -> None:
        pass

    async def score(self, window: Any) -> Any:
        self._rank.reload([window.share(0)])
        scores = self._rank.score(window.share(0))
        self._life.at("score", window.step)
        return scores

    async def train(self, windows: Sequence[Any], *, kl_coef: float) -> Any:
        shares = [window.share(0) for window in windows]
        self._rank.reload(shares)
        report = self._rank.train(shares, step=windows[0].step, kl_coef=kl_coef)
        self._life.at("train", windows[0].step)
        return report

    async def save(self, folder: Path, *, step: int, progress: dict[str, Any]) -> None:
        self._rank.save(str(folder), step=step, progress=progress)
        self._life.at("saved", step)

    async def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        return self._rank.load(str(folder))


class _Serving:
    """Stands for the engines: they take every version."""

    def __init__(self, life: _Life):
        self._life = life
        self.version = self.offered = 0

    async def open(self, version: int, *, send: bool) -> None:
        assert send == (version > 0)
        self.version = self.offered = version

    async def refit(self, version: int) -> None:
        self.version = self.offered = version
        self._life.at("refit", version)

    @contextlib.asynccontextmanager
    async def detached(self) -> AsyncIterator[None]:
        yield

    async def reconnect(self) -> None:
        pass

    def take_prefix_hit_rate(self) -> float:
        return 0.0

    def take_interrupted(self) -> Interrupted:
        return Interrupted()


class _Checkpoints(Checkpoints):
    def __init__(self, folder: Path, life: _Life):
        super().__init__(folder, keep=2)
        self._life = life

    def commit(self, step: int) -> Path:
        final = super().commit(step)
        self._life.at("committed", step)
        return final


class _Ledger(Ledger):
    def __init__(self, path: Path, life: _Life):
        super().__init__(path, PoolConfig())
        self._life = life

    def record_window(self, step: int, policy_version: int, group_ids: Sequence[str]) -> None:
        self._life.at("record", step)
        super().record_window(step, policy_version, group_ids)
        self._life.at("recorded", step)


class _NoStall:
    def check(self, waiting_for: str) -> None:
        raise AssertionError(f"there should be nothing to wait for, least of all {waiting_for}")


class _NoMemory:
    async def after_window(self) -> None:
        pass


def make_pool(ledger: Ledger, store: LocalPayloadStore) -> Pool:
    return Pool(ledger, settings=PoolConfig(), clock=time.monotonic, experiences_of=experiences_into(store))


def setup_of(model: str) -> RankSetup:
    return RankSetup(
        rank=0,
        world_size=1,
        model_path=model,
        actor=CONFIG.actor,
        algorithm=CONFIG.algorithm,
        temperature=CONFIG.rollout.temperature,
        num_steps=NUM_UPDATES * CONFIG.algorithm.updates_per_window,
        seed=0,
        collective_timeout_s=60.0,
    )
