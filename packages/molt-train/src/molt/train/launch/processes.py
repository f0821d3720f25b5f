"""What runs beside the work of a command that serves: HTTP, local workers, and whoever ends it."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from molt.train.config import Config
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.workers import LocalWorkers
from molt.train.errors import RunStoppedError
from molt.train.launch.environment import worker_environment
from molt.train.launch.parts import Front

T = TypeVar("T")


def local_workers_of(
    config: Config, front: Front, folder: RunFolder, on_event: Callable[[str, dict[str, Any]], None], *, token: str
) -> LocalWorkers:
    """The workers that `[agent]` asks for; not started yet."""
    return LocalWorkers(
        config.agent,
        url=front.server.url,
        environment=worker_environment(token),
        logs=folder.logs,
        on_event=on_event,
    )


@contextlib.asynccontextmanager
async def serving_http(front: Front, workers: LocalWorkers | None, *, announced: bool = True) -> AsyncIterator[None]:
    """Serve HTTP for the time of the block; then tell the workers that the run is over, and wait for local ones.

    `announced`: on stdout, for workers elsewhere.
    """
    await (front.serve() if announced else front.server.start())
    try:
        yield
    finally:
        if workers:
            workers.ending = True
        front.desk.finish()
        if workers:
            await workers.stop()
        await front.stop()


async def stop_when_told() -> None:
    """Raises RunStoppedError on SIGTERM or SIGINT; what is on disk then is enough to go on from."""
    told = asyncio.get_running_loop().create_future()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, lambda s=signum: told.done() or told.set_result(s.name))
    raise RunStoppedError(f"stopped by {await told}; the same command goes on from the last checkpoint")


async def unless_told(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; RunStoppedError when the run is told to stop before it is there."""
    results: list[T] = []

    async def keep() -> None:
        results.append(await work)

    await until_first_ends(keep(), stop_when_told())
    return results[0]


async def until_first_ends(main: Coroutine[Any, Any, None], *watchers: Coroutine[Any, Any, None]) -> None:
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
