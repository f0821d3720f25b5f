"""Evaluation: every held-out task, so often, pinned or beside training, and one row of what came of it."""

import asyncio

import msgspec
import pytest

from molt.train.config import EvalConfig
from molt.train.controller.evaluation import Evaluation, best_step
from molt.train.errors import StallError
from molt.train.observe.journal import Journal, read_journal

SETTINGS = EvalConfig(samples=2)


class Stall:
    """A guard that gives up at once."""

    def check(self, waiting_for):
        raise StallError(f"waiting for {waiting_for}")


@pytest.fixture
def pool(restart_pool):
    return restart_pool()


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "evaluations.jsonl") as journal:
        yield journal


@pytest.fixture
def evaluation(pool, tasks, journal):
    return Evaluation(pool, tasks, settings=SETTINGS, journal=journal, stall=Stall())


async def test_every_task_is_rolled_out_so_often_and_one_row_is_written(evaluation, pool, journal, make_workers):
    rewards = iter([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    workers = make_workers(pool)
    serving = asyncio.create_task(
        workers.serve(lambda _: {"reward": next(rewards), "info": {"calls": 2}, "version": 4})
    )
    row = await evaluation(step=4, policy_version=4)
    serving.cancel()
    assert row == {
        "step": 4,
        "policy_version": 4,
        "reward_mean": 0.5,
        "avg@2": 0.5,
        "standard_error": pytest.approx(0.5 / 3**0.5),
        "pass@1": 0.5,
        "pass@2": pytest.approx(2 / 3),
        "num_tasks": 3,
        "num_rollouts": 6,
        "num_missing": 0,
        "outcomes": {"completed": 6},
        "num_action_tokens_mean": 2.0,
        "oldest_version": 4,
        "newest_version": 4,
        "info_mean": {"calls": 2.0},
        "num_skipped": 0,
    }
    assert read_journal(journal.path) == [msgspec.json.decode(msgspec.json.encode(row))]


async def test_what_has_been_evaluated_is_known_to_a_later_process(evaluation, pool, journal, make_workers):
    assert not evaluation.is_done(3)
    serving = asyncio.create_task(make_workers(pool).serve(lambda _: {}))
    await evaluation(step=3, policy_version=3)
    serving.cancel()
    again = Evaluation(pool, [], settings=SETTINGS, journal=journal, stall=Stall())
    assert (again.is_done(3), again.is_done(4)) == (True, False)


async def test_its_groups_are_never_trained_on(evaluation, pool, make_workers):
    serving = asyncio.create_task(make_workers(pool).serve(lambda _: {}))
    await evaluation(step=0, policy_version=0)
    serving.cancel()
    assert (pool.num_open, pool.num_ready) == (0, 0)
    assert {(group.kind, group.state, group.step) for group in pool.ledger.groups()} == {("eval", "consumed", None)}


async def test_workers_that_never_answer_stall_it(evaluation):
    with pytest.raises(StallError, match="waiting for evaluation rollouts"):
        await evaluation(step=0, policy_version=0)


async def test_beside_training_its_row_says_which_versions_it_spans(evaluation, pool, journal, make_workers):
    workers = make_workers(pool)
    assert evaluation.start(step=2, policy_version=2)
    assert await evaluation.poll() is None
    for version, assignment in enumerate(pool.acquire("w", 6), start=2):
        assert await evaluation.poll() is None
        workers.report(assignment, version=version)
    row = await evaluation.poll()
    assert row is not None
    assert (row["step"], row["policy_version"]) == (2, 2)
    assert (row["oldest_version"], row["newest_version"]) == (2, 7)
    assert await evaluation.poll() is None, "a row is written once"
    assert len(read_journal(journal.path)) == 1
    assert evaluation.start(step=4, policy_version=4), "the next may begin"


async def test_one_that_falls_due_before_the_last_has_ended_is_skipped_and_counted(evaluation, pool, make_workers):
    assert evaluation.start(step=2, policy_version=2)
    assert not evaluation.start(step=4, policy_version=4)
    make_workers(pool).finish_all(version=2)
    row = await evaluation.finish()
    assert (row["step"], row["num_skipped"]) == (2, 1)
    assert await evaluation.finish() is None


async def test_a_pinned_one_waits_for_the_one_beside_training(evaluation, pool, journal, make_workers):
    serving = asyncio.create_task(make_workers(pool).serve(lambda _: {}))
    evaluation.start(step=2, policy_version=2)
    await evaluation(step=6, policy_version=6)
    serving.cancel()
    assert [row["step"] for row in read_journal(journal.path)] == [2, 6]


def rated(*rewards):
    return [{"step": step, "reward_mean": reward, "num_rollouts": 4} for step, reward in enumerate(rewards)]


def test_the_best_is_the_earliest_with_the_highest_mean():
    assert best_step(rated(0.1, 0.2, 0.7, 0.7, 0.3)) == 2


def test_the_policy_before_training_is_no_checkpoint_and_an_evaluation_of_nothing_is_none():
    assert best_step([]) is None
    assert best_step(rated(0.9)) is None
    assert best_step(rated(0.9, 0.1)) == 1
    assert best_step([*rated(0.9, -0.5), {"step": 2, "reward_mean": 0.0, "num_rollouts": 0}]) == 1
