"""How a serving process runs: uvloop, many open files, and a garbage collector that stops no world for what is kept."""

import gc
import os
import resource
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

_NEW_OBJECTS = 200_000
"""Containers made and not freed since the last collection: those of some five thousand sessions."""
_NEVER = 1_000_000
_MAX_FILES = 1024 * 1024
"""Wanted at the most: where the hard limit is a billion, some child processes close every possible file, one by one."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in a new event loop of uvloop's."""
    raise_file_limit()
    # Texts are encoded one at a time: handing each to a pool of threads costs more than it does.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    thresholds = gc.get_threshold()
    _spare_what_is_kept()
    try:
        return uvloop.run(main)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def raise_file_limit() -> None:
    """Let the process have as many files as it may. Each connection is one, and the usual 1024 are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _spare_what_is_kept() -> None:
    """Keep the collector of cyclic garbage off what lives long.

    A gateway keeps every open session. By default each new quarter of them has the collector walk through all, a pause
    of a tenth of a second and more. Sessions are freed by reference counting; what is left to the collector are the
    cycles that a failed call makes. So it starts when many objects were made that nobody freed, looks at those once,
    and never at the others.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _NEVER, _NEVER)
