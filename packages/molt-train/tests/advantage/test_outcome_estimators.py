"""Estimators that give all tokens of a rollout one advantage, against numbers worked out by hand."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math
from functools import partial

import pytest

from molt.train.errors import ConfigError

from .estimates import estimate
from .oracles import rollout

EXACT = partial(pytest.approx, rel=1e-12, abs=1e-12)
GROUPED = ("group_mean", "grpo", "rloo", "reinforce_pp_baseline")
OUTCOME = (*GROUPED, "batch_mean")


def per_rollout(name, rewards, groups):
    tokens = estimate(name, [rollout(r, g, 2) for r, g in zip(rewards, groups, strict=True)])
    assert all(first == second for first, second in tokens)
    return [first for first, _ in tokens]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25]),
        ("batch_mean", [0.75, -0.25, -0.25, -0.25]),
        # the population's deviation is sqrt(3/16), three quarters over it sqrt(3)
        ("reinforce_pp_baseline", [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
    ],
)
def test_one_success_in_four(name, expected):
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, so std 1/2
    assert per_rollout(name, [1, 0, 0, 0], [0] * 4) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # rewards 2, 4, 9: mean 5; means of the others 6.5, 5.5, 3; squares 9 + 1 + 16 = 26
        ("group_mean", [-3, -1, 4]),
        ("batch_mean", [-3, -1, 4]),
        ("rloo", [-4.5, -1.5, 6]),
        ("grpo", [x / (math.sqrt(26 / 2) + 1e-6) for x in (-3, -1, 4)]),
        ("reinforce_pp_baseline", [x / (math.sqrt(26 / 3) + 1e-8) for x in (-3, -1, 4)]),
    ],
)
def test_three_rewards(name, expected):
    assert per_rollout(name, [2, 4, 9], [5, 5, 5]) == EXACT(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # groups [2, 0] and [1, 5], interleaved: means 1 and 3, that of the window 2
        ("group_mean", [1, -2, -1, 2]),
        ("rloo", [2, -4, -2, 4]),
        ("grpo", [x / (abs(x) * math.sqrt(2) + 1e-6) for x in (1, -2, -1, 2)]),
        ("batch_mean", [0, -1, -2, 3]),
        ("reinforce_pp_baseline", [x / (math.sqrt(2.5) + 1e-8) for x in (1, -2, -1, 2)]),
    ],
)
def test_two_groups(name, expected):
    assert per_rollout(name, [2, 1, 0, 5], [7, 3, 7, 3]) == EXACT(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.499997, -0.499999, -0.499999, -0.499999, 0, 0, 0]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25, 0, 0, 0]),
        ("reinforce_pp_baseline", [3 / math.sqrt(2), *[-1 / math.sqrt(2)] * 3, 0, 0, 0]),
    ],
)
def test_three_groups_with_a_constant_one_and_a_singleton(name, expected):
    # All but the last number are verl 0.9.1's (the whitened ones without its singleton, which moves the others);
    # a group of one is 0 here, a baseline being undefined without others.
    assert per_rollout(name, [1, 0, 0, 0, 0.5, 0.5, 3], [0, 0, 0, 0, 1, 1, 2]) == pytest.approx(expected, abs=1e-6)


def test_reinforce_pp_baseline_whitens_over_tokens_not_rollouts():
    # +1/2 over 3 tokens, -1/2 over 1, and 0 over 4: mean 1/8, mean square 1/8, so variance 7/64
    tokens = estimate("reinforce_pp_baseline", [rollout(1, 0, 3), rollout(0, 0, 1), rollout(2, 1, 2), rollout(2, 1, 2)])
    long, short, *equal = [[x * math.sqrt(7) for x in one] for one in tokens]
    assert long == pytest.approx([3.0] * 3)
    assert short == pytest.approx([-5.0])
    assert equal == [pytest.approx([-1.0] * 2)] * 2


def test_batch_mean_counts_a_rollout_once_whatever_its_tokens():
    # 3, 0 and 0 over 1, 9 and 0 tokens: the mean is 1, not that of the tokens
    assert estimate("batch_mean", [rollout(3, 0, 1), rollout(0, 1, 9), rollout(0, 2, 0)]) == [[2.0], [-1.0] * 9, []]


def test_the_kl_penalty_of_all_tokens_is_taken_from_the_outcome_before_the_baseline():
    # outcomes 1 - 3/4 = 1/4 and 0 - (1/4 - 1/2) = 1/4 in the first group; 2 - 1 and 0 in the second
    pair = [rollout(1, 0, penalties=[0.5, 0.25]), rollout(0, 0, penalties=[0.25, -0.5])]
    other = [rollout(2, 1, penalties=[1.0]), rollout(0, 1, penalties=[0.0])]
    assert estimate("group_mean", pair + other) == [[0.0, 0.0], [0.0, 0.0], [0.5], [-0.5]]
    assert estimate("rloo", pair + other) == [[0.0, 0.0], [0.0, 0.0], [1.0], [-1.0]]
    assert estimate("batch_mean", pair + other) == [[-0.125] * 2, [-0.125] * 2, [0.625], [-0.375]]


@pytest.mark.parametrize("name", OUTCOME)
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e9 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(name, value, size):
    # the floating mean of equal numbers need not be that number: 0.1 summed three times over 3 is not 0.1
    assert per_rollout(name, [value] * size, [3] * size) == [0.0] * size


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("reward", [0.1, 3.0, -1e9])
def test_a_group_of_one_is_exactly_zero_beside_others(name, reward):
    tokens = estimate(name, [rollout(1, 0, 2), rollout(reward, 1, 3), rollout(0, 0, 5)])
    assert tokens[1] == [0.0] * 3
    assert tokens[0] != [0.0] * 2


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_leaves_the_others_as_they_are(name):
    pair = [rollout(1, 0, 2), rollout(0, 0, 5)]
    assert estimate(name, [*pair, rollout(7.0, 1, 4)])[:2] == estimate(name, pair)


def test_a_window_of_one_rollout_has_no_batch_mean_to_beat():
    assert estimate("batch_mean", [rollout(0.3, 0, 2)]) == [[0.0, 0.0]]


@pytest.mark.parametrize("name", OUTCOME)
def test_a_discount_that_would_do_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=rf"algorithm.gamma is 0.9, but '{name}' discounts nothing; set it to 1.0"):
        estimate(name, [rollout(1.0), rollout(0.0)], gamma=0.9)
