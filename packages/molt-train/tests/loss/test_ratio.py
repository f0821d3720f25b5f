"""Ratios of probabilities: bounded, and wide enough."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import pytest
import torch

from molt.train.loss.ratio import MAX_LOG_RATIO, log_ratio, probability_ratio, token_sum

from .vectors import f64, gradient


def test_the_log_ratio_is_bounded_on_both_sides():
    ratio = probability_ratio(f64([0.0, -500.0, -30.0]), f64([-500.0, 0.0, -9.5]))
    assert ratio.tolist() == [math.exp(MAX_LOG_RATIO), math.exp(-MAX_LOG_RATIO), math.exp(-20)]
    assert MAX_LOG_RATIO == 20


def test_an_infinite_log_ratio_has_a_finite_ratio_and_no_gradient():
    numerator = f64([0.0, -math.inf, -1.0], grad=True)
    ratio = probability_ratio(numerator, f64([-math.inf, 0.0, -1.0]))
    assert ratio.tolist() == [math.exp(20), math.exp(-20), 1.0]
    assert gradient(ratio.sum(), numerator).tolist() == [0.0, 0.0, 1.0]


def test_half_precision_log_probs_make_float32_ratios():
    current, old = torch.tensor([-5.03], dtype=torch.bfloat16), torch.tensor([-5.0], dtype=torch.bfloat16)
    ratio = probability_ratio(current, old)
    assert ratio.dtype == log_ratio(current, old).dtype == torch.float32
    assert ratio.item() == pytest.approx(math.exp(current.item() - old.item()), rel=1e-6)
    assert probability_ratio(f64([0.0]), f64([0.0])).dtype == torch.float64


def test_sums_are_wide_and_without_gradient():
    values = torch.full((4096,), 0.1, dtype=torch.bfloat16, requires_grad=True)
    total = token_sum(values)
    assert total.dtype == torch.float32
    assert not total.requires_grad
    assert total.item() == pytest.approx(4096 * values[0].item(), rel=1e-5)
    assert token_sum(torch.tensor([True, False, True])).item() == 2.0
