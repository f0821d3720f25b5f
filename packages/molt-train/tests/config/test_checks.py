"""Keys of the run that contradict each other: each refused in one line with key, value and fix."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .refusals import refusal


def test_the_defaults_are_sound():
    assert refusal() is None


def test_the_steps_of_a_window_have_equally_many_groups():
    assert refusal("algorithm.updates_per_window=3", "train.groups_per_update=16") == (
        "algorithm.updates_per_window is 3, which does not divide train.groups_per_update 16: "
        "set it so that every optimizer step has equally many groups"
    )
    assert refusal("algorithm.updates_per_window=4", "train.groups_per_update=16") is None


@pytest.mark.parametrize("policy", ["default", "client"])
def test_training_samples_as_the_loss_assumes(policy):
    assert refusal(f"rollout.sampling_policy={policy}") == (
        f"rollout.sampling_policy is {policy!r}, but training needs the sampling that the loss assumes: "
        "set it to 'enforce'"
    )
