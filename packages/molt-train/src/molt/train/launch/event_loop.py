"""How a serving process runs: uvloop, many open files, and a garbage collector that stops no world for what is kept."""

import gc
import resource
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

_FULL_EVERY = 256
"""Of so many collections of the oldest generation, one looks at everything that was set aside, too."""
_MAX_FILES = 1024 * 1024
"""Wanted at the most: where the hard limit is a billion, some child processes close every possible file, one by one."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in a new event loop of uvloop's."""
    raise_file_limit()
    collector = _Collector()
    collector.start()
    try:
        return uvloop.run(main)
    finally:
        collector.stop()


def raise_file_limit() -> None:
    """Let the process have as many files as it may. Each connection is one, and the usual 1024 are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Collector:
    """Sets aside what survives a full collection, so that the next one looks only at what is new.

    A gateway keeps every open session, and a collection that walks through all of them is a pause of a tenth of a
    second and more, again and again as they grow. Reference counting frees sessions all the same; what it cannot free,
    a cycle that had been set aside, waits for one of the rare collections of everything.
    """

    def __init__(self) -> None:
        self._num_full = 0

    def start(self) -> None:
        """Set aside what the imports made, and watch the collections."""
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        """Leave the collector as it was."""
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "stop":
            gc.freeze()
            self._num_full += 1
        elif self._num_full % _FULL_EVERY == _FULL_EVERY - 1:
            gc.unfreeze()
