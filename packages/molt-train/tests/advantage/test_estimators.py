"""Estimators against hand-computed numbers, plain-loop oracles in float64, and the properties that define them."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.train.advantage import ESTIMATORS, RolloutBatch, compute_advantages
from molt.train.config import GROUP_ESTIMATORS
from molt.train.errors import ConfigError

GROUPED = sorted(GROUP_ESTIMATORS)
EXACT = partial(pytest.approx, rel=1e-12, abs=1e-12)


def estimate(name, rewards, groups, num_actions=None, gamma=1.0):
    """The advantages of each rollout's tokens, as nested lists, in float64."""
    num_actions = num_actions or [1] * len(rewards)
    batch = RolloutBatch(
        rewards_R=torch.tensor(rewards, dtype=torch.float64),
        groups_R=torch.tensor(groups, dtype=torch.int64),
        num_actions_R=torch.tensor(num_actions, dtype=torch.int64),
    )
    flat = ESTIMATORS[name](batch, gamma=gamma)
    assert flat.dtype == torch.float64
    assert flat.shape == (sum(num_actions),)
    values = iter(flat.tolist())
    return [[next(values) for _ in range(n)] for n in num_actions]


def per_rollout(name, rewards, groups, **options):
    return [tokens[0] for tokens in estimate(name, rewards, groups, **options)]


# Oracles: another author's way to the same numbers, by loops over rollouts and tokens.


def oracle_group(name, rewards, groups):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) == 1 or max(members) == min(members):
            out.append(0.0)
            continue
        mean = math.fsum(members) / len(members)
        if name == "group_mean":
            out.append(reward - mean)
        elif name == "rloo":
            others = list(members)
            others.remove(reward)
            out.append(reward - math.fsum(others) / len(others))
        else:
            variance = math.fsum((r - mean) ** 2 for r in members) / (len(members) - 1)
            out.append((reward - mean) / (math.sqrt(variance) + 1e-6))
    return out


def oracle_reinforce_pp(rewards, num_actions, gamma):
    returns = []
    for reward, length in zip(rewards, num_actions, strict=True):
        running, backwards = 0.0, []
        for step in range(length):
            running = (reward if step == 0 else 0.0) + gamma * running
            backwards.append(running)
        returns.append(backwards[::-1])
    flat = [g for tokens in returns for g in tokens]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((g - mean) ** 2 for g in flat) / len(flat))
    return [[(g - mean) / (std + 1e-8) for g in tokens] for tokens in returns]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four(name, expected):
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, so std 1/2
    assert per_rollout(name, [1, 0, 0, 0], [0] * 4) == pytest.approx(expected, abs=5e-6)


def test_grpo_divides_by_the_sample_standard_deviation_plus_1e_6():
    # rewards 2, 4, 9: mean 5, squares 9 + 1 + 16 = 26, / 2 = 13; the population's would be sqrt(26 / 3)
    std = math.sqrt(13) + 1e-6
    assert per_rollout("grpo", [2, 4, 9], [5, 5, 5]) == EXACT([-3 / std, -1 / std, 4 / std])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.499997, -0.499999, -0.499999, -0.499999, 0, 0, 0]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25, 0, 0, 0]),
    ],
)
def test_three_groups_with_a_constant_one_and_a_singleton(name, expected):
    # The first six numbers are verl 0.9.1's; a group of one is 0 here, a baseline being undefined without others.
    rewards, groups = [1, 0, 0, 0, 0.5, 0.5, 3], [0, 0, 0, 0, 1, 1, 2]
    tokens = estimate(name, rewards, groups, num_actions=[2] * 7)
    assert [pair[0] for pair in tokens] == pytest.approx(expected, abs=1e-6)
    assert all(first == second for first, second in tokens)


def test_reinforce_pp_by_hand():
    # R = 1 over 3 tokens and 0 over 1, gamma 1/2: returns 1/4, 1/2, 1 and 0; mean 7/16;
    # squares (9 + 1 + 81 + 49) / 256 = 140 / 256, / 4 = 35 / 256
    std = math.sqrt(35) / 16 + 1e-8
    (long, short) = estimate("reinforce_pp", [1, 0], [0, 1], num_actions=[3, 1], gamma=0.5)
    assert long == EXACT([(1 / 4 - 7 / 16) / std, (1 / 2 - 7 / 16) / std, (1 - 7 / 16) / std])
    assert short == EXACT([-7 / 16 / std])


def test_reinforce_pp_whitens_over_tokens_not_rollouts():
    # R = 1 over 3 tokens and 0 over 1, no discount: mean 3/4, population std sqrt(3)/4
    (long, short) = estimate("reinforce_pp", [1, 0], [0, 0], num_actions=[3, 1])
    assert long == pytest.approx([1 / math.sqrt(3)] * 3)
    assert short == pytest.approx([-math.sqrt(3)])


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e9 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(name, value, size):
    # the floating mean of equal numbers need not be that number: 0.1 summed three times over 3 is not 0.1
    assert per_rollout(name, [value] * size, [3] * size) == [0.0] * size


def test_reinforce_pp_of_equal_returns_is_exactly_zero():
    assert estimate("reinforce_pp", [0.1] * 3, [0, 1, 2], num_actions=[2, 1, 3]) == [[0.0] * 2, [0.0], [0.0] * 3]


