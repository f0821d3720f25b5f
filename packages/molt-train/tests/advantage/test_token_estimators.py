"""Estimators that judge each token, against numbers worked out by hand."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.advantage import ESTIMATORS, EstimatorSettings, RolloutBatch
from molt.train.errors import ConfigError

from .estimates import batch_of, estimate, estimate_returns
from .oracles import rollout

REWARDS = [0.0, 0.0, 0.0, 0.0, 1.0]
MASK = [1, 1, 0, 0, 1]


def close(numbers):
    return pytest.approx(numbers, rel=1e-12, abs=1e-12)


# REINFORCE


def test_reinforce_is_the_reward_itself():
    assert estimate("reinforce", [rollout(1), rollout(0), rollout(0), rollout(0)]) == [[1.0], [0.0], [0.0], [0.0]]
    assert estimate("reinforce", [rollout(0.1, 0, 3), rollout(-2, 0, 1)]) == [[0.1] * 3, [-2.0]]


def test_reinforce_discounts_over_action_tokens_and_not_over_the_tools_answer():
    # rewards 0 0 0 0 1 of a row whose third and fourth tokens are a tool's: through them it would be 1/16, 1/8, 1
    assert estimate("reinforce", [rollout(REWARDS[-1], 0, sum(MASK))], gamma=0.5) == [[0.25, 0.5, 1.0]]


def test_reinforce_keeps_rollouts_apart():
    assert estimate("reinforce", [rollout(4, 0, 2), rollout(-1, 0, 3)], gamma=0.5) == [[2.0, 4.0], [-0.25, -0.5, -1.0]]


def test_reinforce_takes_the_kl_penalty_from_the_reward_of_its_token():
    # 2 - .3 = 1.7; .9 * 1.7 - .2 = 1.33; .9 * 1.33 - .1 = 1.097
    assert estimate("reinforce", [rollout(2, penalties=[0.1, 0.2, 0.3])], gamma=0.9) == [close([1.097, 1.33, 1.7])]


def test_reinforce_over_a_thousand_tokens():
    (tokens,) = estimate("reinforce", [rollout(1, 0, 1000)], gamma=0.99)
    assert tokens == pytest.approx([0.99 ** (999 - t) for t in range(1000)], rel=1e-12)


# REINFORCE++


def test_reinforce_pp_by_hand():
    # R = 1 over 3 tokens and 0 over 1, gamma 1/2: returns 1/4, 1/2, 1 and 0; mean 7/16;
    # squares (9 + 1 + 81 + 49) / 256 = 140 / 256, / 4 = 35 / 256
    std = math.sqrt(35) / 16 + 1e-8
    (long, short) = estimate("reinforce_pp", [rollout(1, 0, 3), rollout(0, 1, 1)], gamma=0.5)
    assert long == close([(1 / 4 - 7 / 16) / std, (1 / 2 - 7 / 16) / std, (1 - 7 / 16) / std])
    assert short == close([-7 / 16 / std])


def test_reinforce_pp_whitens_over_tokens_not_rollouts():
    # R = 1 over 3 tokens and 0 over 1, no discount: mean 3/4, population std sqrt(3)/4
    (long, short) = estimate("reinforce_pp", [rollout(1, 0, 3), rollout(0, 0, 1)])
    assert long == pytest.approx([1 / math.sqrt(3)] * 3)
    assert short == pytest.approx([-math.sqrt(3)])


def test_reinforce_pp_takes_penalties_from_token_rewards():
    # returns: 1 - 1 = 0 and 1; and 0 - 1 = -1; population std sqrt(2/3)
    tokens = estimate("reinforce_pp", [rollout(1, penalties=[1.0, 0.0]), rollout(0, penalties=[1.0])])
    assert [x * math.sqrt(2 / 3) for one in tokens for x in one] == pytest.approx([0.0, 1.0, -1.0], abs=1e-7)


def test_reinforce_pp_of_equal_returns_is_exactly_zero():
    assert estimate("reinforce_pp", [rollout(0.1, g, 1 + g) for g in range(3)]) == [[0.0], [0.0] * 2, [0.0] * 3]


def test_reinforce_pp_does_not_blow_rounding_noise_up_to_unit_size():
    noisy = estimate("reinforce_pp", [rollout(0.3), rollout(0.1 + 0.2)])
    assert max(abs(a) for tokens in noisy for a in tokens) < 1e-7


# GAE


def test_gae_passes_over_the_tools_answer_without_an_end():
    # by hand, and verl 0.9.1: .7; 0 + .9 * .3 - .4 + .72 * .7 = .374; 0 + .9 * .4 - .5 + .72 * .374 = .12928.
    # An end at the tool call would make the second 0 - .4.
    values = [v for v, action in zip([0.5, 0.4, 9, 9, 0.3], MASK, strict=True) if action]
    one = rollout(REWARDS[-1], values=values)
    assert estimate_returns([one], gamma=0.9, lam=0.8) == [close([0.62928, 0.774, 1.0])]
    mean = (0.12928 + 0.374 + 0.7) / 3
    std = math.sqrt(((0.12928 - mean) ** 2 + (0.374 - mean) ** 2 + (0.7 - mean) ** 2) / 3) + 1e-8
    expected = [(x - mean) / std for x in (0.12928, 0.374, 0.7)]
    assert estimate("gae", [one], gamma=0.9, lam=0.8) == [close(expected)]


def test_gae_of_two_rollouts_does_not_look_into_the_next_one():
    # 4 - 2 = 2 and .5 * 2 - 1 + .25 * 2 = .5; then 0 - 1 = -1. Mean 1/2, squares 0 + 9/4 + 9/4, so std sqrt(3/2)
    rollouts = [rollout(4, values=[1.0, 2.0]), rollout(0, values=[1.0])]
    assert estimate_returns(rollouts, gamma=0.5, lam=0.5) == [[1.5, 4.0], [0.0]]
    tokens = estimate("gae", rollouts, gamma=0.5, lam=0.5)
    assert [x * math.sqrt(1.5) for one in tokens for x in one] == pytest.approx([0.0, 1.5, -1.5], abs=1e-7)


def test_gae_takes_penalties_from_token_rewards():
    # deltas -1/2 and 1 - 1/4 = 3/4; -1/2 + 3/8 = -1/8
    assert estimate_returns([rollout(1, penalties=[0.5, 0.25])], lam=0.5) == [[-0.125, 0.75]]


def test_gae_values_nothing_after_the_last_action():
    # V = 5 on the last token is no bootstrap: with reward 1 its return is 1
    assert estimate_returns([rollout(1, values=[0.0, 5.0])], gamma=0.9, lam=0.0) == [[4.5, 1.0]]


def masked_gae(rewards, mask, values, gamma, lam):
    """Over the whole row, tool tokens included: they hand the next value and the running sum on as they are."""
    running = next_value = 0.0
    out = [0.0] * len(mask)
    for t in range(len(mask) - 1, -1, -1):
        if mask[t]:
            running = rewards[t] + gamma * next_value - values[t] + gamma * lam * running
            next_value = values[t]
            out[t] = running + values[t]
    return out


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-8, 8).map(lambda x: x / 4)), min_size=1, max_size=30),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.8, 1.0]),
)
def test_returns_equal_those_of_a_row_with_tool_tokens_in_it(row, gamma, lam):
    mask, values = [action for action, _ in row], [value for _, value in row]
    rewards = [0.0] * len(row)
    if any(mask):
        rewards[max(t for t, action in enumerate(mask) if action)] = 1.0
    expected = [x for x, action in zip(masked_gae(rewards, mask, values, gamma, lam), mask, strict=True) if action]
    one = rollout(1.0, num_actions=0, values=[v for v, action in zip(values, mask, strict=True) if action])
    assert estimate_returns([one], gamma=gamma, lam=lam) == [pytest.approx(expected, abs=1e-9)]


dyadic = st.integers(-8, 8).map(lambda x: x / 8)


@given(st.lists(st.tuples(dyadic, st.lists(st.tuples(dyadic, dyadic), max_size=6)), min_size=1, max_size=5))
def test_without_discounts_the_advantage_is_return_minus_value(drawn):
    rollouts = [rollout(r, num_actions=0, values=[v for v, _ in t], penalties=[p for _, p in t]) for r, t in drawn]
    returns = estimate("reinforce", rollouts)
    assert estimate_returns(rollouts) == [pytest.approx(tokens, abs=1e-12) for tokens in returns]
    flat = [
        g - v for tokens, one in zip(returns, rollouts, strict=True) for g, v in zip(tokens, one["values"], strict=True)
    ]
    if flat:
        mean = math.fsum(flat) / len(flat)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / len(flat)) + 1e-8
        got = [x for tokens in estimate("gae", rollouts) for x in tokens]
        assert got == pytest.approx([(x - mean) / std for x in flat], abs=1e-6)


def test_gae_without_values_is_refused():
    batch = batch_of([rollout(1.0)])
    without = RolloutBatch(rewards_R=batch.rewards_R, groups_R=batch.groups_R, num_actions_R=batch.num_actions_R)
    with pytest.raises(ValueError, match="gae needs the critic's values"):
        ESTIMATORS["gae"](without, EstimatorSettings())


# On-policy distillation


def test_distillation_is_the_scaled_gap_to_the_teacher_whatever_the_reward():
    gaps = [0.5, -1.0, 0.25]
    assert estimate("distillation", [rollout(9, gaps=gaps)], coef=2.0) == [[1.0, -2.0, 0.5]]
    assert estimate("distillation", [rollout(0, gaps=gaps), rollout(1, gaps=[0.5])]) == [gaps, [0.5]]


def test_distillation_refuses_a_discount_and_wants_a_teacher():
    with pytest.raises(ConfigError, match=r"algorithm.gamma is 0.5, but 'distillation' discounts nothing"):
        estimate("distillation", [rollout(1.0)], gamma=0.5)
    batch = batch_of([rollout(1.0)])
    without = RolloutBatch(rewards_R=batch.rewards_R, groups_R=batch.groups_R, num_actions_R=batch.num_actions_R)
    with pytest.raises(ValueError, match="distillation needs the teacher's log-probs"):
        ESTIMATORS["distillation"](without, EstimatorSettings())
