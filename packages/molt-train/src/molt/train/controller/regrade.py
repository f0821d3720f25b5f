"""Grading again what a run recorded, with a grader of today: the rollouts stay as they are, their outcomes change."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from molt.agents.protocol import Lease, ResultReport, SamplingParams, SessionCredentials
from molt.train.config import Config
from molt.train.controller.results import outcome_of
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import RolloutRow
from molt.train.records.rollout import Outcome, Task
from molt.train.records.turn import Turn

CONCURRENCY = 32
"""Rollouts graded at once."""
Grade = Callable[[Lease, Any], Awaitable[ResultReport]]
"""A recorded attempt and its answer -> how the grader of today ends it. It raises nothing of the user's."""


class Gradable(NamedTuple):
    """A rollout that can be graded again."""

    row: RolloutRow
    task: Task
    outcome: Outcome
    """The recorded one."""
    answer: Any


class RegradeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    name: str
    rollouts: int
    """That were graded."""
    changed: int
    """Of them, those whose outcome, reward or score is another than the recorded one."""
    mean_before: float | None
    mean_after: float | None
    """Rewards of the graded ones, a failed one's 0; None where there are none."""
    outcomes: dict[str, int]
    """Of the graded ones, as they are now."""
    skipped: dict[str, int]
    """Rollouts that keep the recorded outcome, by reason."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return msgspec.structs.asdict(self)


class Regrading:
    """Asks the grader about the rollouts of a ledger.

    Args:
        grade: The grader.
        config: Of the run: what contexts are made of, and `rollout.timeout_s`, which bounds one grading.
        reply_text: The text of a recorded reply, where no answer was recorded; None: replies cannot be read.
    """

    def __init__(self, grade: Grade, config: Config, *, reply_text: Callable[[Turn], str] | None):
        self._ask, self._config, self._reply_text = grade, config, reply_text
        self._skipped: Counter[str] = Counter()
        self._grades: dict[str, tuple[Outcome, Outcome]] = {}

    async def run(self, reader: LedgerReader) -> dict[str, Outcome]:
        """Grade every finished rollout that can be; returns the new outcomes by rollout id."""
        gate = asyncio.Semaphore(CONCURRENCY)
        async with asyncio.TaskGroup() as tasks:
            for gradable in self._gradable(reader):
                await gate.acquire()  # recordings are long: no more of them in memory than are graded
                task = tasks.create_task(self._grade(gradable))
                task.add_done_callback(lambda _: gate.release())
        return {rollout_id: after for rollout_id, (_, after) in self._grades.items()}

    def report(self, name: str) -> RegradeReport:
        """What came of it, once it is done."""
        before, after = ([pair[i] for pair in self._grades.values()] for i in (0, 1))
        return RegradeReport(
            name=name,
            rollouts=len(after),
            changed=sum(_mark(old) != _mark(new) for old, new in zip(before, after, strict=True)),
            mean_before=fmean(outcome.reward or 0.0 for outcome in before) if before else None,
            mean_after=fmean(outcome.reward or 0.0 for outcome in after) if after else None,
            outcomes=dict(Counter(outcome.kind for outcome in after)),
            skipped=dict(self._skipped),
        )

    def _gradable(self, reader: LedgerReader) -> Iterator[Gradable]:
        for group in reader.groups():
            for row in reader.each_rollout(group.group_id):
                if row.outcome is None:
                    self._skipped["unfinished"] += 1
                    continue
                answer, reason = self._answer(row, row.outcome)
                if reason is not None:
                    self._skipped[reason] += 1
                else:
                    light = msgspec.structs.replace(row, recording=None)
                    yield Gradable(light, group.task, row.outcome, answer)

    def _answer(self, row: RolloutRow, outcome: Outcome) -> tuple[Any, str | None]:
        """What to grade; or why there is nothing. A rollout that failed before it had an answer failed all the same."""
        if outcome.answer is not None:
            return outcome.answer, None
        if outcome.kind not in ("completed", "truncated"):
            return None, outcome.kind
        turns = row.recording.turns if row.recording else []
        last = next((turn for turn in reversed(turns) if turn.status == "delivered" and not turn.auxiliary), None)
        if last is None:
            return None, "no_answer"
        return (None, "no_tokenizer") if self._reply_text is None else (self._reply_text(last), None)

    async def _grade(self, gradable: Gradable) -> None:
        report = await self._ask(self._lease(gradable), gradable.answer)
        if report.outcome == "infrastructure":  # the grader's own outage says nothing about the answer
            self._skipped["grader_infrastructure"] += 1
            return
        after = outcome_of(report)
        if gradable.outcome.kind == "truncated" and after.kind == "completed":
            after = msgspec.structs.replace(after, kind="truncated")  # the answer came of an episode that was cut
        self._grades[gradable.row.rollout_id] = (gradable.outcome, after)

    def _lease(self, gradable: Gradable) -> Lease:
        """The attempt as it was, as far as a grader can know it: behind its session stands nothing any more."""
        row, rollout = gradable.row, self._config.rollout
        session = SessionCredentials(
            session_id=row.rollout_id,
            session_url="http://regrade.invalid",
            base_url="http://regrade.invalid/v1",
            api_key="regrade",
            model_name=self._config.model.name,
        )
        return Lease(
            lease_id=f"{row.rollout_id}.{row.attempt}",
            rollout_id=row.rollout_id,
            group_id=row.group_id,
            attempt=row.attempt,
            task=gradable.task.data,
            session=session,
            sampling_params=SamplingParams(
                max_tokens=rollout.max_tokens, temperature=rollout.temperature, top_p=rollout.top_p
            ),
            timeout_s=rollout.timeout_s,
        )


def free_name(taken: list[str]) -> str:
    """The first of regrade-1, regrade-2, ... that is free."""
    number = 1
    while (name := f"regrade-{number}") in taken:
        number += 1
    return name


def _mark(outcome: Outcome) -> tuple[str, float | None, float | None]:
    return outcome.kind, outcome.reward, outcome.score
