"""`molt-train server` and `molt-train run`."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from molt.train.actor.memory_plan import ModelShape, Role
from molt.train.config import Config
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.collect import Collector
from molt.train.controller.evaluation import Evaluation
from molt.train.controller.learning import Learning
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.server_file import server_file
from molt.train.controller.serving import Serving
from molt.train.controller.training import Parts, TrainingLoop
from molt.train.engine.router import Router
from molt.train.errors import RunStoppedError
from molt.train.launch.environment import make_folder, open_folder, ray
from molt.train.launch.event_loop import run
from molt.train.launch.memory import MemoryReport
from molt.train.launch.parts import make_actor, make_events, make_fleet, make_front
from molt.train.launch.preflight import Preflight, preflight
from molt.train.launch.processes import local_workers_of, serving_http, stop_when_told, unless_told, until_first_ends
from molt.train.launch.stall import make_stall_guard
from molt.train.observe.journal import Journal
from molt.train.observe.progress import ProgressView
from molt.train.observe.stacks import forget
from molt.train.observe.updates import UpdateMetrics
from molt.train.observe.waits import Waits
from molt.train.pool.ledger import Ledger
from molt.train.window import plan_of

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")


def run_training(config: Config, *, local_workers: bool) -> dict[str, Any]:
    """Train as `config` says, in this process and those it starts; returns a summary of the run.

    A run folder that holds an unfinished run is resumed. Raises ConfigError before anything is started, RunError when
    the run cannot go on.
    """
    checked = preflight(config, local_workers=local_workers)
    token = config.server.token or secrets.token_hex(24)
    started = time.monotonic()
    # The ledger first: it knows whether another process is at work in the folder.
    with contextlib.closing(Ledger(make_folder(config).ledger, config.pool)) as ledger:
        folder = open_folder(config, secret=token)
        on_event = make_events(ledger)
        with server_file(folder.server) as serve_at, _told(on_event), ray(config, folder):
            try:
                run(_Run(config, checked, folder, ledger, token=token).train(serve_at, local_workers=local_workers))
            finally:
                forget(folder.stacks)
    return folder.summarise(seconds=time.monotonic() - started)


@contextlib.contextmanager
def _told(on_event: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
    """Tell of the run's start and end, so that `molt-train status` can tell an end from a death."""
    on_event("run_started", {"pid": os.getpid(), "host": socket.gethostname()})
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, RunStoppedError | KeyboardInterrupt)
        on_event("run_ended", {"state": "stopped" if stopped else "failed", "reason": str(error) or repr(error)})
        raise
    on_event("run_ended", {"state": "finished", "reason": ""})


class _Run:
    """The parts of a run, and how they are brought to work."""

    def __init__(self, config: Config, checked: Preflight, folder: RunFolder, ledger: Ledger, *, token: str):
        from molt.train.cluster.payloads import RayPayloadStore

        self._config, self._checked, self._folder, self._token = config, checked, folder, token
        self._waits, self._on_event = Waits(), make_events(ledger)
        store, router = RayPayloadStore(), Router()
        self._actor = make_actor(config, store, waits=self._waits, on_event=self._on_event)
        self._fleet = make_fleet(config, on_event=self._on_event, waits=self._waits)
        self._serving = serving = Serving(
            self._fleet,
            router,
            self._actor,
            workers_per_engine=config.engine.tensor_parallel_size,
            on_event=self._on_event,
        )
        self._front = make_front(
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
                "engines": router.loads,
                "waits": [str(wait) for wait in self._waits.now()],
            },
        )
        self._stall = make_stall_guard(
            config,
            folder,
            self._front,
            serving=serving,
            router=router,
            waits=self._waits,
            on_event=self._on_event,
        )

    async def train(self, serve_at: Callable[[str], None], *, local_workers: bool) -> None:
        """Start everything, train to the end, and end everything. `serve_at` is told where it serves."""
        config, folder, front = self._config, self._folder, self._front
        with contextlib.ExitStack() as resources:
            journal = resources.enter_context(Journal(folder.metrics))
            evaluations = resources.enter_context(Journal(folder.evaluations))
            resources.callback(self._actor.kill)
            resources.callback(self._fleet.kill)
            log.info("starting %d engines and %d actor ranks", config.engine.num_engines, config.actor.num_ranks)
            with self._waits.on("engines and actor ranks to start"):
                shapes, _ = await unless_told(_both(self._actor.start(), self._fleet.start()))
            view = resources.enter_context(ProgressView(config.train.num_updates))
            loop = self._loop(shapes, journal, evaluations, view)
            await unless_told(loop.resume())
            evaluations.truncate_after(loop.step)
            arguments = config, front, folder, self._on_event
            workers = local_workers_of(*arguments, token=self._token) if local_workers else None
            async with serving_http(front, workers):
                serve_at(front.server.url)
                watchers = [self._serving.supervise(), loop.watch_actor(), front.desk.watch(), stop_when_told()]
                if workers:
                    watchers.append(workers.supervise())
                await until_first_ends(loop.run(), *watchers)

    def _loop(
        self, shapes: dict[Role, ModelShape], journal: Journal, evaluations: Journal, view: ProgressView
    ) -> TrainingLoop:
        config, pool, admission = self._config, self._front.pool, self._front.admission
        learning = Learning(config, self._actor, plan_of(config, hidden_size=shapes["policy"].hidden_size))
        tasks = self._checked.eval_tasks
        evaluation = Evaluation(pool, tasks, settings=config.eval, journal=evaluations, stall=self._stall)
        return TrainingLoop(
            config,
            Parts(
                pool=pool,
                actor=self._actor,
                learning=learning,
                serving=self._serving,
                admission=admission,
                collector=Collector(config, pool, admission, learning, self._stall),
                checkpoints=Checkpoints(self._folder.checkpoints, keep=config.train.keep_checkpoints),
                journal=journal,
                stall=self._stall,
                evaluation=evaluation if tasks else None,
                memory=MemoryReport(config, shapes, self._actor),
                on_update=(view.update, UpdateMetrics(self._front.metrics).update),
                waits=self._waits,
            ),
        )


async def _both(first: Awaitable[S], second: Awaitable[T]) -> tuple[S, T]:
    return await asyncio.gather(first, second)
