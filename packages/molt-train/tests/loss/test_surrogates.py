"""PPO, its dual clip, GSPO, CISPO and the plain policy gradient: numbers by hand, loops, gradients."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.loss.cispo import cispo
from molt.train.loss.gspo import gspo
from molt.train.loss.policy import SURROGATES
from molt.train.loss.policy_gradient import policy_gradient
from molt.train.loss.ppo import ppo

from .vectors import (
    ADVANTAGES,
    CURRENT,
    OLD,
    RATIOS,
    ROWS,
    advantages,
    columns_of,
    f64,
    gradient,
    inputs_of,
    logprobs,
    rows,
    settings_of,
    slope,
)

DAPO = settings_of(clip_low=0.2, clip_high=0.28)
HAND = inputs_of(CURRENT, OLD, ADVANTAGES, rows=ROWS)


def row_shares(rows):
    """The weights of a mean over rows of their token means."""
    return [1 / (len(set(rows)) * rows.count(row)) for row in rows]


# PPO


def test_ppo_hand_vector():
    loss, sums = ppo(HAND, DAPO)
    # the last ratio, .740818, is clipped to .8, since -2 * .8 is the smaller
    assert loss.tolist() == pytest.approx([-1.221403, -0.606531, -1.0, 2.0, 1.6], abs=1e-6)
    assert loss.mean().item() == pytest.approx(0.154413, abs=1e-6)
    assert sums["clip_fraction"].item() == 1
    assert set(sums) == {"clip_fraction"}


def test_the_clip_has_two_bounds_and_acts_only_where_it_makes_the_loss_larger():
    current = f64([math.log(r) for r in (1.5, 1.5, 0.5, 0.5, 1.25)], grad=True)
    loss, sums = ppo(inputs_of(current, [0.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0]), DAPO)
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.25])
    assert gradient(loss.sum(), current).tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.25])
    assert sums["clip_fraction"].item() == 2


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only():
    # ratios 5, 5, 2, .5 with c = 3: only the second, -2 * 5 = -10, passes 3 * 2 = 6
    current = f64([math.log(r) for r in (5.0, 5.0, 2.0, 0.5)], grad=True)
    inputs = inputs_of(current, [0.0] * 4, [2.0, -2.0, -2.0, -2.0])
    loss, sums = ppo(inputs, settings_of(clip_low=0.2, clip_high=0.28, dual_clip=3.0))
    assert loss.tolist() == pytest.approx([-2.56, 6.0, 4.0, 1.6])
    assert gradient(loss.sum(), current).tolist() == pytest.approx([0.0, 0.0, 4.0, 0.0])
    assert sums["dual_clip_fraction"].item() == 1
    assert sums["clip_fraction"].item() == 2  # the first above, the last below: the dual clip is counted apart


def test_dual_clip_0_leaves_the_loss_unbounded():
    loss, sums = ppo(inputs_of([math.log(50.0)], [0.0], [-2.0]), DAPO)
    assert loss.tolist() == pytest.approx([100.0])
    assert "dual_clip_fraction" not in sums


def loop_ppo(current, old, advantage, low, high, dual):
    ratio = math.exp(max(-20.0, min(20.0, current - old)))
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-ratio * advantage, -clipped * advantage)
    if dual > 0 and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss


@settings(derandomize=True, deadline=None)
@given(
    columns_of(logprobs, logprobs, advantages),
    st.floats(0.0, 0.9),
    st.floats(0.0, 2.0),
    st.sampled_from([0.0, 1.5, 3.0]),
)
def test_ppo_equals_the_loop(columns, low, high, dual):
    loss, _ = ppo(inputs_of(*columns), settings_of(clip_low=low, clip_high=high, dual_clip=dual))
    expected = [loop_ppo(*token, low, high, dual) for token in zip(*columns, strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_ppo_gradient_equals_finite_differences():
    # away from the kinks, on both sides of every bound, the dual clip's included
    current = f64([-1.0, -2.0, -0.5, -0.7, -1.2, -0.2, -0.1], grad=True)
    old, A = f64([-1.2, -1.5, -0.6, -0.5, -0.9, -0.9, -1.7]), f64([1.0, 1.0, 1.0, -2.0, -2.0, 3.0, -1.0])
    bounds = settings_of(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert torch.autograd.gradcheck(lambda x: ppo(inputs_of(x, old, A), bounds)[0], (current,))


# GSPO


def test_gspo_hand_vector():
    loss, sums = gspo(HAND, DAPO)
    # mean log ratios (.2 - .5 + 0) / 3 = -.1 and -.15: .904837 and .860708, both inside [.8, 1.28]
    assert loss.tolist() == pytest.approx([-0.904837] * 3 + [2 * 0.860708] * 2, abs=1e-6)
    assert sum(w * x for w, x in zip(row_shares(ROWS), loss.tolist(), strict=True)) == pytest.approx(0.408290, abs=1e-6)
    assert loss.mean().item() == pytest.approx(0.145664, abs=1e-6)
    assert sums["clip_fraction"].item() == 0


def test_gspo_clips_whole_sequences():
    # s = [.904837, .860708] against [.89, 1.0]: the second row, of negative advantage, is clipped at .89
    current = f64(CURRENT, grad=True)
    loss, sums = gspo(inputs_of(current, OLD, ADVANTAGES, rows=ROWS), settings_of(clip_low=0.11, clip_high=0.0))
    assert loss.tolist() == pytest.approx([-0.904837] * 3 + [1.78] * 2, abs=1e-6)
    assert gradient(loss.sum(), current).tolist() == pytest.approx([-0.904837] * 3 + [0.0] * 2, abs=1e-6)
    assert sums["clip_fraction"].item() == 2


def test_gspo_knows_a_row_by_its_number_and_not_by_its_place():
    order = [3, 0, 4, 2, 1]
    shuffled = inputs_of(*([column[i] for i in order] for column in (CURRENT, OLD, ADVANTAGES)), rows=[1, 0, 1, 0, 0])
    straight, mixed = gspo(HAND, DAPO)[0], gspo(shuffled, DAPO)[0]
    assert [mixed[order.index(i)].item() for i in range(5)] == pytest.approx(straight.tolist(), rel=1e-14)


def loop_gspo(current, old, A, rows, low, high):
    """The published objective: one ratio a sequence, with its own gradient; mean over sequences."""
    total = 0.0
    for row in sorted(set(rows)):
        members = [i for i, r in enumerate(rows) if r == row]
        ratio = math.exp(sum(current[i] - old[i] for i in members) / len(members))
        clipped = min(max(ratio, 1 - low), 1 + high)
        total += max(-ratio * A[members[0]], -clipped * A[members[0]]) / len(set(rows))
    return total


@settings(derandomize=True, deadline=None)
@given(columns_of(logprobs, logprobs, rows), st.lists(advantages, min_size=4, max_size=4), st.floats(0.0, 0.9))
def test_gspo_equals_the_loop_under_the_sequence_mean(columns, advantage_of_row, low):
    current, old, rows = columns
    A = [advantage_of_row[row] for row in rows]
    loss, _ = gspo(inputs_of(current, old, A, rows=rows), settings_of(clip_low=low, clip_high=0.3))
    total = sum(w * x for w, x in zip(row_shares(rows), loss.tolist(), strict=True))
    assert total == pytest.approx(loop_gspo(current, old, A, rows, low, 0.3), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("low", [0.2, 0.12])  # the second row inside the band, and clipped
def test_the_token_form_of_gspo_has_the_gradient_of_the_sequence_objective(low):
    current = f64(CURRENT, grad=True)
    loss, _ = gspo(inputs_of(current, OLD, ADVANTAGES, rows=ROWS), settings_of(clip_low=low, clip_high=0.28))
    found = gradient((loss * f64(row_shares(ROWS))).sum(), current).tolist()
    expected = slope(lambda x: loop_gspo(x, OLD, ADVANTAGES, ROWS, low, 0.28), CURRENT)
    assert found == pytest.approx(expected, abs=1e-8)


# CISPO


def test_cispo_hand_vector():
    loss, sums = cispo(HAND, DAPO)
    assert loss.tolist() == pytest.approx([1.221403, 1.213061, 0.5, -1.4, -1.777964], abs=1e-6)
    assert loss.mean().item() == pytest.approx(-0.048700, abs=1e-6)
    assert sums["clip_fraction"].item() == 0


def test_the_ceiling_of_cispo_is_one_plus_clip_high_and_there_is_no_floor():
    # ratios 1.5, 1.5 and .1; a ceiling of clip_high itself would be .28, a floor of 1 - clip_low .8
    current = f64([-1.0, -1.0, -3.0], grad=True)
    old = [-1.0 - math.log(1.5), -1.0 - math.log(1.5), -3.0 + math.log(10.0)]
    loss, sums = cispo(inputs_of(current, old, [1.0, -1.0, 1.0]), DAPO)
    assert loss.tolist() == pytest.approx([1.28, -1.28, 0.3])
    # unlike PPO's, a clipped token keeps its gradient
    assert gradient(loss.sum(), current).tolist() == pytest.approx([-1.28, 1.28, -0.1])
    assert sums["clip_fraction"].item() == 2


@settings(derandomize=True, deadline=None)
@given(columns_of(logprobs, logprobs, advantages), st.floats(0.0, 4.0))
def test_cispo_equals_the_loop_and_its_ratio_is_a_constant(columns, high):
    current = f64(columns[0], grad=True)
    loss, _ = cispo(inputs_of(current, *columns[1:]), settings_of(clip_high=high))
    scales = []
    for now, old, advantage in zip(*columns, strict=True):
        scales.append(-min(math.exp(now - old), 1 + high) * advantage)
    expected = [scale * now for scale, now in zip(scales, columns[0], strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert gradient(loss.sum(), current).tolist() == pytest.approx(scales, rel=1e-12, abs=1e-12)


def test_cispo_gradient_equals_finite_differences_of_the_weighted_log_likelihood():
    current = f64(CURRENT, grad=True)
    loss, _ = cispo(inputs_of(current, OLD, ADVANTAGES), settings_of(clip_high=0.1))
    weights = [min(math.exp(now - old), 1.1) for now, old in zip(CURRENT, OLD, strict=True)]

    def objective(x):
        return sum(-w * a * now for w, a, now in zip(weights, ADVANTAGES, x, strict=True))

    assert gradient(loss.sum(), current).tolist() == pytest.approx(slope(objective, CURRENT), abs=1e-8)


# Policy gradient


def test_the_policy_gradient_has_no_ratio():
    current = f64(CURRENT, grad=True)
    loss, sums = policy_gradient(inputs_of(current, OLD, ADVANTAGES), DAPO)
    assert loss.tolist() == [1.0, 2.0, 0.5, -1.4, -2.4]
    assert gradient(loss.sum(), current).tolist() == [-1.0, -1.0, -1.0, 2.0, 2.0]
    assert sums == {}


def test_policy_gradient_equals_finite_differences():
    current = f64([-0.3, -4.0], grad=True)
    assert torch.autograd.gradcheck(
        lambda x: policy_gradient(inputs_of(x, [-1.0, -1.0], [2.0, -0.5]), DAPO)[0], current
    )
    assert policy_gradient(inputs_of([-0.3, -4.0], [0.0, 0.0], [2.0, -0.5]), DAPO)[0].tolist() == [0.6, -2.0]


# All of them


@pytest.mark.parametrize("name", SURROGATES)
@settings(derandomize=True, deadline=None)
@given(columns=columns_of(logprobs, advantages, rows), low=st.floats(0.0, 0.9), high=st.floats(0.0, 2.0))
def test_on_policy_the_gradient_of_every_surrogate_is_reinforce(name, columns, low, high):
    current = f64(columns[0], grad=True)
    inputs = inputs_of(current, current.detach(), columns[1], rows=columns[2])
    bounds = settings_of(clip_low=low, clip_high=high, dual_clip=3.0)
    loss, sums = SURROGATES[name](inputs, bounds)
    assert gradient(loss.sum(), current).tolist() == [-a for a in columns[1]]
    assert all(value.item() == 0 for value in sums.values())


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_in_one_row_changes_no_bit_of_another(name, garbage):
    def run(tail):
        columns = [[*column, *tail] for column in (CURRENT, OLD, ADVANTAGES)]
        current = f64(columns[0], grad=True)
        loss, _ = SURROGATES[name](inputs_of(current, *columns[1:], rows=ROWS + [2] * len(tail)), DAPO)
        return loss[:5], gradient(loss[:5].sum(), current)[:5]

    (loss, slopes), (beside, slopes_beside) = run([]), run([garbage, garbage])
    assert torch.equal(loss, beside)
    assert torch.equal(slopes, slopes_beside)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_nan_that_is_an_action_is_not_hidden(name):
    loss, _ = SURROGATES[name](inputs_of([math.nan], [-1.0], [1.0]), settings_of(dual_clip=3.0))
    assert loss.isnan().all()


@pytest.mark.parametrize("name", SURROGATES)
def test_no_token_is_no_loss(name):
    current = f64([], grad=True)
    loss, sums = SURROGATES[name](inputs_of(current, [], []), DAPO)
    assert loss.shape == (0,)
    assert gradient(loss.sum(), current).shape == (0,)
    assert all(value.item() == 0 for value in sums.values())


def test_hand_ratios_are_those_of_the_vectors():
    assert [math.exp(now - old) for now, old in zip(CURRENT, OLD, strict=True)] == pytest.approx(RATIOS, abs=1e-6)
