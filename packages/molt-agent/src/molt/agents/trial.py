"""Run an agent on task rows without a trainer, against any OpenAI-compatible endpoint."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from molt.agents.protocol import Lease, ResultReport, SamplingParams, SessionCredentials
from molt.agents.rollout import close_runner, run_lease
from molt.agents.runner import AgentRunner

TASK_LIMIT_S = 1800.0
"""How long one task may take."""


async def try_tasks(
    runner: AgentRunner,
    rows: list[dict[str, Any]],
    *,
    session: SessionCredentials,
    sampling_params: SamplingParams,
    concurrency: int,
) -> AsyncGenerator[tuple[int, ResultReport]]:
    """Run every row once, up to `concurrency` at a time, and close the runner.

    Yields:
        The row's index and how it ended, in the order in which they end.
    """
    gate = asyncio.Semaphore(concurrency)

    async def run_row(index: int, row: dict[str, Any]) -> tuple[int, ResultReport]:
        lease = Lease(
            lease_id=f"try-{index}",
            rollout_id=f"try-{index}",
            group_id=f"try-{index}",
            attempt=1,
            task=row,
            session=session,
            sampling_params=sampling_params,
            timeout_s=TASK_LIMIT_S,
        )
        async with gate:
            return index, await run_lease(runner, lease, worker_id="try")

    tasks = [asyncio.create_task(run_row(index, row)) for index, row in enumerate(rows)]
    try:
        for ended in asyncio.as_completed(tasks):
            yield await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await close_runner(runner)
