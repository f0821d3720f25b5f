"""One lease, run to its end: the deadline, and how whatever happened is named."""

import asyncio
import logging
import sys
import time
import traceback

from molt.agents.blame import blame, group_members
from molt.agents.context import make_context
from molt.agents.protocol import Lease, ResultReport
from molt.agents.results import Result, check_result
from molt.agents.runner import AgentRunner

CANCEL_GRACE_S = 5.0
"""How long an agent may take to clean up once it is cancelled."""
CLOSE_LIMIT_S = 5.0
"""How long a runner may take to close."""
MAX_ERROR_CHARS = 2000

log = logging.getLogger(__name__)


async def run_lease(runner: AgentRunner, lease: Lease, *, worker_id: str) -> ResultReport:
    """Run one attempt. Whatever the agent does becomes a report; this raises only when it is itself cancelled.

    The outcome is `completed`, or `truncated` where the Result says so; `timeout` past `lease.timeout_s`;
    otherwise `infrastructure` or `failed`, see `blame`.
    """
    task = asyncio.create_task(_attempt(runner, lease))
    try:
        await asyncio.wait({task}, timeout=lease.timeout_s)
        in_time = task.done()
    finally:
        await _stop(task, lease)
    if not in_time:
        error = f"no Result within {lease.timeout_s:g} s"
        return ResultReport(worker_id=worker_id, attempt=lease.attempt, outcome="timeout", error=error)
    if task.cancelled():
        error = "the agent cancelled itself"
        return ResultReport(worker_id=worker_id, attempt=lease.attempt, outcome="failed", error=error)
    if exc := task.exception():
        log.debug("rollout %s, attempt %d:", lease.rollout_id, lease.attempt, exc_info=exc)
        error = _describe(exc, runner)
        return ResultReport(worker_id=worker_id, attempt=lease.attempt, outcome=blame(exc), error=error)
    result = task.result()
    return ResultReport(
        worker_id=worker_id,
        attempt=lease.attempt,
        outcome="truncated" if result.truncated else "completed",
        reward=result.reward,
        score=result.score,
        info=result.info,
    )


async def close_runner(runner: AgentRunner) -> None:
    """Close `runner`, within the limit; a failure is logged, since nothing depends on it any more."""
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await runner.close()
    except TimeoutError:
        log.warning("AgentRunner.close took longer than %g s and was abandoned", CLOSE_LIMIT_S)
    except Exception:
        log.warning("AgentRunner.close failed", exc_info=True)


async def _attempt(runner: AgentRunner, lease: Lease) -> Result:
    context = make_context(lease, deadline=time.time() + lease.timeout_s)
    try:
        return check_result(await runner.run(context))
    except SystemExit as exc:  # in a task it would end the whole worker
        raise RuntimeError(f"the agent called sys.exit({exc.code!r})") from exc


async def _stop(task: asyncio.Task[Result], lease: Lease) -> None:
    """Cancel `task` and give it time to clean up; one that ignores the cancellation is left behind."""
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not task.done():
        log.error("rollout %s: the agent ignores its cancellation and was abandoned", lease.rollout_id)
    elif not task.cancelled() and (error := task.exception()):
        log.debug("rollout %s: while it was cancelled:", lease.rollout_id, exc_info=error)


def _describe(error: BaseException, runner: AgentRunner) -> str:
    """One line: type, message, and the innermost line of the agent's own module."""
    if members := group_members(error):
        return "; ".join(_describe(member, runner) for member in members)[:MAX_ERROR_CHARS]
    own_file = getattr(sys.modules.get(type(runner).__module__), "__file__", None)
    own_lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == own_file]
    where = f" ({own_file}:{own_lines[-1]})" if own_lines else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS] + where
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent
