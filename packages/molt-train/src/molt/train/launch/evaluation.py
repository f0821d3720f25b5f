"""`molt-train eval`: evaluate a model, or a checkpoint of a run, once."""

import contextlib
import re
import secrets
from pathlib import Path
from typing import Any

import msgspec

from molt.train.config import Config, ServerConfig, check
from molt.train.controller.evaluation import Evaluation
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.serving import AsLoaded, Serving
from molt.train.engine.router import Router
from molt.train.errors import ConfigError
from molt.train.experience import LocalPayloadStore
from molt.train.launch.environment import make_folder, open_folder, ray
from molt.train.launch.event_loop import run
from molt.train.launch.new_folder import new_folder
from molt.train.launch.parts import make_events, make_fleet, make_front
from molt.train.launch.preflight import Preflight, check_agent, load_renderer, require
from molt.train.launch.processes import local_workers_of, serving_http, stop_when_told, until_first_ends
from molt.train.launch.reply_format import choose_parser
from molt.train.launch.stall import make_stall_guard
from molt.train.observe.journal import Journal
from molt.train.observe.waits import Waits
from molt.train.pool.ledger import Ledger
from molt.train.pool.tasks import load_datasets
from molt.train.server import bind

NAMED = ("best", "latest")
MODEL = "model"
"""Of a checkpoint, the Hugging Face folder."""


def run_evaluation(config: Config, *, checkpoint: str | None, out: Path | None) -> dict[str, Any]:
    """Roll out the held-out rows on `model.path`, or on a checkpoint, with local workers; returns the row.

    Args:
        config: Of the run, or any that says what is evaluated, by which agent, and how.
        checkpoint: A checkpoint's folder, or `best` or `latest` of those in `run.dir`; None: `model.path`.
        out: The evaluation's own run folder; by default a new one beside `run.dir`, which is left as it is.

    Raises:
        ConfigError: Before anything is started.
        RunError: It cannot be brought to an end.
    """
    step, config = _with_weights(config, checkpoint)
    run_dir = Path(config.run.dir) if config.run.dir else None
    target = new_folder(out, run_dir=run_dir, name="eval")
    # Its own server, for its own workers: the run's may be in use.
    config = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, dir=str(target)), server=ServerConfig()
    )
    checked, token = _preflight(config), secrets.token_hex(24)
    with contextlib.closing(Ledger(make_folder(config).ledger, config.pool)) as ledger:
        own = open_folder(config, secret=token)
        with ray(config, own):
            return run(_evaluate(config, checked, own, ledger, token=token, step=step))


def _with_weights(config: Config, checkpoint: str | None) -> tuple[int, Config]:
    """The update whose policy is evaluated, and the configuration with its weights as the model."""
    if checkpoint is None:
        return 0, config
    folder = Path(checkpoint)
    if checkpoint in NAMED:
        require(config, "run.dir")
        folder = _named(RunFolder(Path(config.run.dir)).checkpoints, checkpoint)
    if not (folder / MODEL).is_dir():
        raise ConfigError(f"--checkpoint is {checkpoint!r}, but {str(folder / MODEL)!r} is no folder of weights")
    folder = folder.resolve()  # `best` moves on; what is evaluated does not
    match = re.fullmatch(r"step-(\d+)", folder.name)
    model = msgspec.structs.replace(config.model, path=str(folder / MODEL))
    return int(match[1]) if match else 0, msgspec.structs.replace(config, model=model)


def _named(checkpoints: Path, name: str) -> Path:
    if name == "latest":
        found = sorted(checkpoints.glob("step-*[0-9]"), key=lambda folder: int(folder.name.removeprefix("step-")))
        if found:
            return found[-1]
    elif (checkpoints / name).is_dir():
        return checkpoints / name
    fix = "set eval.keep_best in the run's configuration" if name == "best" else "give another run.dir"
    raise ConfigError(f"--checkpoint is {name!r}, but there is none in {str(checkpoints)!r}: {fix}")


def _preflight(config: Config) -> Preflight:
    check(config)
    require(config, "model.path", "agent.path", *(() if config.eval.sets else ("eval.path",)))
    if not config.agent.num_workers:
        raise ConfigError(
            "agent.num_workers is 0, but an evaluation is rolled out by local workers: set it to 1 or more"
        )
    sets = load_datasets(config.eval.path, config.eval.sets)
    renderer = load_renderer(config.model.path)
    parser = choose_parser(config.model, renderer)
    check_agent(config.agent.path)
    sock = bind(config.server.host, config.server.port, token="")
    return Preflight(train_sets=[], eval_sets=sets, renderer=renderer, parser=parser, sock=sock)


async def _evaluate(
    config: Config, checked: Preflight, folder: RunFolder, ledger: Ledger, *, token: str, step: int
) -> dict[str, Any]:
    router, on_event = Router(), make_events(ledger)
    with contextlib.ExitStack() as resources:
        journal = resources.enter_context(Journal(folder.evaluations))
        # No ranks that the engines would leave GPUs to.
        alone = msgspec.structs.replace(config, actor=msgspec.structs.replace(config.actor, num_ranks=0))
        fleet = make_fleet(alone, on_event=on_event, version=step)
        resources.callback(fleet.kill)
        serving = Serving(
            fleet, router, AsLoaded(step), workers_per_engine=config.engine.tensor_parallel_size, on_event=on_event
        )
        front = make_front(
            config,
            checked,
            ledger=ledger,
            store=LocalPayloadStore(),  # nothing is trained
            engine=router,
            token=token,
            progress=lambda: {"policy_version": step, "evaluates": config.model.path},
        )
        stall = make_stall_guard(
            config, folder, front, serving=serving, router=router, waits=Waits(), on_event=on_event
        )
        evaluation = Evaluation(
            front.pool,
            checked.eval_tasks,
            settings=config.eval,
            journal=journal,
            stall=stall,
        )
        await fleet.start()
        await serving.open(step, send=False)
        workers = local_workers_of(config, front, folder, on_event, token=token)
        rows: list[dict[str, Any]] = []

        async def evaluate() -> None:
            rows.append(await evaluation(step=step, policy_version=step))

        async with serving_http(front, workers, announced=False):
            watchers = [serving.supervise(), front.desk.watch(), stop_when_told(), workers.supervise()]
            await until_first_ends(evaluate(), *watchers)
        return {**rows[0], "model": config.model.path, "folder": str(folder.path)}
