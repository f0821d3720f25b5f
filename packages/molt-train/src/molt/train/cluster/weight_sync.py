"""What rank 0 of the actor calls on the engines during a refit."""

import itertools
from typing import Any

import ray

from molt.train.records.refit import Interrupted

TRANSFER_TIMEOUT_S = 60.0
"""Seconds that an engine may take to join the transfer group, and one weight to cross, over gloo."""


class RayWeightSync:
    """Each call reaches every engine at once and returns when all have answered, within `timeout_s`.

    The interface contains that of vLLM's `VLLMWeightSyncClient`, so vLLM's own senders drive it, too.
    """

    def __init__(self, engines: list[Any], *, workers_per_engine: int, timeout_s: float):
        self._engines = engines
        self._workers_per_engine = workers_per_engine
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine's workers join; their ranks follow the sender's, engine by engine."""
        offsets = [1 + i * self._workers_per_engine for i in range(len(self._engines))]
        arguments = [{"init_info": {**init_info, "rank_offset": offset}} for offset in offsets]
        self._all(arguments, "init_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Hold the engines' generations, and make ready for new weights."""
        self._on_each("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive what is being broadcast."""
        self._on_each("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the new weights ready."""
        del weight_version  # vLLM's senders give none: `serve` announces the version
        self._on_each("finish_weight_update")

    def weight_digests(self) -> list[dict[str, str]]:
        """Of what each worker of each engine holds, engine by engine."""
        return list(itertools.chain.from_iterable(self._on_each("weight_digests")))

    def serve(self, version: int) -> Interrupted:
        """Serve the new weights as `version`. Returns what became of the generations of all engines."""
        return sum(self._on_each("serve", version=version), Interrupted())

    def _on_each(self, method: str, **kwargs: Any) -> list[Any]:
        return self._all([kwargs] * len(self._engines), method)

    def _all(self, arguments: list[dict[str, Any]], method: str) -> list[Any]:
        calls = [getattr(e, method).remote(**kwargs) for e, kwargs in zip(self._engines, arguments, strict=True)]
        return ray.get(calls, timeout=self._timeout_s)
