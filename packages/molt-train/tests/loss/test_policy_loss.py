"""The policy loss: correction times surrogate, less entropy, plus divergence from the reference."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.config import CorrectionRule
from molt.train.loss import SURROGATES, correction_weights, policy_loss, rollout_sums, weighted_sum

from .vectors import (
    ADVANTAGES,
    BEHAVIOUR,
    CURRENT,
    OLD,
    RATIOS,
    RHO,
    ROWS,
    advantages,
    columns_of,
    f64,
    gradient,
    i64,
    inputs_of,
    logprobs,
    rows,
    settings_of,
    slope,
)

REFERENCE = [-1.1, -1.0, -0.5, -1.7, -1.0]
ENTROPY = [0.5, 1.0, 0.25, 0.0, 2.0]
PPO_LOSS = [-1.221403, -0.606531, -1.0, 2.0, 1.6]


def weights_of(old, behaviour, rollouts, **rule):
    tokens = f64(old), f64(behaviour), i64(rollouts)
    return correction_weights(*tokens, CorrectionRule(**rule), rollout_sums(*tokens, 4))[0]


def test_the_correction_multiplies_the_surrogate_once():
    weights = weights_of(OLD, BEHAVIOUR, ROWS, mode="mask", low=0.7, high=5.0)
    loss, sums = policy_loss(
        inputs_of(CURRENT, OLD, ADVANTAGES, correction_N=weights), settings=settings_of(), kl_coef=0.0
    )
    assert loss.tolist() == pytest.approx([w * x for w, x in zip([*RHO[:4], 0.0], PPO_LOSS, strict=True)], abs=1e-5)
    assert sums["ratio_mean"].item() == pytest.approx(sum(RATIOS), abs=1e-5)
    assert set(sums) == {"ratio_mean", "clip_fraction"}


def test_on_policy_the_ratio_is_one_and_the_recorded_ratio_still_weighs():
    current = f64(CURRENT, grad=True)
    weights = weights_of(CURRENT, BEHAVIOUR, ROWS, mode="truncate", high=1.02)
    inputs = inputs_of(current, current.detach(), ADVANTAGES, correction_N=weights)
    loss, sums = policy_loss(inputs, settings=settings_of(), kl_coef=0.0)
    rho = [min(math.exp(now - b), 1.02) for now, b in zip(CURRENT, BEHAVIOUR, strict=True)]
    expected = [-w * a for w, a in zip(rho, ADVANTAGES, strict=True)]
    assert loss.tolist() == pytest.approx(expected)
    # d(-w r A) with w and old held fixed: a gradient through w too would double it
    assert gradient(loss.sum(), current).tolist() == pytest.approx(expected)
    assert sums["ratio_mean"].item() == 5


def test_flash_reinforce_end_to_end():
    current = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    rollouts = [0, 0, 1, 1]
    weights = weights_of(
        [-1.0] * 4, [-4.0, -1.0, -1.0, -1.0], rollouts, mode="truncate", gate="binary_kl", gate_high=0.003
    )
    inputs = inputs_of(current, current.detach(), [0.5, 0.5, -0.5, -0.5], correction_N=weights, rows=rollouts)
    loss, _ = policy_loss(inputs, settings=settings_of(loss="policy_gradient"), kl_coef=0.0)
    weighted_sum(loss, f64([0.25] * 4), dp_size=1).backward()  # 1 / (B T): rejection shrinks neither
    assert current.grad is not None
    assert current.grad.tolist() == [0.0, 0.0, 0.125, 0.125]


def test_rejected_tokens_stay_in_the_denominator():
    weights = weights_of(OLD, BEHAVIOUR, ROWS, mode="mask", low=0.7, high=5.0)
    loss, _ = policy_loss(inputs_of(OLD, OLD, [1.0] * 5, correction_N=weights), settings=settings_of(), kl_coef=0.0)
    assert weighted_sum(loss, f64([0.2] * 5), dp_size=1).item() == pytest.approx(-sum(RHO[:4]) / 5, abs=1e-6)


# Entropy


def test_the_entropy_is_taken_from_the_loss_uncorrected():
    entropy = f64(ENTROPY, grad=True)
    inputs = inputs_of(CURRENT, OLD, ADVANTAGES, correction_N=f64([0.0] * 5), entropy_N=entropy)
    loss, sums = policy_loss(inputs, settings=settings_of(entropy_coef=0.1), kl_coef=0.0)
    assert loss.tolist() == pytest.approx([-0.05, -0.1, -0.025, 0.0, -0.2])
    assert gradient(loss.sum(), entropy).tolist() == [-0.1] * 5
    assert sums["entropy_mean"].item() == 3.75


def test_an_entropy_that_counts_nothing_is_only_reported():
    inputs = inputs_of(CURRENT, OLD, ADVANTAGES, entropy_N=f64(ENTROPY))
    loss, sums = policy_loss(inputs, settings=settings_of(), kl_coef=0.0)
    assert loss.tolist() == pytest.approx(PPO_LOSS, abs=1e-6)
    assert sums["entropy_mean"].item() == 3.75


def test_an_entropy_bonus_without_entropies_is_refused():
    with pytest.raises(ValueError, match="entropy_coef"):
        policy_loss(inputs_of(CURRENT, OLD, ADVANTAGES), settings=settings_of(entropy_coef=0.1), kl_coef=0.0)


# Divergence


def test_the_divergence_is_k2_weighted_by_current_over_behaviour():
    current = f64(CURRENT, grad=True)
    inputs = inputs_of(current, OLD, [0.0] * 5, correction_N=f64(RHO), reference_N=f64(REFERENCE))
    loss, sums = policy_loss(inputs, settings=settings_of(kl_placement="loss"), kl_coef=0.5)
    weight = [w * math.exp(now - old) for w, now, old in zip(RHO, CURRENT, OLD, strict=True)]
    gap = [now - reference for now, reference in zip(CURRENT, REFERENCE, strict=True)]  # .1, -1, 0, 1, -.2
    assert loss.tolist() == pytest.approx([0.5 * w * d * d / 2 for w, d in zip(weight, gap, strict=True)])
    # the weight is a constant: only k2 has a gradient
    expected = [0.5 * w * d for w, d in zip(weight, gap, strict=True)]
    assert gradient(loss.sum(), current).tolist() == pytest.approx(expected)
    assert sums["kl_mean"].item() == pytest.approx(sum(gap))
    assert sums["kl_k3_mean"].item() == pytest.approx(sum(math.exp(-d) - 1 + d for d in gap))


def test_the_divergence_equals_finite_differences_with_its_weight_held():
    current = f64(CURRENT, grad=True)
    inputs = inputs_of(current, OLD, [0.0] * 5, correction_N=f64(RHO), reference_N=f64(REFERENCE))
    loss, _ = policy_loss(inputs, settings=settings_of(), kl_coef=0.5)

    def objective(x):
        total = 0.0
        for now, start, old, w, reference in zip(x, CURRENT, OLD, RHO, REFERENCE, strict=True):
            total += 0.5 * w * math.exp(start - old) * (now - reference) ** 2 / 2
        return total

    assert gradient(loss.sum(), current).tolist() == pytest.approx(slope(objective, CURRENT), abs=1e-8)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_a_divergence_in_the_reward_or_of_no_weight_is_only_reported(placement):
    inputs = inputs_of(CURRENT, OLD, ADVANTAGES, reference_N=f64(REFERENCE))
    coef = 0.5 if placement == "reward" else 0.0
    loss, sums = policy_loss(inputs, settings=settings_of(kl_placement=placement), kl_coef=coef)
    assert loss.tolist() == pytest.approx(PPO_LOSS, abs=1e-6)
    assert sums["kl_mean"].item() == pytest.approx(0.1 - 1.0 + 0.0 + 1.0 - 0.2)


def test_a_divergence_in_the_loss_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(inputs_of(CURRENT, OLD, ADVANTAGES), settings=settings_of(), kl_coef=0.1)


# All surrogates


@pytest.mark.parametrize("name", SURROGATES)
@settings(derandomize=True, deadline=None)
@given(
    columns=columns_of(logprobs, logprobs, advantages, rows, st.floats(0.0, 2.0), logprobs, st.floats(0.0, 3.0)),
    kl=st.sampled_from([0.0, 0.1]),
    bonus=st.sampled_from([0.0, 0.02]),
)
def test_the_loss_is_the_sum_of_its_three_parts(name, columns, kl, bonus):
    current, old, A, rows, weights, reference, entropy = columns
    inputs = inputs_of(
        current, old, A, rows=rows, correction_N=f64(weights), reference_N=f64(reference), entropy_N=f64(entropy)
    )
    choice = settings_of(loss=name, entropy_coef=bonus)
    loss, sums = policy_loss(inputs, settings=choice, kl_coef=kl)
    surrogate = SURROGATES[name](inputs, choice)[0].tolist()
    for i, total in enumerate(loss.tolist()):
        k2 = (current[i] - reference[i]) ** 2 / 2
        expected = weights[i] * surrogate[i] - bonus * entropy[i]
        expected += kl * weights[i] * math.exp(current[i] - old[i]) * k2
        assert total == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_in_one_row_changes_no_bit_of_another(name, garbage):
    def run(tail):
        columns = [[*column, *tail] for column in (CURRENT, OLD, ADVANTAGES, RHO, REFERENCE, ENTROPY)]
        current = f64(columns[0], grad=True)
        weights, reference, entropy = map(f64, columns[3:])
        inputs = inputs_of(
            current,
            *columns[1:3],
            rows=ROWS + [2] * len(tail),
            correction_N=weights,
            reference_N=reference,
            entropy_N=entropy,
        )
        loss, _ = policy_loss(inputs, settings=settings_of(loss=name, entropy_coef=0.1), kl_coef=0.1)
        return loss[:5], gradient(loss[:5].sum(), current)[:5]

    (loss, slopes), (beside, slopes_beside) = run([]), run([garbage, garbage])
    assert torch.equal(loss, beside)
    assert torch.equal(slopes, slopes_beside)


@pytest.mark.parametrize("name", SURROGATES)
def test_an_empty_microbatch_has_loss_zero_and_takes_part_in_the_backward_pass(name):
    current = f64([], grad=True)
    empty = f64([])
    inputs = inputs_of(current, empty, empty, reference_N=empty, entropy_N=empty)
    loss, sums = policy_loss(inputs, settings=settings_of(loss=name, entropy_coef=0.1), kl_coef=0.1)
    total = weighted_sum(loss, empty, dp_size=2)
    assert total.item() == 0.0
    assert gradient(total, current).shape == (0,)
    assert all(value.item() == 0.0 for value in sums.values())
