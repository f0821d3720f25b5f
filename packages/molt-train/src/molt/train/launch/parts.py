"""The parts that several commands put together alike."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from molt.train.config import AlgorithmConfig, Config
from molt.train.controller.admission import Admission
from molt.train.controller.desk import DeskSettings, RolloutDesk
from molt.train.controller.results import experiences_into
from molt.train.controller.run_folder import RunFolder
from molt.train.engine.protocol import Engine
from molt.train.errors import LedgerFullError
from molt.train.gateway.app import Gateway
from molt.train.gateway.sessions import Sessions
from molt.train.gateway.trace import TraceLog
from molt.train.launch.preflight import Preflight
from molt.train.observe.metrics import Metrics
from molt.train.observe.waits import Waits
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.experience import PayloadStore
from molt.train.server import HttpServer, create_app, origin

if TYPE_CHECKING:
    from molt.train.cluster.engines import EngineFleet
    from molt.train.cluster.ranks import ActorGroup

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 900.0
"""How long one call to the actor ranks may take: loading, an update, a refit, a checkpoint."""


@dataclass(frozen=True)
class Front:
    """The light side of a run: what workers and agents talk to."""

    pool: Pool
    admission: Admission
    desk: RolloutDesk
    server: HttpServer
    metrics: Metrics
    traces: TraceLog

    async def serve(self) -> None:
        """Begin to serve, and say where on stdout, for scripts that wait for it."""
        await self.server.start()
        print(msgspec.json.encode({"url": self.server.url}).decode(), flush=True)  # noqa: T201

    async def stop(self) -> None:
        """Let the workers know, close every session, keeping what it recorded, and the server."""
        await self.desk.dismiss()
        await self.desk.close()
        await self.server.stop()
        self.traces.close()


def make_front(
    config: Config,
    checked: Preflight,
    *,
    ledger: Ledger,
    store: PayloadStore,
    engine: Engine,
    token: str,
    progress: Callable[[], Mapping[str, Any]],
) -> Front:
    """Pool, gateway, control API and the HTTP server in front of them."""
    folder = RunFolder(Path(config.run.dir)).traces
    folder.mkdir(exist_ok=True)
    traces = TraceLog(folder)
    sessions, metrics = Sessions(traces), Metrics()
    experiences_of = experiences_into(store)
    pool = Pool(ledger, settings=config.pool, clock=time.monotonic, experiences_of=experiences_of)
    admission = Admission(config, pool, checked.train_sets)
    gateway = Gateway(
        sessions,
        engine=engine,
        renderer=checked.renderer,
        parser=checked.parser,
        settings=config.gateway,
        model_name=config.model.name,
        max_model_len=config.engine.max_model_len,
        observer=metrics,
    )
    url = config.server.public_url.rstrip("/") or origin(checked.sock)
    desk = RolloutDesk(
        pool,
        sessions,
        settings=DeskSettings.of(config, url),
        experiences_of=experiences_of,
        admit=admission,
        progress=progress,
    )
    if num_rescued := desk.rescue(folder):
        log.warning("the last server died with %d sessions open: what they had recorded is in the ledger", num_rescued)
    server = HttpServer(create_app(desk, gateway.asgi, metrics, token=token), checked.sock, config.gateway)
    metrics.gauge("open_groups", "Train groups that workers are still to finish").set_function(lambda: pool.num_open)
    metrics.gauge("ready_groups", "Complete train groups that wait to be taken").set_function(lambda: pool.num_ready)
    metrics.gauge("leases_granted", "Leases since the server started").set_function(lambda: desk.num_leases)
    metrics.gauge("results_taken", "Results since the server started").set_function(lambda: desk.num_results)
    return Front(pool, admission, desk, server, metrics, traces)


def make_actor(
    config: Config,
    store: PayloadStore,
    *,
    supervised: bool = False,
    waits: Waits | None = None,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
) -> "ActorGroup":
    """The ranks that are trained; not started yet. The `supervised` step needs none of the algorithm's other models.

    `waits` and `on_event` are told what they are asked, and when they die and are replaced. Raises ConfigError when the
    cluster has not what they need.
    """
    from molt.train.actor.memory_plan import check_offload
    from molt.train.actor.setup import RankSetup
    from molt.train.cluster.placement import place
    from molt.train.cluster.ranks import ActorGroup
    from molt.train.cluster.runtime import num_gpus

    check_offload(config.actor, has_cuda=num_gpus() > 0)
    setup = RankSetup(
        rank=0,
        world_size=config.actor.num_ranks,
        model_path=config.model.path,
        actor=config.actor,
        algorithm=AlgorithmConfig() if supervised else config.algorithm,
        critic=config.critic,
        temperature=config.rollout.temperature,
        num_steps=config.train.num_updates * (1 if supervised else config.algorithm.updates_per_window),
        seed=config.run.seed,
        collective_timeout_s=CALL_TIMEOUT_S,
        verify_refit=config.engine.verify_refit,
        stacks=_stacks(config),
    )
    return ActorGroup(
        setup,
        store,
        placement=place(config, num_gpus=num_gpus()),
        timeout_s=CALL_TIMEOUT_S,
        waits=waits,
        on_change=on_event,
    )


def _stacks(config: Config) -> str:
    """Absolute, since Ray's processes have folders of their own; empty for a command without a run folder."""
    return str(RunFolder(Path(config.run.dir)).stacks.absolute()) if config.run.dir else ""


def make_events(ledger: Ledger) -> Callable[[str, dict[str, Any]], None]:
    """Where deaths, restarts and failed refits are told: each is a line of the log and a row of the ledger."""

    def on_event(kind: str, detail: dict[str, Any]) -> None:
        log.info("%s %s", kind, detail)
        try:
            ledger.record_event(kind, detail)
        except LedgerFullError as error:
            log.warning("%s is in this log only: %s", kind, error)

    return on_event


def make_fleet(
    config: Config,
    *,
    on_event: Callable[[str, dict[str, Any]], None],
    version: int = 0,
    waits: Waits | None = None,
) -> "EngineFleet":
    """The engines; not started yet. `version` is that of the weights in `model.path`."""
    from molt.train.cluster.engines import EngineFleet
    from molt.train.cluster.placement import place
    from molt.train.cluster.runtime import num_gpus
    from molt.train.engine.vllm import VllmSetup

    placement = place(config, num_gpus=num_gpus())
    setup = VllmSetup(
        model_path=config.model.path,
        engine=config.engine,
        seed=config.run.seed,
        gpus=placement.gpus_per_engine,
        transfer=placement.transfer,
        version=version,
        stacks=_stacks(config),
    )
    return EngineFleet(setup, on_change=on_event, waits=waits)
