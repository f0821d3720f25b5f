"""`molt-train server` and `molt-train run`."""

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from molt.train.config import Config
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.evaluation import Evaluation
from molt.train.controller.learning import Learning
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.serving import Serving
from molt.train.controller.stall import StallGuard
from molt.train.controller.training import Parts, TrainingLoop
from molt.train.controller.workers import LocalWorkers
from molt.train.engine.router import Router
from molt.train.errors import RunError
from molt.train.launch.environment import make_folder, open_folder, ray, worker_environment
from molt.train.launch.event_loop import run
from molt.train.launch.memory import MemoryReport
from molt.train.launch.parts import Front, make_actor, make_events, make_fleet, make_front
from molt.train.launch.preflight import Preflight, preflight
from molt.train.observe.journal import Journal
from molt.train.observe.progress import ProgressView
from molt.train.observe.updates import UpdateMetrics
from molt.train.pool.ledger import Ledger
from molt.train.window import plan_of

log = logging.getLogger(__name__)


def run_training(config: Config, *, local_workers: bool) -> dict[str, Any]:
    """Train as `config` says, in this process and those it starts; returns a summary of the run.

    A run folder that holds an unfinished run is resumed. Raises ConfigError before anything is started, RunError when
    the run cannot go on.
    """
    checked = preflight(config, local_workers=local_workers)
    token = config.server.token or secrets.token_hex(24)
    started = time.monotonic()
    # The ledger first: it knows whether another process is at work in the folder.
    with contextlib.closing(Ledger(make_folder(config).ledger)) as ledger:
        folder = open_folder(config, secret=token)
        with ray(config, folder):
            run(_train(config, checked, folder, ledger, token=token, local_workers=local_workers))
    return folder.summarise(seconds=time.monotonic() - started)


async def _train(
    config: Config, checked: Preflight, folder: RunFolder, ledger: Ledger, *, token: str, local_workers: bool
) -> None:
    from molt.train.cluster.payloads import RayPayloadStore

    store, router, on_event = RayPayloadStore(), Router(), make_events(ledger)
    with contextlib.ExitStack() as resources:
        journal = resources.enter_context(Journal(folder.metrics))
        evaluations = resources.enter_context(Journal(folder.evaluations))
        actor, fleet = make_actor(config, store), make_fleet(config, on_event=on_event)
        resources.callback(actor.kill)
        resources.callback(fleet.kill)
        serving = Serving(
            fleet,
            router,
            actor,
            workers_per_engine=config.engine.tensor_parallel_size,
            on_event=on_event,
        )
        front = make_front(
            config,
            checked,
            ledger=ledger,
            store=store,
            engine=router,
            token=token,
            progress=lambda: {
                "policy_version": serving.version,
                "num_updates": config.train.num_updates,
                "prefix_hit_rate": round(router.prefix_hit_rate, 4),
            },
        )
        stall = _stall_guard(config, front, router)
        view = ProgressView(config.train.num_updates)
        evaluation = Evaluation(
            front.pool, checked.eval_tasks, num_samples=config.eval.samples, journal=evaluations, stall=stall
        )
        log.info("starting %d engines and %d actor ranks", config.engine.num_engines, config.actor.num_ranks)
        shapes, _ = await asyncio.gather(actor.start(), fleet.start())
        loop = TrainingLoop(
            config,
            Parts(
                pool=front.pool,
                actor=actor,
                learning=Learning(config, actor, plan_of(config, hidden_size=shapes["policy"].hidden_size)),
                serving=serving,
                admission=front.admission,
                checkpoints=Checkpoints(folder.checkpoints, keep=config.train.keep_checkpoints),
                journal=journal,
                stall=stall,
                evaluation=evaluation if checked.eval_tasks else None,
                memory=MemoryReport(config, shapes, actor),
                on_update=(view.update, UpdateMetrics(front.metrics).update),
            ),
        )
        await loop.resume()
        evaluations.truncate_after(loop.step)
        workers = _local_workers(config, front, folder, on_event, token=token) if local_workers else None
        async with _serving(front, workers):
            watchers = [serving.supervise(), front.desk.watch_leases(), _stop_when_told()]
            if workers:
                watchers.append(workers.supervise())
            with view:
                await _until_first_ends(loop.run(), *watchers)


def _stall_guard(config: Config, front: Front, router: Router) -> StallGuard:
    return StallGuard(
        config.run.stall_timeout,
        signature=lambda: (router.num_finished, front.desk.num_results),
        report=lambda: f"{front.pool.status()}, {router.num_running} generations running",
        any_worker=lambda: front.desk.num_leases > 0,
    )


def _local_workers(
    config: Config, front: Front, folder: RunFolder, on_event: Callable[[str, dict[str, Any]], None], *, token: str
) -> LocalWorkers:
    return LocalWorkers(
        config.agent,
        url=front.server.url,
        environment=worker_environment(token),
        logs=folder.logs,
        on_event=on_event,
    )


@contextlib.asynccontextmanager
async def _serving(front: Front, workers: LocalWorkers | None) -> AsyncIterator[None]:
    """Serve HTTP for the time of the block; then tell the workers that the run is over, and wait for local ones."""
    await front.serve()
    try:
        yield
    finally:
        if workers:
            workers.ending = True
        front.desk.finish()
        if workers:
            await workers.stop()
        await front.stop()


async def _stop_when_told() -> None:
    """Raises RunError on SIGTERM or SIGINT; what is on disk then is enough to go on from."""
    told = asyncio.get_running_loop().create_future()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, lambda s=signum: told.done() or told.set_result(s.name))
    raise RunError(f"stopped by {await told}; the same command goes on from the last checkpoint")


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
