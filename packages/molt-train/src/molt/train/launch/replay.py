"""`molt-train replay`: train again from a recorded run."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from molt.train.config import Config, check, load_config
from molt.train.config.check_replay import check_replay
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.learning import Learning
from molt.train.controller.replay import RecordedWindows, Replay
from molt.train.controller.results import experiences_into
from molt.train.controller.run_folder import RunFolder
from molt.train.errors import ConfigError
from molt.train.launch.environment import open_folder, ray
from molt.train.launch.event_loop import run
from molt.train.launch.new_folder import new_folder
from molt.train.launch.parts import make_actor
from molt.train.launch.preflight import load_renderer, require
from molt.train.launch.same_tokens import check_same_tokens
from molt.train.observe.journal import Journal, read_journal
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import WindowRow
from molt.train.records.rollout import Outcome
from molt.train.trajectory import TrainingRules
from molt.train.window import plan_of


def run_replay(run_dir: Path, overrides: Sequence[str], *, out: Path | None, grades: str | None) -> dict[str, Any]:
    """Train on the recorded windows of `run_dir` from its first weights; returns a summary.

    The run's folder is only read, and may belong to a run that goes on. Journal, checkpoints and configuration go to
    `out`, by default a new folder beside it. With `grades` the outcomes of that regrading stand for the recorded ones.
    Raises ConfigError before anything is started, RunError when an update cannot be made.
    """
    source = RunFolder(run_dir)
    if not source.config.is_file() or not source.ledger.is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run: there is no config.toml or no ledger.db in it")
    check_replay(overrides)
    recorded_config = load_config(source.config, [], Config)
    config = load_config(source.config, overrides, Config)
    check(config)
    require(config, "model.path")
    with contextlib.closing(LedgerReader.open(source.ledger)) as reader:
        windows = _windows(reader, run_dir, num_updates=config.train.num_updates)
        outcomes = _grades(reader, grades, run_dir)
        load_renderer(config.model.path)  # a model that is not there is said in one line
        check_same_tokens(config)
        rules, recorded_rules = TrainingRules.of(config), TrainingRules.of(recorded_config)
        target = new_folder(out, run_dir=run_dir, name="replay")
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(target)))
        started, folder = time.monotonic(), open_folder(config, secret="")
        (target / "replay.json").write_bytes(
            msgspec.json.encode({"run": str(run_dir.resolve()), "grades": grades, "overrides": list(overrides)})
        )
        with ray(config, folder):
            changed_rules = None if rules == recorded_rules else rules
            run(_replay(config, reader, folder, windows, outcomes=outcomes, rules=changed_rules))
    rows = read_journal(folder.metrics)
    return {
        "num_updates": len(rows),
        "loss_last": rows[-1]["loss"],
        "grades": grades,
        "seconds": round(time.monotonic() - started, 1),
        "folder": str(target),
    }


def _windows(reader: LedgerReader, run_dir: Path, *, num_updates: int) -> list[WindowRow]:
    windows = reader.windows()[:num_updates]
    if not windows:
        raise ConfigError(f"{str(run_dir)!r} has no recorded windows: the run has not made its first update")
    return windows


def _grades(reader: LedgerReader, name: str | None, run_dir: Path) -> dict[str, Outcome]:
    if name is None:
        return {}
    known = reader.grade_names()
    if name not in known:
        has = f"it has {', '.join(known)}" if known else "it has none: make them with `molt-train regrade`"
        raise ConfigError(f"--grades is {name!r}, but the ledger of {str(run_dir)!r} has no such grades; {has}")
    return reader.grades(name)


async def _replay(
    config: Config,
    reader: LedgerReader,
    folder: RunFolder,
    windows: Sequence[WindowRow],
    *,
    outcomes: dict[str, Outcome],
    rules: TrainingRules | None,
) -> None:
    from molt.train.cluster.payloads import RayPayloadStore

    store = RayPayloadStore()
    # No engines that the ranks would leave GPUs to.
    alone = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, num_engines=0))
    actor = make_actor(alone, store)
    try:
        shapes = await actor.start()
        recorded = RecordedWindows(reader, experiences_of=experiences_into(store), grades=outcomes, rules=rules)
        with Journal(folder.metrics) as journal:
            replay = Replay(
                config,
                recorded,
                actor=actor,
                learning=Learning(config, actor, plan_of(config, hidden_size=shapes["policy"].hidden_size)),
                checkpoints=Checkpoints(folder.checkpoints, keep=config.train.keep_checkpoints),
                journal=journal,
            )
            await replay.run(windows)
    finally:
        actor.kill()
