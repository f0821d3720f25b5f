"""Grading again: what is graded, what is not, and what the ledger then says of it."""

import asyncio
import threading
from functools import partial

import pytest

from molt.agents import ChatAgent, ChatAgentRunner, Result
from molt.agents.rollout import grade_again
from molt.train.config import Config, RolloutConfig
from molt.train.controller.regrade import Regrading, free_name
from molt.train.records.rollout import Outcome


class Grader(ChatAgent):
    """Right answers are those of the task; what starts with `!` breaks it."""

    def run(self, ctx):
        raise AssertionError("nothing is run again")

    def grade(self, ctx, answer):
        if str(answer).startswith("!"):
            raise ValueError(f"cannot read {answer}")
        if answer == "?":
            raise ConnectionError("the judge is away")
        return Result(reward=float(answer == f"answer {ctx.data['q']}"), info={"graded": answer})


@pytest.fixture
def pool(restart_pool):
    return restart_pool()


@pytest.fixture
def record(pool, tasks, make_workers):
    """Record a group with these outcomes; gives the ids of its rollouts. Each has one turn."""

    def run(*outcomes):
        group_id = pool.open_group(tasks[1], kind="eval", size=len(outcomes), position=None)
        workers = make_workers(pool)
        for assignment, outcome in zip(pool.acquire("w", len(outcomes)), outcomes, strict=True):
            if outcome is not None:
                workers.report(assignment, kind=outcome.kind, reward=outcome.reward, answer=outcome.answer)
        return [f"{group_id}.{member}" for member in range(len(outcomes))]

    return run


def completed(reward, answer=None):
    return Outcome(kind="completed", reward=reward, answer=answer)


def text_of(turn):
    """Each turn samples 7 and 8."""
    return f"answer {turn.token_ids[0] - 6}"


@pytest.fixture
def regrade(pool):
    async def run(timeout_s=5.0, agent=Grader, *, reads_replies=True):
        config = Config(rollout=RolloutConfig(timeout_s=timeout_s))
        grade = partial(grade_again, ChatAgentRunner(agent), worker_id="test")
        regrading = Regrading(grade, config, reply_text=text_of if reads_replies else None)
        return await regrading.run(pool.ledger), regrading.report("again")

    return run


async def test_recorded_answers_are_graded_on_their_tasks(record, regrade):
    right, wrong = record(completed(0.0, "answer 1"), completed(1.0, "answer 2"))
    grades, report = await regrade()
    assert {name: outcome.reward for name, outcome in grades.items()} == {right: 1.0, wrong: 0.0}
    assert grades[right].info == {"graded": "answer 1"}
    assert grades[right].answer == "answer 1", "a graded answer can be graded once more"
    assert (report.rollouts, report.changed, report.mean_before, report.mean_after) == (2, 2, 0.5, 0.5)
    assert report.outcomes == {"completed": 2}


async def test_without_an_answer_the_last_reply_is_graded(record, regrade):
    (rollout,) = record(completed(0.0))
    grades, report = await regrade()
    assert grades[rollout].info == {"graded": "answer 1"}  # of the one turn, whose first token is 7
    assert report.changed == 1


async def test_without_a_tokenizer_recorded_answers_alone_are_graded(record, regrade):
    record(completed(0.0), completed(0.0, "answer 1"))
    grades, report = await regrade(reads_replies=False)
    assert (len(grades), report.skipped) == (1, {"no_tokenizer": 1})


async def test_what_says_nothing_of_an_answer_keeps_its_outcome(record, regrade):
    record(Outcome(kind="timeout"), Outcome(kind="failed", error="it broke"), completed(1.0, "answer 1"), None)
    grades, report = await regrade()
    assert len(grades) == 1
    assert (report.rollouts, report.changed) == (1, 0)
    assert report.skipped == {"timeout": 1, "failed": 1, "unfinished": 1}


async def test_a_failed_rollout_that_had_an_answer_is_graded(record, regrade):
    (rollout,) = record(Outcome(kind="failed", error="the grader broke", answer="answer 1"))
    grades, report = await regrade()
    assert (grades[rollout].kind, grades[rollout].reward, grades[rollout].error) == ("completed", 1.0, None)
    assert (report.mean_before, report.mean_after, report.changed) == (0.0, 1.0, 1)


async def test_a_truncated_rollout_stays_truncated(record, regrade):
    (rollout,) = record(Outcome(kind="truncated", reward=0.0, answer="answer 1"))
    grades, _ = await regrade()
    assert (grades[rollout].kind, grades[rollout].reward) == ("truncated", 1.0)


async def test_a_grader_that_raises_makes_the_rollout_failed_and_says_why(record, regrade):
    broken, fine = record(completed(1.0, "!answer"), completed(1.0, "answer 1"))
    grades, report = await regrade()
    assert grades[broken].kind == "failed"
    assert "cannot read !answer" in grades[broken].error
    assert grades[fine].reward == 1.0
    assert report.outcomes == {"completed": 1, "failed": 1}
    assert report.mean_after == 0.5


async def test_an_outage_of_the_grader_changes_nothing_and_is_counted(record, regrade):
    record(completed(1.0, "?"))
    grades, report = await regrade()
    assert (grades, report.skipped) == ({}, {"grader_infrastructure": 1})
    assert report.mean_after is None


class Slow(Grader):
    async def grade(self, ctx, answer):
        await asyncio.Event().wait()


async def test_a_grader_that_never_ends_is_given_up(record, regrade):
    (rollout,) = record(completed(1.0, "answer 1"))
    grades, _ = await regrade(timeout_s=0.05, agent=Slow)
    assert grades[rollout].kind == "timeout"


class Meeting(Grader):
    """Each waits, in its thread, until all three are there."""

    barrier = None

    def grade(self, ctx, answer):
        self.barrier.wait()
        return 1.0


async def test_plain_graders_run_at_once(record, regrade):
    Meeting.barrier = threading.Barrier(3, timeout=20)
    record(*(completed(0.0, "a") for _ in range(3)))
    _, report = await regrade(timeout_s=20, agent=Meeting)
    assert report.outcomes == {"completed": 3}
    assert report.mean_after == 1.0


def test_names_are_numbered():
    assert free_name([]) == "regrade-1"
    assert free_name(["regrade-1", "strict", "regrade-3"]) == "regrade-2"
