"""The composition root: what a command runs, put together from concrete parts. Nothing else names them together."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from molt.train.config import Config, to_toml
from molt.train.controller.admission import Admission
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.evaluation import Evaluation
from molt.train.controller.results import experiences_into
from molt.train.controller.rollouts import DeskSettings, RolloutDesk
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.serving import Serving
from molt.train.controller.stall import StallGuard
from molt.train.controller.supervised import read_conversations, to_row, train_supervised
from molt.train.controller.training import Parts, TrainingLoop
from molt.train.controller.workers import LocalWorkers
from molt.train.engine.router import Router
from molt.train.experience import PayloadStore
from molt.train.gateway.app import Gateway
from molt.train.gateway.parse import HermesParser
from molt.train.gateway.sessions import Sessions
from molt.train.observe.journal import Journal
from molt.train.observe.logs import configure_logging
from molt.train.observe.metrics import Metrics
from molt.train.observe.progress import ProgressView
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.pool.tasks import TaskOrder
from molt.train.preflight import Preflight, load_renderer, preflight, require
from molt.train.server import HttpServer, create_app, origin

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 900.0
"""How long one call to the actor ranks may take: loading, an update, a refit, a checkpoint."""


def run_training(config: Config, *, local_workers: bool) -> dict[str, Any]:
    """Train as `config` says, in this process and those it starts; returns a summary of the run.

    A run folder that holds an unfinished run is resumed. Raises ConfigError before anything is started, RunError when
    the run cannot go on.
    """
    checked = preflight(config, local_workers=local_workers)
    token = config.server.token or secrets.token_urlsafe(24)
    folder = _open_folder(config, secret=token)
    started = time.monotonic()
    with _ray(config, folder):
        asyncio.run(_train(config, checked, folder, token=token, local_workers=local_workers))
    return folder.summarise(seconds=time.monotonic() - started)


def run_supervised(config: Config) -> dict[str, Any]:
    """Train on the conversations of `data.path`, and leave the weights in the run folder's `model/`."""
    require(config, "model.path", "data.path", "run.dir")
    conversations = read_conversations(Path(config.data.path))
    renderer = load_renderer(config.model.path)
    payloads = [to_row(conversation, renderer) for conversation in conversations]
    folder = _open_folder(config, secret="")
    with _ray(config, folder):
        return asyncio.run(_train_supervised(config, payloads, folder))


def _open_folder(config: Config, *, secret: str) -> RunFolder:
    folder = RunFolder(Path(config.run.dir))
    folder.path.mkdir(parents=True, exist_ok=True)
    configure_logging(folder.logs / "server.log", secrets=(secret,))
    public = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, token=""))
    folder.config.write_text(to_toml(public))
    return folder


@contextlib.contextmanager
def _ray(config: Config, folder: RunFolder) -> Iterator[None]:
    if not config.cluster.address:
        # A cluster of one's own takes orders from nobody else on the machine. Ray reads the token once a process.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from molt.train.cluster.runtime import ray_runtime

    with ray_runtime(address=config.cluster.address, logs=folder.logs):
        yield


@dataclass(frozen=True)
class _FrontDesk:
    """The light side of a run: what workers and agents talk to."""

    sessions: Sessions
    router: Router
    metrics: Metrics
    pool: Pool
    admission: Admission
    desk: RolloutDesk
    server: HttpServer


async def _train(
    config: Config, checked: Preflight, folder: RunFolder, *, token: str, local_workers: bool
) -> None:
    from molt.train.cluster.payloads import RayPayloadStore

    store, ledger = RayPayloadStore(), Ledger(folder.ledger)
    actor, fleet = _heavy_side(config, store, on_event=ledger.record_event)
    serving: Serving | None = None

    def progress() -> dict[str, Any]:
        return {"policy_version": serving.version if serving else None}

    front = _front_desk(config, checked, ledger, store, token=token, progress=progress)
    serving = Serving(
        fleet,
        front.router,
        actor,
        workers_per_engine=config.engine.tensor_parallel_size,
        on_event=ledger.record_event,
    )
    stall = StallGuard(
        config.run.stall_timeout,
        signature=lambda: (front.router.num_finished, front.desk.num_results),
        report=lambda: f"{front.pool.status()}, {front.router.num_running} generations running",
        any_worker=lambda: front.desk.num_leases > 0,
    )
    environment = {**os.environ, "MOLT_TOKEN": token, "OMP_NUM_THREADS": "1"}
    workers = (
        LocalWorkers(
            config.agent,
            url=front.server.url,
            environment=environment,
            logs=folder.logs,
            on_event=ledger.record_event,
        )
        if local_workers
        else None
    )
    with Journal(folder.metrics) as journal, Journal(folder.evaluations) as evaluations:
        progress_view = ProgressView(config.train.num_updates)
        evaluation = Evaluation(
            front.pool, checked.eval_tasks, num_samples=config.data.eval_samples, journal=evaluations, stall=stall
        )
        loop = TrainingLoop(
            config,
            Parts(
                pool=front.pool,
                actor=actor,
                serving=serving,
                admission=front.admission,
                checkpoints=Checkpoints(folder.checkpoints, keep=config.train.keep_checkpoints),
                journal=journal,
                stall=stall,
                evaluation=evaluation if checked.eval_tasks else None,
                on_update=progress_view.update,
            ),
        )
        try:
            await asyncio.gather(actor.start(), fleet.start())
            await loop.resume()
            evaluations.truncate_after(loop.step)
            async with _serving(front, workers):
                print(msgspec.json.encode({"url": front.server.url}).decode(), flush=True)  # noqa: T201  pinned
                watchers = [serving.supervise(), front.desk.watch_leases()]
                if workers:
                    watchers.append(workers.supervise())
                with progress_view:
                    await _until_first_ends(loop.run(), *watchers)
        finally:
            fleet.kill()
            actor.kill()
            ledger.close()


