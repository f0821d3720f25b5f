"""Which rollouts count: outcomes stay typed, and every rollout left out is counted under a reason."""

import pytest

from molt.train.config import PoolConfig
from molt.train.window import equal_reward, usable

SEGMENT = (10, 4, [0])


@pytest.fixture
def mixed(make_group):
    return make_group(
        "g",
        (1.0, [SEGMENT]),
        (0.25, [SEGMENT], "truncated"),
        (None, [SEGMENT], "failed"),
        (None, [SEGMENT], "timeout"),
        (None, [SEGMENT], "infrastructure"),
    )


def rewards(result):
    return [[rollout.outcome.reward for rollout in group.rollouts] for group in result.kept]


def test_failed_and_timed_out_rollouts_are_dropped_by_name(mixed):
    result = usable([mixed], estimator_needs_group=True, outcomes=PoolConfig())
    assert rewards(result) == [[1.0, 0.25]]
    assert result.dropped == {"failed": 1, "timeout": 1, "infrastructure": 1}


def test_or_they_count_as_reward_zero_and_keep_their_outcome(mixed):
    result = usable([mixed], estimator_needs_group=True, outcomes=PoolConfig(on_failed="train", on_timeout="train"))
    assert rewards(result) == [[1.0, 0.25, 0.0, 0.0]]
    assert [r.outcome.kind for r in result.kept[0].rollouts] == ["completed", "truncated", "failed", "timeout"]
    assert result.dropped == {"infrastructure": 1}
    assert [len(r.experiences) for r in result.kept[0].rollouts] == [1] * 4


@pytest.mark.parametrize("on_infrastructure", ["retry", "mask", "fail_group"])
def test_infrastructure_never_counts(make_group, on_infrastructure):
    group = make_group("g", (None, [SEGMENT], "infrastructure"), (None, [], "infrastructure"))
    result = usable(
        [group],
        estimator_needs_group=False,
        outcomes=PoolConfig(on_failed="train", on_infrastructure=on_infrastructure),
    )
    assert (result.kept, result.dropped) == ([], {"infrastructure": 2})


@pytest.mark.parametrize("policy", ["mask", "retry", "fail_group"])
def test_truncated_rollouts_are_left_out_unless_they_are_trained(mixed, policy):
    result = usable([mixed], estimator_needs_group=False, outcomes=PoolConfig(on_truncated=policy))
    assert rewards(result) == [[1.0]]
    assert result.dropped == {"truncated": 1, "failed": 1, "timeout": 1, "infrastructure": 1}


def test_a_group_left_with_one_is_dropped_only_where_the_estimator_compares(make_group):
    groups = [
        make_group("lonely", (1.0, [SEGMENT]), (None, [], "failed")),
        make_group("pair", (1.0, [SEGMENT]), (0.0, [SEGMENT])),
    ]
    compared = usable(groups, estimator_needs_group=True, outcomes=PoolConfig())
    assert [g.group_id for g in compared.kept] == ["pair"]
    assert compared.dropped == {"failed": 1, "group_too_small": 1}
    alone = usable(groups, estimator_needs_group=False, outcomes=PoolConfig())
    assert [g.group_id for g in alone.kept] == ["lonely", "pair"]
    assert alone.dropped == {"failed": 1}


def test_or_it_is_kept_where_singletons_are(make_group):
    lonely = make_group("lonely", (1.0, [SEGMENT]), (None, [], "failed"))
    kept = usable([lonely], estimator_needs_group=True, outcomes=PoolConfig(), singleton="keep")
    assert rewards(kept) == [[1.0]]
    assert kept.dropped == {"failed": 1}
    empty = usable([make_group("g", (None, [], "failed"))], estimator_needs_group=True, outcomes=PoolConfig())
    assert empty.kept == []


def test_a_rollout_without_actions_stays_in_its_groups_baseline(make_group):
    group = make_group("g", (1.0, [SEGMENT]), (0.0, []))
    result = usable([group], estimator_needs_group=True, outcomes=PoolConfig())
    assert result.kept == [group]
    assert result.dropped == {}


def test_the_groups_given_are_not_changed(mixed):
    before = [rollout.outcome.reward for rollout in mixed.rollouts]
    usable([mixed], estimator_needs_group=True, outcomes=PoolConfig(on_failed="train", on_timeout="train"))
    assert [rollout.outcome.reward for rollout in mixed.rollouts] == before


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [((0.5, 0.5, 0.5), 0.5), ((0.0, 0.0), 0.0), ((0.5, 0.5, 0.5000001), None), ((1.0,), None), ((0.0, 1.0), None)],
)
def test_a_group_teaches_nothing_where_two_or_more_rollouts_have_one_reward(make_group, rewards, equal):
    assert equal_reward(make_group("g", *((reward, [SEGMENT]) for reward in rewards))) == equal
