"""The stall guard of a run: what counts as progress, and what a report of a stuck run tells."""

from collections.abc import Callable
from typing import Any

import msgspec

from molt.train.config import Config
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.serving import Serving
from molt.train.controller.stall import Signs, StallGuard, StallReport
from molt.train.engine.router import Router
from molt.train.launch.parts import Front
from molt.train.observe.waits import Waits


def make_stall_guard(
    config: Config,
    folder: RunFolder,
    front: Front,
    *,
    serving: Serving,
    router: Router,
    waits: Waits,
    on_event: Callable[[str, dict[str, Any]], None],
) -> StallGuard:
    """Progress is a rollout that counts (of an evaluation, any), and an update; the rest is activity.

    Activity may fill the time that all attempts of a rollout may take, one after the other.
    """
    pool, desk = front.pool, front.desk

    def parts() -> dict[str, str]:
        status = pool.status()
        told = msgspec.to_builtins(status)
        workers = told.pop("workers")
        engines = [f"engine {number}: in service, {load} requests" for number, load in router.loads.items()]
        return {
            "pool": "\n".join(f"{name}: {value}" for name, value in told.items()),
            "workers": "\n".join(map(str, workers)) or "none was heard of lately",
            "engines": "\n".join([f"policy version {serving.version}", *(engines or ["none is in service"])]),
        }

    report = StallReport(folder.logs, folder.stacks, waits=waits, parts=parts)

    def tell(waiting_for: str) -> str:
        on_event("stalled", {"waiting_for": waiting_for})
        return report(waiting_for)

    return StallGuard(
        config.run.stall_timeout,
        signs=lambda: Signs(
            progress=(pool.counters["rollouts_counted"], serving.version),
            # Without engines attempts can only fail: that they do so is no sign of life.
            activity=(router.num_finished, desk.num_results, desk.num_leases) if router.loads else None,
        ),
        any_worker=lambda: desk.num_leases > 0,
        patience_s=config.pool.max_attempts * config.rollout.timeout_s,
        report=tell,
    )
