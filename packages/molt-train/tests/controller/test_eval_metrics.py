"""What an evaluation's row says: each number against one computed by hand or by enumeration."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.config import EvalConfig
from molt.train.controller.eval_metrics import Sample, has_passed, info_means, pass_at_k, powers, score_of, summarise
from molt.train.records.rollout import Outcome


def sample(task="t", kind="completed", *, reward=None, score=None, info=None, **fields):
    return Sample(task_id=task, outcome=Outcome(kind=kind, reward=reward, score=score, info=info or {}), **fields)


def rewarded(task, *rewards, **fields):
    return [sample(task, reward=float(reward), **fields) for reward in rewards]


@given(st.data())
def test_pass_at_k_is_the_share_of_all_ways_to_choose_k_rollouts_of_which_one_passed(data):
    n = data.draw(st.integers(1, 9))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    chosen = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == pytest.approx(1 / 4)
    assert pass_at_k(4, 1, 2) == pytest.approx(1 - 3 / 6)
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(5, 0, 3) == 0.0
    assert pass_at_k(5, 3, 3) == 1.0  # fewer than three failed
    assert 0.0 < pass_at_k(10_000, 3, 5_000) < 1.0  # the binomials have 3,000 digits


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_of_fewer_rollouts_than_k_is_not_defined(n, c, k):
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_k_doubles_up_to_the_samples(samples, ks):
    assert powers(samples) == ks


def test_a_row_by_hand():
    samples = [*rewarded("a", 1, 0, 0, 1), *rewarded("b", 0, 0, 0, 0), *rewarded("c", 0.5, 1, 0, 0)]
    row = summarise(samples, EvalConfig(samples=4))
    assert row["reward_mean"] == row["avg@4"] == pytest.approx(3.5 / 12)
    assert row["pass@1"] == pytest.approx((2 / 4 + 0 + 1 / 4) / 3)  # 0.5 is below the threshold
    assert row["pass@2"] == pytest.approx((5 / 6 + 0 + 3 / 6) / 3)
    assert row["pass@4"] == pytest.approx(2 / 3)
    mean = 3.5 / 12
    variance = sum((x - mean) ** 2 for x in (0.5, 0.0, 0.375)) / 2
    assert row["standard_error"] == pytest.approx(math.sqrt(variance / 3))
    assert (row["num_tasks"], row["num_rollouts"], row["num_missing"]) == (3, 12, 0)
    assert "datasets" not in row


def test_what_was_lost_to_infrastructure_is_missing_and_counts_nowhere():
    samples = [*rewarded("a", 1, 0), sample("a", "infrastructure", info={"calls": 9}), sample("b", "infrastructure")]
    row = summarise(samples, EvalConfig(samples=2))
    assert row["reward_mean"] == row["avg@2"] == row["pass@1"] == 0.5
    assert row["pass@2"] == 1.0
    assert (row["num_tasks"], row["num_rollouts"], row["num_missing"]) == (2, 2, 2)
    assert row["outcomes"] == {"completed": 2, "infrastructure": 2}


def test_a_row_with_fewer_rollouts_than_k_has_no_part_in_pass_at_k():
    samples = [*rewarded("a", 1), sample("a", "infrastructure"), *rewarded("b", 0, 0)]
    row = summarise(samples, EvalConfig(samples=2))
    assert row["pass@1"] == 0.5
    assert row["pass@2"] == 0.0
    assert row["avg@2"] == 0.5  # of rows, of which the one with one rollout is as much as the other
    assert row["reward_mean"] == pytest.approx(1 / 3)  # of rollouts


def test_failed_and_late_rollouts_have_not_passed_whatever_the_threshold():
    samples = [sample("a", "failed"), sample("a", "timeout"), *rewarded("a", 0), sample("a", "truncated", reward=-1.0)]
    row = summarise(samples, EvalConfig(samples=4, threshold=-2.0))
    assert row["pass@1"] == 0.5
    assert row["reward_mean"] == -0.25
    assert row["outcomes"] == {"failed": 1, "timeout": 1, "completed": 1, "truncated": 1}
    assert not has_passed(Outcome(kind="failed"), -2.0)


def test_a_score_stands_for_the_reward_where_an_agent_gives_one():
    assert score_of(Outcome(kind="completed", reward=0.0, score=1.0)) == 1.0
    assert score_of(Outcome(kind="completed", reward=1.0, score=0.0)) == 0.0
    assert score_of(Outcome(kind="truncated", reward=0.5)) == 0.5


def test_nothing_to_count_is_a_mean_of_zero_and_no_estimate():
    row = summarise([sample("a", "infrastructure")], EvalConfig())
    assert (row["reward_mean"], row["num_rollouts"]) == (0.0, 0)
    assert row["pass@1"] is row["avg@1"] is row["standard_error"] is row["oldest_version"] is None


def test_data_sets_are_reported_one_by_one_and_together():
    samples = [*rewarded("m/0", 1, 1, dataset="m"), *rewarded("c/0", 0, 0, dataset="c"), *rewarded("c/1", 1, 0)]
    samples = [*samples[:4], *rewarded("c/1", 1, 0, dataset="c")]
    row = summarise(samples, EvalConfig(samples=2))
    assert row["reward_mean"] == 0.5
    assert list(row["datasets"]) == ["c", "m"]
    assert row["datasets"]["m"]["pass@2"] == 1.0
    assert row["datasets"]["c"]["reward_mean"] == 0.25
    assert row["datasets"]["c"]["num_tasks"] == 2


def test_versions_and_tokens():
    samples = [
        sample("a", reward=1.0, num_action_tokens=10, oldest_version=3, newest_version=3),
        sample("a", reward=1.0, num_action_tokens=20, oldest_version=3, newest_version=5),
        sample("b", "failed"),
    ]
    row = summarise(samples, EvalConfig())
    assert (row["oldest_version"], row["newest_version"]) == (3, 5)
    assert row["num_action_tokens_mean"] == 10.0


def test_info_is_averaged_over_the_rollouts_that_gave_it():
    means = info_means(
        [
            sample(reward=1.0, info={"tool_calls": 2, "seconds": 0.5, "path": "a", "solved": True}),
            sample(kind="failed", info={"tool_calls": 0}),
            sample(reward=1.0),
        ]
    )
    assert means == {"tool_calls": 1.0, "seconds": 0.5}  # text and truth values have no mean