def test_reinforce_pp_does_not_blow_rounding_noise_up_to_unit_size():
    noisy = estimate("reinforce_pp", [0.3, 0.1 + 0.2], [0, 1])
    assert max(abs(a) for tokens in noisy for a in tokens) < 1e-7


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rollout_without_actions_counts_in_the_baseline_and_gets_no_token(name):
    tokens = estimate(name, [1.0, 0.0, 0.5], [0, 0, 0], num_actions=[2, 0, 3])
    assert [len(t) for t in tokens] == [2, 0, 3]
    if name == "group_mean":
        assert tokens == [[0.5, 0.5], [], [0.0] * 3]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_rollouts_give_no_advantages(name):
    assert estimate(name, [], []) == []
    assert estimate(name, [1.0, 2.0], [0, 0], num_actions=[0, 0]) == [[], []]


@pytest.mark.parametrize("name", GROUPED)
def test_a_discount_that_would_do_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=rf"algorithm.gamma is 0.9, but '{name}' discounts nothing; set it to 1.0"):
        estimate(name, [1.0, 0.0], [0, 0], gamma=0.9)


def test_numpy_in_and_float32_numpy_out():
    out = compute_advantages("rloo", np.array([1.0, 0.0]), np.array([4, 4]), np.array([1, 2]), 1.0)
    assert out.dtype == np.float32
    assert out.tolist() == [1.0, -1.0, -1.0]


def test_advantages_are_computed_in_float64_before_they_are_narrowed():
    # in float32 these two rewards are one number, and the group would be constant
    out = compute_advantages("grpo", np.array([1e8, 1e8 + 1]), np.array([0, 0]), np.array([1, 1]), 1.0)
    assert out.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


rewards_and_groups = st.lists(st.tuples(st.integers(-8, 8).map(lambda x: x / 4), st.integers(0, 3)), min_size=1)


@given(rewards_and_groups)
def test_group_estimators_equal_the_loops(pairs):
    rewards, groups = map(list, zip(*pairs, strict=True))
    for name in GROUPED:
        assert per_rollout(name, rewards, groups) == pytest.approx(oracle_group(name, rewards, groups), abs=1e-9)


@given(
    st.lists(st.tuples(st.integers(-4, 4).map(float), st.integers(1, 5)), min_size=2),
    st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_reinforce_pp_equals_the_loops(pairs, gamma):
    rewards, num_actions = map(list, zip(*pairs, strict=True))
    got = estimate("reinforce_pp", rewards, [0] * len(rewards), num_actions=num_actions, gamma=gamma)
    for mine, theirs in zip(got, oracle_reinforce_pp(rewards, num_actions, gamma), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-7)


@given(rewards_and_groups, st.randoms())
def test_the_order_of_rollouts_and_the_names_of_groups_do_not_matter(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    rewards, groups = map(list, zip(*pairs, strict=True))
    num_actions = [1 + i % 3 for i in range(len(pairs))]
    for name in ESTIMATORS:
        straight = estimate(name, rewards, groups, num_actions=num_actions)
        shuffled = estimate(
            name,
            [rewards[i] for i in order],
            [-7 * groups[i] for i in order],
            num_actions=[num_actions[i] for i in order],
        )
        for position, i in enumerate(order):
            assert shuffled[position] == pytest.approx(straight[i], abs=1e-9)


@given(rewards_and_groups, st.sampled_from([0.5, 2.0, 10.0]), st.integers(-5, 5))
def test_scaling_and_shifting_the_rewards(pairs, scale, shift):
    rewards, groups = map(list, zip(*pairs, strict=True))
    moved = [scale * r + shift for r in rewards]
    for name in ("group_mean", "rloo"):
        expected = [scale * a for a in per_rollout(name, rewards, groups)]
        assert per_rollout(name, moved, groups) == pytest.approx(expected, abs=1e-9)
    # up to epsilon, which is 1e-5 of the smallest standard deviation here
    assert per_rollout("grpo", moved, groups) == pytest.approx(per_rollout("grpo", rewards, groups), rel=1e-4, abs=1e-4)


@given(rewards_and_groups)
def test_group_means_sum_to_zero_and_rloo_is_them_rescaled(pairs):
    rewards, groups = map(list, zip(*pairs, strict=True))
    centred, left_out = (per_rollout(name, rewards, groups) for name in ("group_mean", "rloo"))
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        assert sum(centred[i] for i in members) == pytest.approx(0.0, abs=1e-9)
        n = len(members)
        if n > 1:
            assert [left_out[i] for i in members] == pytest.approx([n / (n - 1) * centred[i] for i in members])


@given(st.lists(st.tuples(st.integers(-4, 4).map(float), st.integers(1, 5)), min_size=2))
def test_whitened_advantages_have_mean_zero_and_unit_population_variance(pairs):
    rewards, num_actions = map(list, zip(*pairs, strict=True))
    flat = [a for t in estimate("reinforce_pp", rewards, [0] * len(rewards), num_actions=num_actions) for a in t]
    assert sum(flat) == pytest.approx(0.0, abs=1e-7)
    if len(set(rewards)) > 1:
        assert sum(a * a for a in flat) / len(flat) == pytest.approx(1.0, abs=1e-6)
