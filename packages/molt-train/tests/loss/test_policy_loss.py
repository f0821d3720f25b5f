"""The PPO surrogate, the importance correction and the window's denominator: numbers by hand, loops, gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.train.config import AlgorithmConfig
from molt.train.loss import policy_loss, window_token_mean
from molt.train.loss.correction import importance_weights, mask, truncate
from molt.train.loss.policy import ppo_clip
from molt.train.loss.ratio import MAX_LOG_RATIO, probability_ratio

# The hand vector: two rows of three tokens, of which the last of the second row is no action.
CURRENT = [-1.0, -2.0, -0.5, -0.7, -1.2]
OLD = [-1.2, -1.5, -0.5, -0.7, -0.9]
BEHAVIOUR = [-1.25, -1.45, -0.5, -0.7, -0.4]
ADVANTAGES = [1.0, 1.0, 1.0, -2.0, -2.0]
RHO = [1.051271, 0.951229, 1.0, 1.0, 0.606531]

logprobs = st.floats(-6.0, 0.0)
advantages = st.floats(-3.0, 3.0, allow_subnormal=False)


def f64(values, *, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def vectors(*elements):
    return st.lists(st.tuples(*elements), min_size=1, max_size=12).map(
        lambda rows: [list(c) for c in zip(*rows, strict=True)]
    )


def settings_of(**changes):
    return AlgorithmConfig(**({"correction": "none"} | changes))


def gradient(scalar, leaf):
    return torch.autograd.grad(scalar, leaf)[0]


# PPO clip


def test_ppo_hand_vector():
    loss, sums = ppo_clip(f64(CURRENT), f64(OLD), f64(ADVANTAGES), clip_low=0.2, clip_high=0.28)
    # ratios 1.221403, .606531, 1, 1, .740818; the last is clipped to .8, since -2 * .8 is the smaller
    assert loss.tolist() == pytest.approx([-1.221403, -0.606531, -1.0, 2.0, 1.6], abs=1e-6)
    assert loss.sum().item() / 5 == pytest.approx(0.154413, abs=1e-6)
    assert sums["ratio_mean"].item() == pytest.approx(1.221403 + 0.606531 + 1 + 1 + 0.740818, abs=1e-5)
    assert sums["clip_fraction"].item() == 1


def test_the_clip_has_two_bounds_and_acts_only_where_it_makes_the_loss_larger():
    log = [math.log(r) for r in (1.5, 1.5, 0.5, 0.5, 1.25)]
    A = [1.0, -1.0, 1.0, -1.0, 1.0]
    current = f64(log, grad=True)
    loss, sums = ppo_clip(current, f64([0.0] * 5), f64(A), clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.25])
    assert gradient(loss.sum(), current).tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.25])
    assert sums["clip_fraction"].item() == 2


def oracle_ppo(current, old, advantage, low, high):
    ratio = math.exp(max(-20.0, min(20.0, current - old)))
    clipped = min(max(ratio, 1 - low), 1 + high)
    return max(-ratio * advantage, -clipped * advantage)


@given(vectors(logprobs, logprobs, advantages), st.floats(0.0, 0.9), st.floats(0.0, 2.0))
def test_ppo_equals_the_loop(columns, low, high):
    loss, _ = ppo_clip(*map(f64, columns), clip_low=low, clip_high=high)
    expected = [oracle_ppo(*token, low, high) for token in zip(*columns, strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_ppo_gradient_equals_finite_differences():
    # away from the kinks, on both sides of every bound
    current = f64([-1.0, -2.0, -0.5, -0.7, -1.2, -0.2], grad=True)
    old, A = f64([-1.2, -1.5, -0.6, -0.5, -0.9, -0.9]), f64([1.0, 1.0, 1.0, -2.0, -2.0, 3.0])
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, old, A, clip_low=0.2, clip_high=0.28)[0], (current,))


@given(vectors(logprobs, advantages))
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_reinforce(columns):
    current, A = f64(columns[0], grad=True), f64(columns[1])
    loss, sums = policy_loss(current, current.detach(), current.detach(), A, settings=settings_of(correction="tis"))
    assert loss.tolist() == [-a for a in columns[1]]
    assert sums["ratio_mean"].item() == sums["rho_mean"].item() == len(columns[0])
    assert gradient(loss.sum(), current).tolist() == [-a for a in columns[1]]


# Importance correction


@pytest.mark.parametrize(
    ("scheme", "low", "high", "expected", "filtered"),
    [
        ("none", 0.5, 2.0, [1.0] * 5, 0),
        ("tis", 0.5, 2.0, RHO, 0),
        ("tis", 0.5, 1.02, [1.02, 0.951229, 1.0, 1.0, 0.606531], 1),
        ("icepop", 0.5, 5.0, RHO, 0),
        ("icepop", 0.7, 1.02, [0.0, 0.951229, 1.0, 1.0, 0.0], 2),
    ],
)
def test_correction_hand_vector(scheme, low, high, expected, filtered):
    weights, sums = importance_weights(f64(OLD), f64(BEHAVIOUR), scheme=scheme, low=low, high=high)
    assert weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert sums["rho_mean"].item() == pytest.approx(sum(RHO), abs=1e-5)
    assert sums["correction_weight_mean"].item() == pytest.approx(sum(expected), abs=1e-5)
    assert sums["correction_filtered"].item() == filtered


def test_the_bounds_of_the_mask_belong_to_it():
    assert mask(f64([0.5, 2.0, 0.4999, 2.0001]), low=0.5, high=2.0).tolist() == [0.5, 2.0, 0.0, 0.0]
    assert truncate(f64([0.1, 2.0, 7.0]), high=2.0).tolist() == [0.1, 2.0, 2.0]


def test_weights_multiply_the_surrogate_and_carry_no_gradient():
    current = f64(CURRENT, grad=True)
    settings = settings_of(correction="tis", correction_high=1.02)
    loss, _ = policy_loss(current, current, f64(BEHAVIOUR), f64(ADVANTAGES), settings=settings)
    rho = [min(math.exp(c - b), 1.02) for c, b in zip(CURRENT, BEHAVIOUR, strict=True)]
    expected = [-w * a for w, a in zip(rho, ADVANTAGES, strict=True)]
    assert loss.tolist() == pytest.approx(expected)
    # d(-w r A) with w and old held fixed; a gradient through w would double the untruncated ones
    assert gradient(loss.sum(), current).tolist() == pytest.approx(expected)


def test_off_policy_both_ratios_enter_once():
    settings = settings_of(correction="icepop", correction_low=0.7, correction_high=5.0)
    loss, sums = policy_loss(f64(CURRENT), f64(OLD), f64(BEHAVIOUR), f64(ADVANTAGES), settings=settings)
    surrogate = [-1.221403, -0.606531, -1.0, 2.0, 1.6]
    assert loss.tolist() == pytest.approx([w * s for w, s in zip([*RHO[:4], 0.0], surrogate, strict=True)], abs=1e-5)
    assert set(sums) == {"ratio_mean", "clip_fraction", "rho_mean", "correction_weight_mean", "correction_filtered"}


@given(vectors(logprobs, logprobs, advantages), st.sampled_from(["tis", "icepop"]))
def test_a_ratio_of_one_makes_every_scheme_a_no_op(columns, scheme):
    current, old, A = map(f64, columns)
    plain, _ = policy_loss(current, old, old, A, settings=settings_of())
    corrected, sums = policy_loss(current, old, old, A, settings=settings_of(correction=scheme))
    assert torch.equal(plain, corrected)
    assert sums["correction_filtered"].item() == 0


@given(vectors(logprobs, logprobs), st.floats(0.1, 1.0), st.floats(1.0, 5.0), st.floats(1.0, 3.0))
def test_a_wider_band_keeps_a_superset(columns, low, high, factor):
    old, behaviour = map(f64, columns)
    narrow, _ = importance_weights(old, behaviour, scheme="icepop", low=low, high=high)
    wide, _ = importance_weights(old, behaviour, scheme="icepop", low=low / factor, high=high * factor)
    assert torch.equal(wide[narrow > 0], narrow[narrow > 0])
    smaller, _ = importance_weights(old, behaviour, scheme="tis", low=low, high=high)
    larger, _ = importance_weights(old, behaviour, scheme="tis", low=low, high=high * factor)
    assert (larger >= smaller).all()


@given(vectors(logprobs, logprobs), st.floats(0.1, 1.0), st.floats(1.0, 5.0))
def test_corrections_equal_the_loop(columns, low, high):
    rho = [math.exp(o - b) for o, b in zip(*columns, strict=True)]
    old, behaviour = map(f64, columns)
    tis, _ = importance_weights(old, behaviour, scheme="tis", low=low, high=high)
    icepop, _ = importance_weights(old, behaviour, scheme="icepop", low=low, high=high)
    assert tis.tolist() == pytest.approx([min(r, high) for r in rho], rel=1e-12)
    assert icepop.tolist() == pytest.approx([r if low <= r <= high else 0.0 for r in rho], rel=1e-12)


# Numbers that break


def test_the_log_ratio_is_bounded_on_both_sides():
    ratio = probability_ratio(f64([0.0, -500.0, -30.0]), f64([-500.0, 0.0, -9.5]))
    assert ratio.tolist() == [math.exp(MAX_LOG_RATIO), math.exp(-MAX_LOG_RATIO), math.exp(-20)]
    assert MAX_LOG_RATIO == 20


def test_half_precision_log_probs_make_float32_ratios():
    current, old = torch.tensor([-5.03], dtype=torch.bfloat16), torch.tensor([-5.0], dtype=torch.bfloat16)
    ratio = probability_ratio(current, old)
    assert ratio.dtype == torch.float32
    assert ratio.item() == pytest.approx(math.exp(current.item() - old.item()), rel=1e-6)
    assert probability_ratio(f64([0.0]), f64([0.0])).dtype == torch.float64


@pytest.mark.parametrize("scheme", ["none", "tis", "icepop"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_in_masked_slots_changes_no_bit_of_loss_gradient_or_metric(scheme, garbage):
    settings = settings_of(correction=scheme, correction_low=0.7, correction_high=1.02)

    def run(columns, keep):
        current = f64(columns[0], grad=True)
        others = [f64(c) for c in columns[1:]]
        mask_N = None if keep is None else torch.tensor(keep)
        loss, sums = policy_loss(current, *others, settings=settings, mask_N=mask_N)
        scalar = window_token_mean(loss, num_action_tokens=5, dp_size=1, mask_N=mask_N)
        return loss, gradient(scalar, current), sums

    columns = [CURRENT, OLD, BEHAVIOUR, ADVANTAGES]
    plain, plain_gradient, plain_sums = run(columns, None)
    padded, padded_gradient, padded_sums = run([[*c, garbage, garbage] for c in columns], [True] * 5 + [False] * 2)
    assert torch.equal(torch.cat([plain, f64([0.0, 0.0])]), padded)
    assert torch.equal(torch.cat([plain_gradient, f64([0.0, 0.0])]), padded_gradient)
    assert {k: v.item() for k, v in plain_sums.items()} == {k: v.item() for k, v in padded_sums.items()}


def test_a_nan_that_is_an_action_is_not_hidden():
    loss, _ = policy_loss(f64([math.nan]), f64([-1.0]), f64([-1.0]), f64([1.0]), settings=settings_of())
    assert loss.isnan().all()


# The denominator


def test_the_denominator_is_the_windows_not_the_microbatchs():
    parts = [
        window_token_mean(f64(values), num_action_tokens=4, dp_size=1).item() for values in ([2.0, 2.0, 2.0], [10.0])
    ]
    assert sum(parts) == 4.0  # a mean of the microbatches' means would be 6


def test_ranks_are_summed_although_data_parallelism_averages_them():
    ranks = [[[2.0, 2.0], [2.0]], [[10.0]], []]
    totals = [
        sum(window_token_mean(f64(m), num_action_tokens=4, dp_size=3).item() for m in microbatches)
        for microbatches in ranks
    ]
    assert sum(totals) / 3 == pytest.approx(4.0)


def test_masked_slots_are_no_part_of_the_sum():
    loss = window_token_mean(
        f64([3.0, math.nan, 5.0]), num_action_tokens=4, dp_size=1, mask_N=torch.tensor([True, False, True])
    )
    assert loss.item() == 2.0


def test_rejected_tokens_stay_in_the_denominator():
    settings = settings_of(correction="icepop", correction_low=0.7, correction_high=5.0)
    loss, sums = policy_loss(f64(OLD), f64(OLD), f64(BEHAVIOUR), f64([1.0] * 5), settings=settings)
    assert sums["correction_filtered"].item() == 1
    mean = window_token_mean(loss, num_action_tokens=5, dp_size=1)
    assert mean.item() == pytest.approx(-sum(RHO[:4]) / 5, abs=1e-6)


def test_a_window_without_actions_has_loss_and_gradient_zero():
    current = f64([-1.0, -2.0], grad=True)
    keep = torch.tensor([False, False])
    loss = window_token_mean(current * 3.0, num_action_tokens=0, dp_size=2, mask_N=keep)
    assert loss.item() == 0.0
    assert gradient(loss, current).tolist() == [0.0, 0.0]


def test_an_empty_microbatch_has_loss_zero():
    empty = f64([], grad=True)
    loss, sums = policy_loss(empty, empty.detach(), f64([]), f64([]), settings=settings_of(correction="tis"))
    scalar = window_token_mean(loss, num_action_tokens=7, dp_size=2)
    assert scalar.item() == 0.0
    assert gradient(scalar, empty).shape == (0,)
    assert all(value.item() == 0.0 for value in sums.values())
