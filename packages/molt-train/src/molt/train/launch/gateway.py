"""`molt-train gateway`: the model endpoint and self-driven sessions alone, without training."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from molt.train.config import Config
from molt.train.controller.run_folder import RunFolder
from molt.train.engine.fake import ScriptedEngine, read_script
from molt.train.engine.protocol import Engine
from molt.train.engine.router import Router
from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.experience import LocalPayloadStore
from molt.train.launch.environment import open_folder, ray
from molt.train.launch.event_loop import run
from molt.train.launch.parts import make_events, make_fleet, make_front
from molt.train.launch.preflight import Preflight, load_renderer, require
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
        checked = Preflight(tasks=[], eval_tasks=[], renderer=renderer, parser=parser, sock=sock)
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
    with contextlib.closing(Ledger(folder.ledger)) as ledger:
        async with _vllm(config, ledger) if engine is None else contextlib.nullcontext(engine) as served:
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
            await _stop_signal()
            await front.stop()


@contextlib.asynccontextmanager
async def _vllm(config: Config, ledger: Ledger) -> AsyncIterator[Router]:
    fleet, router = make_fleet(config, on_event=make_events(ledger)), Router()
    try:
        await fleet.start()
        for index, engine in enumerate(fleet.engines):
            router.admit(index, engine)
        yield router
    finally:
        fleet.kill()


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    await stopped.wait()
