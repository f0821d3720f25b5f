"""One lease, run to its end: the deadline, and how whatever happened is named."""

import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Coroutine
from typing import Any

from molt.agents.blame import blame, group_members
from molt.agents.context import Context, make_context
from molt.agents.errors import NoGraderError
from molt.agents.protocol import Lease, ResultReport
from molt.agents.results import Result, check_answer, check_result
from molt.agents.runner import AgentRunner, no_grader

CANCEL_GRACE_S = 5.0
"""How long an agent may take to clean up once it is cancelled."""
CLOSE_LIMIT_S = 5.0
"""How long a runner may take to close."""
MAX_ERROR_CHARS = 2000

log = logging.getLogger(__name__)


async def run_lease(runner: AgentRunner, lease: Lease, *, worker_id: str) -> ResultReport:
    """Run one attempt. Whatever the agent does becomes a report; this raises only when it is itself cancelled.

    The outcome is `completed`, or `truncated` where the Result says so; `timeout` past `lease.timeout_s`;
    otherwise `infrastructure` or `failed`, see `blame`. An answer travels with the report, whatever its grader did.
    """
    attempt = _Attempt(runner, lease)
    return await attempt.report(attempt.run(), worker_id=worker_id)


async def grade_again(runner: AgentRunner, lease: Lease, answer: Any, *, worker_id: str) -> ResultReport:
    """Grade the recorded answer of an attempt, without running the agent; as `run_lease`.

    Args:
        runner: The agent, perhaps of a later version.
        lease: The attempt; nothing stands behind its session.
        answer: As it was reported.
        worker_id: Who grades.

    Raises:
        NoGraderError: The agent has no `grade`.
    """
    if not runner.grades:
        raise NoGraderError(no_grader(runner))
    attempt = _Attempt(runner, lease)
    return await attempt.report(attempt.grade(answer), worker_id=worker_id)


async def close_runner(runner: AgentRunner) -> None:
    """Close `runner`, within the limit; a failure is logged, since nothing depends on it any more."""
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await runner.close()
    except TimeoutError:
        log.warning("AgentRunner.close took longer than %g s and was abandoned", CLOSE_LIMIT_S)
    except Exception:
        log.warning("AgentRunner.close failed", exc_info=True)


class _Attempt:
    """One attempt, and what it answered."""

    def __init__(self, runner: AgentRunner, lease: Lease) -> None:
        self._runner, self._lease = runner, lease
        self._answer: Any = None

    async def run(self) -> Result:
        """Run the agent, and have its answer graded, unless it did that itself."""
        context = self._context()
        value = await self._runner.run(context)
        if isinstance(value, Result) or not self._runner.grades:
            return check_result(value)
        return await self._grade(context, value)

    async def grade(self, answer: Any) -> Result:
        """Have an answer graded."""
        return await self._grade(self._context(), answer)

    async def report(self, work: Coroutine[Any, Any, Result], *, worker_id: str) -> ResultReport:
        """Do one of the two, within the time of the lease, and say how it ended."""
        lease = self._lease
        task = asyncio.create_task(_refuse_exit(work))
        try:
            await asyncio.wait({task}, timeout=lease.timeout_s)
            in_time = task.done()
        finally:
            await _stop(task, lease)
        ending: dict[str, Any]
        if not in_time:
            ending = {"outcome": "timeout", "error": f"no Result within {lease.timeout_s:g} s"}
        elif task.cancelled():
            ending = {"outcome": "failed", "error": "the agent cancelled itself"}
        elif exc := task.exception():
            log.debug("rollout %s, attempt %d:", lease.rollout_id, lease.attempt, exc_info=exc)
            ending = {"outcome": blame(exc), "error": _describe(exc, self._runner)}
        else:
            result = task.result()
            kind = "truncated" if result.truncated else "completed"
            ending = {"outcome": kind, "reward": result.reward, "score": result.score, "info": result.info}
        return ResultReport(worker_id=worker_id, attempt=lease.attempt, answer=self._answer, **ending)

    async def _grade(self, context: Context, value: Any) -> Result:
        self._answer = check_answer(value)
        return check_result(await self._runner.grade(context, self._answer))

    def _context(self) -> Context:
        return make_context(self._lease, deadline=time.time() + self._lease.timeout_s)


async def _refuse_exit(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await work
    except SystemExit as exc:  # in a task it would end the whole worker
        raise RuntimeError(f"the agent called sys.exit({exc.code!r})") from exc


async def _stop(task: asyncio.Task[Result], lease: Lease) -> None:
    """Cancel `task` and give it time to clean up; one that ignores the cancellation is left behind."""
    if task.done():
        _ = (
            task.cancelled() or task.exception()
        )  # asyncio would complain that nobody asked, if this is cancelled itself
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