async def _train_supervised(config: Config, payloads: list[Any], folder: RunFolder) -> dict[str, Any]:
    from molt.train.cluster.payloads import RayPayloadStore

    store = RayPayloadStore()
    actor = _actor(config, store)
    started, losses = time.monotonic(), list[float]()
    with Journal(folder.metrics) as journal:
        try:
            await actor.start()
            async for report in train_supervised(config, payloads, actor=actor, store=store):
                losses.append(report.loss)
                journal.append({"step": report.step, "loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr})
            await actor.export(folder.model)
        finally:
            actor.kill()
    return {
        "num_updates": config.train.num_updates,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "seconds": round(time.monotonic() - started, 1),
        "model": str(folder.model),
    }


def _front_desk(
    config: Config,
    checked: Preflight,
    ledger: Ledger,
    store: PayloadStore,
    *,
    token: str,
    progress: Callable[[], dict[str, Any]],
) -> _FrontDesk:
    sessions, router, metrics = Sessions(), Router(), Metrics()
    experiences_of = experiences_into(store)
    pool = Pool(ledger, settings=config.pool, clock=time.monotonic, experiences_of=experiences_of)
    order = TaskOrder(checked.tasks, seed=config.run.seed, shuffle=config.data.shuffle)
    admission = Admission(config, pool, order)
    gateway = Gateway(
        sessions,
        engine=router,
        renderer=checked.renderer,
        parser=HermesParser(),
        settings=config.gateway,
        model_name=config.model.name,
        max_model_len=config.engine.max_model_len,
        observer=metrics,
    )
    desk = RolloutDesk(
        pool,
        sessions,
        settings=DeskSettings.of(config, origin(checked.sock)),
        experiences_of=experiences_of,
        admit=admission,
        progress=progress,
    )
    server = HttpServer(create_app(desk, gateway.asgi, metrics, token=token), checked.sock)
    return _FrontDesk(sessions, router, metrics, pool, admission, desk, server)


def _heavy_side(
    config: Config, store: PayloadStore, *, on_event: Callable[[str, dict[str, Any]], None]
) -> tuple[Any, Any]:
    from molt.train.cluster.engines import EngineFleet
    from molt.train.cluster.runtime import num_gpus
    from molt.train.engine.vllm import VllmSetup

    def log_event(kind: str, detail: dict[str, Any]) -> None:
        log.info("%s %s", kind, detail)
        on_event(kind, detail)

    setup = VllmSetup(
        model_path=config.model.path, engine=config.engine, seed=config.run.seed, cuda=num_gpus() > 0, version=0
    )
    return _actor(config, store), EngineFleet(setup, on_change=log_event)


def _actor(config: Config, store: PayloadStore) -> Any:
    from molt.train.actor.setup import RankSetup
    from molt.train.cluster.ranks import ActorGroup
    from molt.train.cluster.runtime import num_gpus

    setup = RankSetup(
        rank=0,
        world_size=config.actor.num_ranks,
        model_path=config.model.path,
        actor=config.actor,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        num_steps=config.train.num_updates * config.algorithm.updates_per_window,
        seed=config.run.seed,
        collective_timeout_s=CALL_TIMEOUT_S,
    )
    return ActorGroup(setup, store, gpus_per_rank=1 if num_gpus() else 0, timeout_s=CALL_TIMEOUT_S)


@contextlib.asynccontextmanager
async def _serving(front: _FrontDesk, workers: LocalWorkers | None) -> AsyncIterator[None]:
    """Serve HTTP for the time of the block; then tell the workers that the run is over, and wait for local ones."""
    await front.server.start()
    try:
        yield
    finally:
        if workers:
            workers.ending = True
        front.desk.finish()
        if workers:
            await workers.stop()
        await front.desk.close()
        await front.server.stop()


async def _until_first_ends(main: Coroutine[Any, Any, None], *watchers: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end beside the watchers, which end only by raising; whatever is raised first is raised here."""
    tasks = [asyncio.create_task(main), *(asyncio.create_task(watcher) for watcher in watchers)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
