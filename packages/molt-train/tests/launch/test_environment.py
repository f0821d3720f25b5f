"""The run folder is opened without secrets, and the first of a run's coroutines to end, ends them all."""

import asyncio
import logging

import pytest

from molt.train.config import Config, RunConfig, ServerConfig, load_config
from molt.train.errors import RunError
from molt.train.launch.environment import open_folder, worker_environment
from molt.train.launch.processes import until_first_ends


@pytest.fixture(autouse=True)
def quiet_logging():
    """Leave the process's logging as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_resolved_configuration_is_in_the_folder_and_the_token_is_nowhere(tmp_path):
    config = Config(run=RunConfig(dir=str(tmp_path / "run"), seed=3), server=ServerConfig(token="worker-secret"))
    folder = open_folder(config, secret="worker-secret")
    logging.getLogger("molt.test").warning("told: worker-secret")
    kept = load_config(folder.config, [], Config)
    assert kept.run == config.run
    assert kept.server.token == ""
    files = [file for file in folder.path.rglob("*") if file.is_file()]
    assert folder.logs / "server.log" in files
    assert all(b"worker-secret" not in file.read_bytes() for file in files)


def test_workers_get_their_token_and_one_thread(monkeypatch):
    monkeypatch.setenv("MOLT_TEST_SETTING", "kept")
    environment = worker_environment("worker-secret")
    assert environment["MOLT_TOKEN"] == "worker-secret"
    assert (environment["OMP_NUM_THREADS"], environment["MOLT_TEST_SETTING"]) == ("1", "kept")


class Watcher:
    """Waits for ever; knows whether it was ended."""

    was_ended = False

    async def __call__(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.was_ended = True


async def test_a_run_that_is_done_ends_its_watchers():
    watcher = Watcher()
    await until_first_ends(asyncio.sleep(0), watcher())
    assert watcher.was_ended


async def test_a_watcher_that_raises_ends_the_run():
    main = Watcher()

    async def fail():
        raise RunError("engine.max_restarts is spent")

    with pytest.raises(RunError, match=r"max_restarts is spent"):
        await until_first_ends(main(), fail())
    assert main.was_ended


async def test_a_run_that_is_cancelled_leaves_nothing_running():
    main, watcher = Watcher(), Watcher()
    run = asyncio.create_task(until_first_ends(main(), watcher()))
    for _ in range(3):
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert main.was_ended
    assert watcher.was_ended
