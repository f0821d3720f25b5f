"""`molt-train regrade`: grade what a run recorded with a grader of today."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from molt.agents.errors import MoltAgentError
from molt.agents.load import load_runner
from molt.agents.rollout import close_runner, grade_again
from molt.agents.runner import AgentRunner, no_grader
from molt.train.config import Config, load_config
from molt.train.controller.regrade import RegradeReport, Regrading, free_name
from molt.train.controller.run_folder import RunFolder
from molt.train.errors import ConfigError
from molt.train.gateway.reply_text import reply_text
from molt.train.launch.preflight import load_renderer
from molt.train.launch.reply_format import choose_parser
from molt.train.pool.ledger import Ledger
from molt.train.records.rollout import Outcome
from molt.train.records.turn import Turn

log = logging.getLogger(__name__)


def run_regrade(run_dir: Path, *, agent: str, name: str | None) -> RegradeReport:
    """Grade the finished rollouts of `run_dir` with the `grade` of `agent`, which is loaded into this process.

    The outcomes go into the run's ledger under `name` (regrade-1, ... by default), all of them or none; the recorded
    ones stay. Raises ConfigError for a run that is still going on, a name that is taken, or an agent that cannot grade.
    """
    folder = RunFolder(run_dir)
    if not folder.config.is_file() or not folder.ledger.is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run: there is no config.toml or no ledger.db in it")
    config = load_config(folder.config, [], Config)
    runner = _load(agent)
    with contextlib.closing(Ledger(folder.ledger, config.pool)) as ledger:
        names = ledger.grade_names()
        if name in names:
            raise ConfigError(f"--name is {name!r}, under which the ledger has grades already: give another name")
        name = name or free_name(names)
        regrading = Regrading(
            partial(grade_again, runner, worker_id="regrade"),
            config,
            reply_text=_reader_of_replies(config),
        )
        grades = asyncio.run(_grade(regrading, runner, ledger))
        with ledger.transaction():
            for rollout_id, outcome in grades.items():
                ledger.add_grade(name, rollout_id, outcome)
            report = regrading.report(name)
            ledger.record_event("regraded", {"name": name, "agent": agent, "num_rollouts": report.rollouts})
    return report


async def _grade(regrading: Regrading, runner: AgentRunner, ledger: Ledger) -> dict[str, Outcome]:
    try:
        return await regrading.run(ledger)
    finally:
        await close_runner(runner)


def _reader_of_replies(config: Config) -> Callable[[Turn], str] | None:
    try:
        renderer = load_renderer(config.model.path)
        return partial(reply_text, renderer=renderer, parser=choose_parser(config.model, renderer))
    except ConfigError as error:
        log.warning("rollouts without a recorded answer are skipped, since their replies cannot be read: %s", error)
        return None


def _load(agent: str) -> AgentRunner:
    try:
        runner = load_runner(agent)
    except MoltAgentError as error:
        raise ConfigError(f"--agent: {error}") from None
    if not runner.grades:
        raise ConfigError(f"--agent: {no_grader(runner)}")
    return runner
