"""The composition root: what a command runs, out of concrete parts. Nothing else names them together."""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from molt.train.config import Config, to_toml
from molt.train.controller.admission import Admission
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.evaluation import Evaluation
from molt.train.controller.rollouts import RolloutDesk
from molt.train.controller.serving import Serving
from molt.train.controller.stall import StallGuard
from molt.train.controller.training import Parts, TrainingLoop
from molt.train.controller.workers import LocalWorkers
from molt.train.engine.router import Router
from molt.train.gateway.app import Gateway
from molt.train.gateway.sessions import Sessions
from molt.train.observe.journal import Journal, read_journal
from molt.train.observe.logs import configure_logging
from molt.train.observe.metrics import Metrics
from molt.train.observe.picture import draw_reward_curve
from molt.train.observe.progress import ProgressView
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.pool.tasks import TaskOrder
from molt.train.preflight import Preflight, preflight
from molt.train.server import HttpServer, create_app

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 900.0
"""How long one call to the actor ranks may take: a refit, a checkpoint, an update."""


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def metrics(self) -> Path:
        """One JSON object an update."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object an evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def ledger(self) -> Path:
        """What was leased, sampled and consumed."""
        return self.path / "ledger.db"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpointed update."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Logs of the server and of every process it started."""
        return self.path / "logs"

    @property
    def picture(self) -> Path:
        """The reward curve."""
        return self.path / "reward.png"


def run_training(config: Config, *, local_workers: bool) -> dict[str, Any]:
    """Train as `config` says, in this process and those it starts; returns a summary of the run.

    Raises ConfigError before anything is started, RunError when the run cannot go on.
    """
    checked = preflight(config, local_workers=local_workers)
    folder = RunFolder(Path(config.run.dir))
    folder.path.mkdir(parents=True, exist_ok=True)
    token = config.server.token or secrets.token_urlsafe(24)
    configure_logging(folder.logs / "server.log", secrets=(token,))
    public = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, token=""))
    (folder.path / "config.toml").write_text(to_toml(public))
    with _ray(config, folder):
        return asyncio.run(_train(config, checked, folder, token=token, local_workers=local_workers))


@contextlib.contextmanager
def _ray(config: Config, folder: RunFolder) -> Iterator[None]:
    if not config.cluster.address:
        # A cluster of one's own takes orders from nobody else on the machine. Ray reads these when it is imported.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from molt.train.cluster.runtime import ray_runtime

    with ray_runtime(address=config.cluster.address, logs=folder.logs):
        yield


async def _train(
    config: Config, checked: Preflight, folder: RunFolder, *, token: str, local_workers: bool
) -> dict[str, Any]:
    from molt.train.cluster.payloads import RayPayloadStore

    started = time.monotonic()
    store, router, metrics, sessions = RayPayloadStore(), Router(), Metrics(), Sessions()
    ledger = Ledger(folder.ledger)
    desk, pool, admission = _desk(config, checked, ledger, store, sessions, metrics)
    gateway = _gateway(config, checked, sessions, router, metrics)
    server = HttpServer(create_app(desk, gateway.asgi, metrics, token=token), checked.sock)
    actor, fleet = _heavy(config, store, on_event=ledger.record_event)
    serving = Serving(
        fleet,
        router,
        actor,
        workers_per_engine=config.engine.tensor_parallel_size,
        on_event=ledger.record_event,
    )
    stall = StallGuard(
        config.run.stall_timeout,
        signature=lambda: (router.num_finished, desk.num_results),
        report=lambda: f"{pool.status()}, {router.num_running} generations running",
        any_worker=lambda: desk.num_leases > 0,
    )
    with Journal(folder.metrics) as journal, Journal(folder.evaluations) as evaluations:
        progress = ProgressView(config.train.num_updates)
        parts = Parts(
            pool=pool,
            actor=actor,
            serving=serving,
            admission=admission,
            checkpoints=Checkpoints(folder.checkpoints, keep=config.train.keep_checkpoints),
            journal=journal,
            stall=stall,
            evaluation=_evaluation(config, checked, pool, evaluations, stall),
            on_update=progress.update,
        )
        loop = TrainingLoop(config, parts)
        try:
            await _guarded(asyncio.gather(actor.start(), fleet.start()), "engines and actor to start")
            await loop.resume()
            evaluations.truncate_after(loop.step - 1 if loop.step == 0 else loop.step)
            async with _serve(server, desk), _workers(config, server, token, folder, local=local_workers, ledger=ledger):
                print(msgspec.json.encode({"url": server.url}).decode(), flush=True)  # noqa: T201  the pinned line
                with progress:
                    await _first_to_end(loop.run(), serving.supervise(), desk.watch_leases())
                desk.finish()
        finally:
            fleet.kill()
            actor.kill()
            ledger.close()
    return _summary(folder, seconds=time.monotonic() - started)
