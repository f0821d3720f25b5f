"""Data sets that cannot be told apart, and keys about the choice of groups that would do nothing."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .refusals import refusal

A, B = '{name="a", path="a.jsonl"}', '{name="b", path="b.jsonl", weight=0.5, labels={gpu="1"}}'


@pytest.mark.parametrize("section", ["data", "eval"])
@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (f"[{A}, {A}]", "sets[1].name is 'a', the name of an earlier one: give each its own"),
        ('[{name="", path="a.jsonl"}]', "sets[0].name is ''; it must not be empty, nor have a slash"),
        ('[{name="a/b", path="a.jsonl"}]', "sets[0].name is 'a/b'; it must not be empty, nor have a slash"),
        (f'[{A}, {{name="b", path=""}}]', "sets[1].path is empty: give the JSONL file of 'b'"),
    ],
)
def test_each_data_set_has_a_name_of_its_own_and_a_file(section, sets, says):
    assert refusal(f"{section}.sets={sets}").startswith(f"{section}.{says}")


def test_several_good_data_sets_are_accepted():
    assert refusal(f"data.sets=[{A}, {B}]") is None


@pytest.mark.parametrize("section", ["data", "eval"])
def test_one_path_or_several_sets(section):
    assert refusal(f"{section}.path=rows.jsonl", f"{section}.sets=[{A}]") == (
        f"{section}.path is 'rows.jsonl', but {section}.sets names 1 data sets, too: give one of the two"
    )


@pytest.mark.parametrize("weight", ["0.0", "-1.0", "inf", "nan"])
def test_a_weight_is_a_share(weight):
    sets = f'[{A}, {{name="b", path="b.jsonl", weight={weight}}}]'
    assert refusal(f"data.sets={sets}") == f"data.sets[1].weight is {weight}; it must be finite and above 0"


@pytest.mark.parametrize("estimator", ["batch_mean", "reinforce_pp", "gae", "reinforce"])
def test_degenerate_groups_are_replaced_only_where_groups_are_compared(estimator):
    assert refusal("train.drop_degenerate=true", f"algorithm.estimator={estimator}").startswith(
        f"train.drop_degenerate is true, which has no effect with algorithm.estimator {estimator!r}"
    )
    assert refusal("train.drop_degenerate=true", "algorithm.estimator=rloo") is None
    assert refusal("train.drop_degenerate=true", "train.max_refill=2.5") is None


def test_a_limit_of_the_refill_without_a_refill():
    assert refusal("train.max_refill=3.0").startswith(
        "train.max_refill is 3.0, which has no effect with train.drop_degenerate false"
    )


def test_rewards_are_waited_for_as_long_as_their_sessions_are_open():
    assert refusal("pool.reward_wait_s=60.0", "pool.session_idle_s=60.0") is None
    assert refusal("pool.reward_wait_s=60.0") == (
        "pool.reward_wait_s is 60.0, below pool.session_idle_s 3600.0: results would be refused of sessions that still "
        "take model calls; raise the one, or lower the other"
    )
