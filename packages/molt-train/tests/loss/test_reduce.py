"""The weighted sum: one denominator for a window, however it is split."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from molt.train.loss import weighted_sum

from .vectors import f64, gradient


def mean_share(values, *, total, dp_size=1):
    """A microbatch's share of a token mean over `total` tokens."""
    return weighted_sum(f64(values), f64([1 / total] * len(values)), dp_size=dp_size).item()


def test_the_denominator_is_the_windows_not_the_microbatchs():
    assert mean_share([2.0, 2.0, 2.0], total=4) + mean_share([10.0], total=4) == 4.0  # a mean of means would be 6


def test_ranks_are_summed_although_data_parallelism_averages_them():
    ranks = [[[2.0, 2.0], [2.0]], [[10.0]], []]
    totals = [sum(mean_share(values, total=4, dp_size=3) for values in microbatches) for microbatches in ranks]
    assert sum(totals) / 3 == pytest.approx(4.0)


def test_each_token_counts_its_own_weight_which_has_no_part_in_the_gradient():
    loss = f64([3.0, -1.0, 2.0], grad=True)
    total = weighted_sum(loss, f64([0.5, 0.25, 0.0]), dp_size=2)
    assert total.item() == 2.5  # 2 (1.5 - .25 + 0)
    assert gradient(total, loss).tolist() == [1.0, 0.5, 0.0]


def test_a_microbatch_without_tokens_has_loss_zero_and_still_a_gradient():
    empty = f64([], grad=True)
    total = weighted_sum(empty * 3.0, f64([]), dp_size=2)
    assert total.item() == 0.0
    assert gradient(total, empty).shape == (0,)
