"""Evaluation: every held-out task, so often, on one policy version, and what of it counts."""

import asyncio

import msgspec
import pytest

from molt.train.controller.evaluation import Evaluation, info_means, summarise
from molt.train.errors import StallError
from molt.train.observe.journal import Journal, read_journal
from molt.train.records.rollout import Outcome, Rollout


def rollout(kind, *, reward=None, score=None, info=None):
    outcome = Outcome(kind=kind, reward=reward, score=score, info=info or {})
    return Rollout(rollout_id="r", group_id="g", attempt=1, outcome=outcome, experiences=())


def test_the_mean_is_over_what_says_something_about_the_policy():
    summary = summarise(
        [
            rollout("completed", reward=1.0),
            rollout("truncated", reward=0.5),
            rollout("failed"),
            rollout("timeout"),
            rollout("infrastructure"),
        ]
    )
    assert summary["reward_mean"] == 1.5 / 4  # the failed and the late count 0, the lost one nowhere
    assert summary["num_rollouts"] == 4
    assert summary["outcomes"] == {"completed": 1, "truncated": 1, "failed": 1, "timeout": 1, "infrastructure": 1}


def test_a_score_stands_for_the_reward_where_an_agent_gives_one():
    assert summarise([rollout("completed", reward=0.0, score=1.0)])["reward_mean"] == 1.0
    assert summarise([rollout("completed", reward=1.0, score=0.0)])["reward_mean"] == 0.0


def test_nothing_to_count_is_a_mean_of_zero():
    assert summarise([rollout("infrastructure")])["reward_mean"] == 0.0
    assert summarise([])["num_rollouts"] == 0


def test_info_is_averaged_over_the_rollouts_that_gave_it():
    means = info_means(
        [
            rollout("completed", reward=1.0, info={"tool_calls": 2, "seconds": 0.5, "path": "a", "solved": True}),
            rollout("failed", info={"tool_calls": 0}),
            rollout("completed", reward=1.0),
        ]
    )
    assert means == {"tool_calls": 1.0, "seconds": 0.5}  # text and truth values have no mean


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
    return Evaluation(pool, tasks, num_samples=2, journal=journal, stall=Stall())


async def test_every_task_is_rolled_out_so_often_and_one_row_is_written(evaluation, pool, journal, make_workers):
    rewards = iter([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    workers = make_workers(pool)
    serving = asyncio.create_task(workers.serve(lambda _: {"reward": next(rewards), "info": {"calls": 2}}))
    row = await evaluation(step=4, policy_version=4)
    serving.cancel()
    assert row == {
        "step": 4,
        "policy_version": 4,
        "reward_mean": 0.5,
        "num_rollouts": 6,
        "outcomes": {"completed": 6},
        "info_mean": {"calls": 2.0},
    }
    assert read_journal(journal.path) == [msgspec.json.decode(msgspec.json.encode(row))]


async def test_what_has_been_evaluated_is_known_to_a_later_process(evaluation, pool, journal, make_workers):
    assert not evaluation.is_done(3)
    serving = asyncio.create_task(make_workers(pool).serve(lambda _: {}))
    await evaluation(step=3, policy_version=3)
    serving.cancel()
    again = Evaluation(pool, [], num_samples=2, journal=journal, stall=Stall())
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
