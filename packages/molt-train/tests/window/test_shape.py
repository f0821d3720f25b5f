"""Rewards as they count: clip range, overlong ramp once a rollout, truncated rollouts, and what never gets a reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.config import RewardConfig
from molt.train.window.shape import overlong_penalty, shape


def segments(*num_actions):
    """Each has as many prompt and tool tokens again, which no penalty counts, and 50 more."""
    return [(2 * n + 50, n, [0]) for n in num_actions]


def rewards(groups):
    return [[rollout.outcome.reward for rollout in group.rollouts] for group in groups]


def shape_one(make_group, settings, reward, num_actions=(10,), kind="completed"):
    groups, counts = shape([make_group("g", (reward, segments(*num_actions), kind))], settings)
    return rewards(groups)[0], counts


def test_by_default_nothing_changes(make_group):
    groups = [make_group("a", (1.0, segments(10_000)), (-3.0, []), (None, segments(5), "failed"))]
    assert shape(groups, RewardConfig()) == (groups, {})


@pytest.mark.parametrize(
    ("low", "high", "reward", "expected"),
    [
        (-1.0, 1.0, 7.0, 1.0),
        (-1.0, 1.0, -7.0, -1.0),
        (-1.0, 1.0, 0.5, 0.5),
        (-1.0, 1.0, 1.0, 1.0),
        (None, 1.0, -7.0, -7.0),
        (0.0, None, 7.0, 7.0),
        (0.0, None, -0.5, 0.0),
    ],
)
def test_rewards_outside_the_range_count_as_its_ends(make_group, low, high, reward, expected):
    settings = RewardConfig(clip_low=low, clip_high=high)
    changed = {"clipped": 1} if reward != expected else {}
    assert shape_one(make_group, settings, reward) == ([expected], changed)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (90, 0.5), (100, 1.0), (120, 1.0), (10_000, 1.0)])
def test_the_overlong_ramp_of_dapo(make_group, length, penalty):
    settings = RewardConfig(overlong_length=100, overlong_ramp=20)
    assert overlong_penalty(length, settings) == penalty
    counts = {"overlong": 1} if penalty else {}
    assert shape_one(make_group, settings, 1.0, [length]) == ([1.0 - penalty], counts)


@pytest.mark.parametrize(("length", "penalty"), [(16_384, 0.0), (17_408, 0.25), (20_480, 1.0), (20_481, 1.0)])
def test_the_overlong_ramp_with_the_papers_numbers(length, penalty):
    assert overlong_penalty(length, RewardConfig(overlong_length=20_480, overlong_ramp=4096)) == penalty


@pytest.mark.parametrize(("length", "penalty"), [(99, 0.0), (100, 0.0), (101, 1.0)])
def test_without_a_ramp_the_penalty_is_a_step_beyond_the_length(length, penalty):
    assert overlong_penalty(length, RewardConfig(overlong_length=100)) == penalty


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 400), st.integers(0, 400))
def test_a_longer_rollout_never_pays_less_and_none_more_than_one(shorter, longer, length, ramp):
    settings = RewardConfig(overlong_length=length, overlong_ramp=min(ramp, length))
    low, high = (overlong_penalty(n, settings) for n in sorted((shorter, longer)))
    assert 0.0 <= low <= high <= 1.0


def test_the_penalty_is_taken_once_by_the_longest_segment(make_group):
    settings = RewardConfig(overlong_length=100, overlong_ramp=20)
    # 85 -> 1/4, 90 -> 1/2; their sum would be 3/4, and 60 + 60 is no length at all
    assert shape_one(make_group, settings, 1.0, [85, 90, 85]) == ([0.5], {"overlong": 1})
    assert shape_one(make_group, settings, 1.0, [60, 60]) == ([1.0], {})
    assert shape_one(make_group, settings, 1.0, []) == ([1.0], {})


def test_the_clip_range_does_not_hide_the_penalty(make_group):
    settings = RewardConfig(clip_low=0.0, clip_high=1.0, overlong_length=100, overlong_ramp=20)
    assert shape_one(make_group, settings, 3.0, [90]) == ([0.5], {"clipped": 1, "overlong": 1})
    assert shape_one(make_group, settings, 0.0, [120]) == ([-1.0], {"overlong": 1})


def test_truncated_rollouts_are_kept_or_count_as_zero(make_group):
    group = make_group("g", (1.0, segments(5)), (0.75, segments(5), "truncated"), (0.0, segments(5)))

    def treated(policy):
        groups, counts = shape([group], RewardConfig(truncated=policy, clip_low=0.25))
        return rewards(groups), counts

    assert treated("keep") == ([[1.0, 0.75, 0.25]], {"clipped": 1})
    # zero is what it says: not what the clip makes of it
    assert treated("zero") == ([[1.0, 0.0, 0.25]], {"clipped": 1, "truncated_zero": 1})


def test_a_truncated_rollout_that_counts_as_zero_pays_for_its_length(make_group):
    settings = RewardConfig(truncated="zero", overlong_length=100, overlong_ramp=20)
    expected = ([-1.0], {"truncated_zero": 1, "overlong": 1})
    assert shape_one(make_group, settings, 1.0, [120], "truncated") == expected


@pytest.mark.parametrize("kind", ["infrastructure", "failed", "timeout"])
@pytest.mark.parametrize("truncated", ["keep", "zero"])
def test_what_has_no_reward_gets_none_and_no_penalty(make_group, kind, truncated):
    settings = RewardConfig(clip_low=0.5, clip_high=1.0, overlong_length=10, truncated=truncated)
    assert shape_one(make_group, settings, None, [500], kind) == ([None], {})


def test_the_groups_given_are_not_changed_and_counts_add_up_over_groups(make_group):
    groups = [make_group(name, (5.0, segments(200)), (0.5, segments(5))) for name in ("a", "b")]
    shaped, counts = shape(groups, RewardConfig(clip_high=1.0, overlong_length=100))
    assert rewards(groups) == [[5.0, 0.5]] * 2
    assert rewards(shaped) == [[0.0, 0.5]] * 2
    assert counts == {"clipped": 2, "overlong": 2}
    assert [g.group_id for g in shaped] == ["a", "b"]
    assert [r.rollout_id for r in shaped[0].rollouts] == [r.rollout_id for r in groups[0].rollouts]
    assert shape(groups, RewardConfig(clip_high=1.0, overlong_length=100)) == (shaped, counts)
