"""What the actor's ranks are going to hold, said before the run, and what they held, after its first window."""

import logging
from collections.abc import Mapping
from typing import Protocol

from molt.train.actor.memory_plan import ModelShape, Role, compare, plan_memory
from molt.train.config import Config

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks that hold it."""

    async def peak_bytes(self) -> int:
        """The most memory that one of them has held since it was started."""
        ...


class MemoryReport:
    """Logs the plan when it is made, and compares it with the peak once."""

    def __init__(self, config: Config, shapes: Mapping[Role, ModelShape], ranks: Ranks):
        self._plan, self._ranks = plan_memory(config, shapes), ranks
        self._is_compared = False
        log.info("%s", self._plan.render())

    async def after_window(self) -> None:
        """To be called after every window."""
        if not self._is_compared:
            self._is_compared = True
            log.info("%s", compare(self._plan, await self._ranks.peak_bytes()))
