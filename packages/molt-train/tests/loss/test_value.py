"""The critic's loss: numbers by hand, loops, gradients."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.loss import value_loss

from .vectors import columns_of, f64, gradient

values = st.floats(-3.0, 3.0, allow_subnormal=False)


def test_value_hand_vector():
    loss, sums = value_loss(f64([0.7, 0.1]), f64([0.3, 0.2]), f64([1.0, 0.0]), clip=0.2)
    # clipped to .5 and .1: largest squares .25 and .01
    assert loss.tolist() == pytest.approx([0.125, 0.005])
    assert loss.mean().item() == pytest.approx(0.065)
    assert sums["value_clip_fraction"].item() == 1
    assert sums["value_error_squared_mean"].item() == pytest.approx(0.09 + 0.01)
    assert sums["value_mean"].item() == pytest.approx(0.8)
    assert sums["return_mean"].item() == sums["return_squared_mean"].item() == 1.0


def test_only_a_value_that_has_come_nearer_than_the_band_allows_loses_its_gradient():
    # from 0 towards 1 by .5 (past the band of .2), away from 1 by .5, and across 0 from .3 to -.05
    v = f64([0.5, -0.5, -0.05], grad=True)
    loss, sums = value_loss(v, f64([0.0, 0.0, 0.3]), f64([1.0, 1.0, 0.0]), clip=0.2)
    assert loss.tolist() == pytest.approx([0.32, 1.125, 0.005])
    assert gradient(loss.sum(), v).tolist() == pytest.approx([0.0, -1.5, 0.0])
    assert sums["value_clip_fraction"].item() == 2


def test_clip_0_is_half_the_squared_error():
    loss, sums = value_loss(f64([5.0, 0.1]), f64([0.3, 0.2]), f64([1.0, 0.0]), clip=0.0)
    assert loss.tolist() == pytest.approx([8.0, 0.005])
    assert sums["value_clip_fraction"].item() == 0


@settings(derandomize=True, deadline=None)
@given(columns_of(values, values, values), st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_value_loss_equals_the_loop(columns, clip):
    loss, _ = value_loss(*map(f64, columns), clip=clip)
    expected = []
    for v, old, target in zip(*columns, strict=True):
        worst = (v - target) ** 2
        if clip:
            moved = max(old - clip, min(old + clip, v))
            worst = max(worst, (moved - target) ** 2)
        expected.append(0.5 * worst)
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_value_gradient_equals_finite_differences():
    v = f64([0.7, 0.1, -0.5, 0.5, 2.0], grad=True)
    old, target = f64([0.3, 0.2, 0.0, 0.0, 1.9]), f64([1.0, 0.0, 1.0, 1.0, -1.0])
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, target, clip=0.2)[0], (v,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, target, clip=0.0)[0], (v,))


def test_sums_give_the_explained_variance():
    target, v = [1.0, 0.0, 2.0, 1.0], [0.8, 0.1, 1.5, 1.2]
    _, sums = value_loss(f64(v), f64(v), f64(target), clip=0.0)
    mean = {name: value.item() / 4 for name, value in sums.items()}
    variance = mean["return_squared_mean"] - mean["return_mean"] ** 2
    # squared errors .04, .01, .25, .04 against a variance of .5
    assert 1 - mean["value_error_squared_mean"] / variance == pytest.approx(1 - 0.085 / 0.5)


def test_half_precision_values_make_a_float32_loss():
    half = torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = value_loss(half, torch.tensor([0.0]), torch.tensor([1.001]), clip=0.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.5e-6, rel=1e-3)


def test_garbage_in_one_token_changes_no_bit_of_another():
    v = f64([0.7, float("nan")], grad=True)
    loss, _ = value_loss(v, f64([0.3, float("inf")]), f64([1.0, -1.0]), clip=0.2)
    assert loss[0].item() == value_loss(f64([0.7]), f64([0.3]), f64([1.0]), clip=0.2)[0].item()
    assert loss[1].isnan()


def test_no_token_is_no_loss():
    v = f64([], grad=True)
    loss, sums = value_loss(v, f64([]), f64([]), clip=0.2)
    assert loss.sum().item() == 0.0
    assert gradient(loss.sum(), v).shape == (0,)
    assert all(value.item() == 0.0 for value in sums.values())
