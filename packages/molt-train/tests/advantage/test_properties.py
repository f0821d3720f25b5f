"""What holds for every window: the estimators equal their loops, and the symmetries that define them."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.advantage import ESTIMATORS

from .estimates import estimate, estimate_returns
from .oracles import oracle, rollout, token_gae

DISCOUNTING = ("reinforce", "reinforce_pp", "gae")
BY_OUTCOME = ("group_mean", "grpo", "rloo", "batch_mean")

dyadic = st.integers(-8, 8).map(lambda x: x / 8)
"""Sums of these are exact, so that what is equal by mathematics is equal in both programs."""
windows = st.lists(
    st.builds(
        lambda reward, group, tokens: rollout(
            reward,
            group,
            0,
            penalties=[p for p, _, _ in tokens],
            values=[v for _, v, _ in tokens],
            gaps=[g for _, _, g in tokens],
        ),
        dyadic,
        st.integers(0, 3),
        st.lists(st.tuples(dyadic, dyadic, dyadic), max_size=5),
    ),
    min_size=1,
    max_size=10,
)
plain_windows = st.lists(st.builds(rollout, dyadic, st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=10)
discounts = st.sampled_from([0.5, 0.9, 0.99, 1.0])


def close(nested, tolerance=1e-6):
    return [pytest.approx(tokens, rel=tolerance, abs=tolerance) for tokens in nested]


def gamma_for(name, gamma):
    return gamma if name in DISCOUNTING else 1.0


@pytest.mark.parametrize("name", ESTIMATORS)
@given(window=windows, gamma=discounts, lam=discounts, coef=st.sampled_from([0.5, 1.0, 3.0]))
def test_every_estimator_equals_its_loops(name, window, gamma, lam, coef):
    options = {"gamma": gamma_for(name, gamma), "lam": lam, "coef": coef}
    assert estimate(name, window, **options) == close(oracle(name, window, **options))


@given(window=windows, gamma=discounts, lam=discounts)
def test_returns_are_advantages_plus_values_before_any_whitening(window, gamma, lam):
    expected = [[a + v for a, v in zip(token_gae(one, gamma, lam), one["values"], strict=True)] for one in window]
    assert estimate_returns(window, gamma=gamma, lam=lam) == close(expected, 1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(window=windows, gamma=discounts, random=st.randoms())
def test_the_order_of_rollouts_and_the_names_of_groups_do_not_matter(name, window, gamma, random):
    order = list(range(len(window)))
    random.shuffle(order)
    renamed = [window[i] | {"group": -7 * window[i]["group"]} for i in order]
    options = {"gamma": gamma_for(name, gamma), "lam": 0.9}
    straight = estimate(name, window, **options)
    assert estimate(name, renamed, **options) == close([straight[i] for i in order])


@given(window=plain_windows, scale=st.sampled_from([0.5, 2.0, 10.0]), shift=st.integers(-5, 5))
def test_scaling_and_shifting_the_rewards(window, scale, shift):
    moved = [one | {"reward": scale * one["reward"] + shift} for one in window]
    for name in ("group_mean", "rloo", "batch_mean"):
        expected = [[scale * a for a in tokens] for tokens in estimate(name, window)]
        assert estimate(name, moved) == close(expected, 1e-9)
    # up to epsilon, which is about 1e-5 of the smallest standard deviation here
    for name in ("grpo", "reinforce_pp_baseline", "reinforce_pp"):
        assert estimate(name, moved) == close(estimate(name, window), 1e-4)


@given(window=windows)
def test_group_means_sum_to_zero_and_rloo_is_them_rescaled(window):
    window = [one | {key: [*one[key], 0.0] for key in ("penalties", "values", "gaps")} for one in window]
    centred, left_out = ([tokens[0] for tokens in estimate(name, window)] for name in ("group_mean", "rloo"))
    for group in {one["group"] for one in window}:
        members = [i for i, one in enumerate(window) if one["group"] == group]
        assert sum(centred[i] for i in members) == pytest.approx(0.0, abs=1e-9)
        n = len(members)
        if n > 1:
            assert [left_out[i] for i in members] == pytest.approx([n / (n - 1) * centred[i] for i in members])
    assert sum(tokens[0] for tokens in estimate("batch_mean", window)) == pytest.approx(0.0, abs=1e-9)


@given(window=plain_windows, lengths=st.lists(st.integers(1, 9), min_size=10, max_size=10))
def test_a_rollout_counts_once_however_many_tokens_or_segments_it_has(window, lengths):
    other = [rollout(one["reward"], one["group"], length) for one, length in zip(window, lengths, strict=False)]
    for name in BY_OUTCOME:
        one_each = [tokens[0] for tokens in estimate(name, window)]
        assert estimate(name, other) == [[a] * n for a, n in zip(one_each, lengths, strict=False)]


@pytest.mark.parametrize("name", ["reinforce_pp", "gae", "reinforce_pp_baseline"])
@given(window=windows)
def test_whitened_advantages_have_mean_zero_and_unit_population_variance(name, window):
    # without singletons, which keep out of the whitening
    window = [one | {"group": 0} for one in [*window, rollout(1, 0, 2), rollout(0, 0, 1)]]
    flat = [a for tokens in estimate(name, window) for a in tokens]
    assert sum(flat) == pytest.approx(0.0, abs=1e-6)
    if any(flat):
        assert sum(a * a for a in flat) / len(flat) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rollout_without_actions_gets_no_token_and_still_counts(name):
    window = [rollout(1.0, 0, 2), rollout(0.0, 0, 0), rollout(0.5, 0, 3)]
    tokens = estimate(name, window)
    assert [len(t) for t in tokens] == [2, 0, 3]
    if name == "group_mean":
        assert tokens == [[0.5, 0.5], [], [0.0] * 3]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_rollouts_and_no_actions_give_no_advantages(name):
    assert estimate(name, []) == []
    assert estimate(name, [rollout(1.0, 0, 0), rollout(2.0, 0, 0)]) == [[], []]
