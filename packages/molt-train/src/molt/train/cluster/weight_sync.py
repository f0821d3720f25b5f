"""What rank 0 of the actor calls on the engines during a refit."""

from typing import Any

import ray


class RayWeightSync:
    """Each call reaches every engine at once and returns when all have answered, within `timeout_s`.

    The interface is that of vLLM's `VLLMWeightSyncClient`, so vLLM's own senders drive it, too.
    """

    def __init__(self, engines: list[Any], *, workers_per_engine: int, timeout_s: float):
        self._engines = engines
        self._workers_per_engine = workers_per_engine
        self._timeout_s = timeout_s
        self.version = 0
        """The policy version that the next `finish_weight_update` announces."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine's workers join; their ranks follow the sender's, engine by engine."""
        offsets = [1 + i * self._workers_per_engine for i in range(len(self._engines))]
        arguments = [{"init_info": {**init_info, "rank_offset": offset}} for offset in offsets]
        self._all(arguments, "init_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Hold the engines' requests."""
        self._all([{}] * len(self._engines), "start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive what is being broadcast."""
        self._all([{"update_info": update_info}] * len(self._engines), "update_weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new weights."""
        del weight_version  # vLLM's senders give none: the version was set with the refit
        self._all([{"version": self.version}] * len(self._engines), "finish_weight_update")

    def _all(self, arguments: list[dict[str, Any]], method: str) -> None:
        calls = [getattr(e, method).remote(**kwargs) for e, kwargs in zip(self._engines, arguments, strict=True)]
        ray.get(calls, timeout=self._timeout_s)
