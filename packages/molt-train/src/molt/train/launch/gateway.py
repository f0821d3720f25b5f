"""`molt-train gateway`: the model endpoint and self-driven sessions alone, without training."""

import asyncio
import contextlib
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from molt.train.config import Config
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.serving import AsLoaded, Serving
from molt.train.engine.fake import ScriptedEngine, read_script
from molt.train.engine.protocol import Engine
from molt.train.engine.router import Router
from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.experience import LocalPayloadStore
from molt.train.launch.environment import open_folder, ray
from molt.train.launch.event_loop import run
from molt.train.launch.parts import make_events, make_fleet, make_front
from molt.train.launch.preflight import Preflight, load_renderer, require
from molt.train.launch.processes import until_first_ends
from molt.train.launch.reply_format import choose_parser
from molt.train.pool.ledger import Ledger
from molt.train.server import bind


@dataclass(frozen=True)
class Script:
    """What the scripted engine is given."""

    lines: Path
    log: Path | None


def run_gateway(config: Config, *, script: Script | None) -> None:
    """Serve until SIGTERM or SIGINT: `model.path` by vLLM, or `script` by the scripted engine.

    Without `run.dir` the recordings are kept for the time of the run only. Raises ConfigError before anything starts.
    """
    with tempfile.TemporaryDirectory(prefix="molt-") as scratch:
        if script is not None and not config.model.path:
            config = _replace(config, "model", path=str(scripted_tokenizer(Path(scratch) / "tokenizer")))
        if not config.run.dir:
            config = _replace(config, "run", dir=scratch)
        require(config, "model.path", "server.token")
        lines = read_script(script.lines) if script else []
        renderer = load_renderer(config.model.path)
        parser = choose_parser(config.model, renderer)
        sock = bind(config.server.host, config.server.port, token=config.server.token)
        checked = Preflight(train_sets=[], eval_sets=[], renderer=renderer, parser=parser, sock=sock)
        folder = open_folder(config, secret=config.server.token)
        if script is None:
            with ray(config, folder):
                run(_serve(config, checked, folder, None))
        else:
            engine = ScriptedEngine(
                lines, config.model.path, max_model_len=config.engine.max_model_len, log_path=script.log
            )
            run(_serve(config, checked, folder, engine))


def _replace(config: Config, section: str, **values: str) -> Config:
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **values)})


async def _serve(config: Config, checked: Preflight, folder: RunFolder, engine: Engine | None) -> None:
    with contextlib.closing(Ledger(folder.ledger, config.pool)) as ledger, contextlib.ExitStack() as resources:
        served, serving = (engine, None) if engine else await _vllm(config, ledger, resources)
        front = make_front(
            config,
            checked,
            ledger=ledger,
            store=LocalPayloadStore(),
            engine=served,
            token=config.server.token,
            progress=dict[str, object],
        )
        await front.serve()
        try:
            watchers = [serving.supervise()] if serving else []
            await until_first_ends(_stop_signal(), front.desk.watch(), *watchers)
        finally:
            await front.stop()


async def _vllm(config: Config, ledger: Ledger, resources: contextlib.ExitStack) -> tuple[Router, Serving]:
    """Engines that are up, and end with `resources`."""
    on_event, router = make_events(ledger), Router()
    fleet = make_fleet(config, on_event=on_event)
    resources.callback(fleet.kill)
    workers = config.engine.tensor_parallel_size
    serving = Serving(fleet, router, AsLoaded(0), workers_per_engine=workers, on_event=on_event)
    await fleet.start()
    await serving.open(0, send=False)
    return router, serving


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    await stopped.wait()
