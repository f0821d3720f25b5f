"""`molt-train sft`."""

import logging
import shutil
import time
from pathlib import Path
from typing import Any

from molt.train.config import Config, DataConfig, check
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.supervised import read_conversations, to_rows, train_supervised
from molt.train.errors import ConfigError
from molt.train.launch.environment import open_folder, ray
from molt.train.launch.event_loop import run
from molt.train.launch.parts import make_actor
from molt.train.launch.preflight import load_renderer, require
from molt.train.observe.journal import Journal
from molt.train.records.experience import Payload

LOG_EVERY = 100
_OF_TASKS = ("sets", "epochs", "shuffle")
"""Keys of `[data]` that say in which order tasks are rolled out."""

log = logging.getLogger(__name__)


def run_supervised(config: Config) -> dict[str, Any]:
    """Train on the conversations of `data.path`, and leave the weights in the run folder's `model/`.

    Raises ConfigError before anything is started, RunError when the run cannot go on.
    """
    check(config)
    _check_data(config.data)
    require(config, "model.path", "data.path", "run.dir")
    conversations = read_conversations(Path(config.data.path))
    rows = to_rows(conversations, load_renderer(config.model.path), path=config.data.path)
    folder = open_folder(config, secret="")
    with ray(config, folder):
        return run(_train(config, rows, folder))


def _check_data(data: DataConfig) -> None:
    for name in _OF_TASKS:
        if getattr(data, name) != getattr(DataConfig(), name):
            raise ConfigError(
                f"data.{name} has no effect on molt-train sft, which makes train.num_updates updates of the "
                "conversations in data.path, in an order drawn from run.seed: leave it out"
            )


async def _train(config: Config, rows: list[Payload], folder: RunFolder) -> dict[str, Any]:
    from molt.train.cluster.payloads import RayPayloadStore

    store = RayPayloadStore()
    actor = make_actor(config, store, supervised=True)
    started, losses = time.monotonic(), list[float]()
    try:
        await actor.start()
        with Journal(folder.metrics) as journal:
            async for report in train_supervised(config, rows, actor=actor, store=store):
                losses.append(report.loss)
                row = {"step": report.step, "loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr}
                journal.append(row)
                if report.step % LOG_EVERY == 0:
                    log.info("supervised step %d of %d: loss %.3f", report.step, config.train.num_updates, report.loss)
        partial = folder.model.with_suffix(".partial")
        await actor.export(partial)
        shutil.rmtree(folder.model, ignore_errors=True)
        partial.rename(folder.model)  # whole or absent
    finally:
        actor.kill()
    return {
        "num_updates": config.train.num_updates,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "seconds": round(time.monotonic() - started, 1),
        "model": str(folder.model),
    }
