"""The divergence from the reference: values, the penalty of the reward, the coefficient that adapts."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.loss import AdaptiveKl, reward_penalty
from molt.train.loss.kl import k1, k2, k3

from .vectors import columns_of, f64, gradient, logprobs


def test_kl_hand_vector():
    policy, reference = f64([-1.0]), f64([-1.5])
    assert k1(policy, reference).item() == 0.5
    assert k2(policy, reference).item() == 0.125
    assert k3(policy, reference).item() == pytest.approx(0.106531, abs=1e-6)


def test_kl_own_vectors_on_the_other_side_and_at_zero():
    policy, reference = f64([-2.0, -0.7]), f64([-1.0, -0.7])
    assert k1(policy, reference).tolist() == [-1.0, 0.0]
    assert k2(policy, reference).tolist() == [0.5, 0.0]
    assert k3(policy, reference).tolist() == pytest.approx([math.e - 2, 0.0])


@settings(derandomize=True, deadline=None)
@given(columns_of(logprobs, logprobs))
def test_kl_equals_the_loop(columns):
    one, two, three = (k(*map(f64, columns)).tolist() for k in (k1, k2, k3))
    for i, (policy, reference) in enumerate(zip(*columns, strict=True)):
        difference = policy - reference
        assert one[i] == pytest.approx(difference, abs=1e-12)
        assert two[i] == pytest.approx(difference**2 / 2, abs=1e-12)
        assert three[i] == pytest.approx(math.exp(reference - policy) - 1 - (reference - policy), rel=1e-9, abs=1e-12)
        assert three[i] >= 0


def test_k2_draws_back_however_far_the_policy_is():
    policy = f64([-0.1, -60.0, -1.0], grad=True)
    slopes = gradient(k2(policy, f64([-45.1, -2.0, -1.5])).sum(), policy)
    assert slopes.tolist() == pytest.approx([45.0, -58.0, 0.5])


def test_k2_equals_finite_differences():
    policy = f64([-1.0, -0.2, -3.0], grad=True)
    assert torch.autograd.gradcheck(lambda x: k2(x, f64([-1.5, -0.1, -1.0])), (policy,))


def test_k3_is_finite_for_a_token_that_the_policy_had_all_but_given_up():
    assert k3(f64([-900.0]), f64([-1.0])).item() == pytest.approx(math.exp(20) - 1 - 20)


def test_half_precision_is_widened_first():
    policy, reference = (torch.tensor([x], dtype=torch.bfloat16) for x in (-5.03, -5.0))
    assert k1(policy, reference).dtype == k2(policy, reference).dtype == k3(policy, reference).dtype == torch.float32


def test_the_penalty_of_the_reward_is_k1_in_float64_and_has_no_gradient():
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty = reward_penalty(old, torch.tensor([-1.5, -1.0]), coef=0.1)
    assert penalty.tolist() == [0.1 * 0.5, 0.1 * -1.0]
    assert penalty.dtype == torch.float64
    assert not penalty.requires_grad


# The coefficient


def test_a_fixed_coefficient_stays():
    fixed = AdaptiveKl(coef=0.3)
    assert fixed.after(7.0, num_rollouts=1000) == fixed


@pytest.mark.parametrize(
    ("kl", "rollouts", "expected"),
    [
        (0.11, 100, 0.5 * (1 + 0.1 * 0.1)),  # error +.1, a tenth of the horizon
        (0.09, 1000, 0.5 * (1 - 0.1)),
        (5.0, 100, 0.5 * (1 + 0.2 * 0.1)),  # errors are clipped to a fifth
        (-1.0, 1000, 0.5 * (1 - 0.2)),  # a mean of k1 may be negative
        (0.1, 500, 0.5),
        (-1.0, 100_000, 0.5 * (1 - 0.2)),  # never beyond a fifth: unbounded it would be -9.5
    ],
)
def test_the_coefficient_goes_towards_the_target(kl, rollouts, expected):
    start = AdaptiveKl(coef=0.5, target=0.1, horizon=1000)
    assert start.after(kl, num_rollouts=rollouts).coef == pytest.approx(expected, rel=1e-12)
    assert start.coef == 0.5


def test_a_divergence_that_is_no_number_moves_nothing():
    with pytest.raises(ValueError, match="the divergence is nan"):
        AdaptiveKl(coef=0.5, target=0.1).after(math.nan, num_rollouts=10)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-1.0, 1.0), max_size=20))
def test_the_coefficient_survives_a_checkpoint_at_any_time(divergences):
    straight = resumed = AdaptiveKl(coef=0.01, target=0.05, horizon=300)
    for kl in divergences:
        straight = straight.after(kl, num_rollouts=64)
        resumed = msgspec.json.decode(msgspec.json.encode(resumed.after(kl, num_rollouts=64)), type=AdaptiveKl)
    assert resumed == straight
    assert straight.coef > 0
