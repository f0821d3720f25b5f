"""The weights of importance correction: levels, modes, gates; numbers by hand, loops, properties."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.config import CorrectionRule
from molt.train.loss import correction_weights, rollout_sums
from molt.train.loss.correction import bernoulli_kl

from .vectors import BEHAVIOUR, OLD, RHO, ROWS, columns_of, f64, i64, logprobs, rows

LEVELS, MODES, GATES = (
    ("token", "sequence", "geometric"),
    ("none", "truncate", "clip", "mask"),
    ("none", "geometric", "k3", "binary_kl"),
)
every_rule = pytest.mark.parametrize(
    ("level", "mode", "gate"), [(level, mode, gate) for level in LEVELS for mode in MODES for gate in GATES]
)


def weigh(old, behaviour, rollouts, **rule):
    """Weights and sums of tokens that are a whole window."""
    old, behaviour, rollouts = f64(old), f64(behaviour), i64(rollouts)
    sums = rollout_sums(old, behaviour, rollouts, 4)
    return correction_weights(old, behaviour, rollouts, CorrectionRule(**rule), sums)


def divergence(p, q):
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def loop_weights(old, behaviour, rollouts, rule):
    weights = [0.0] * len(old)
    for rollout in set(rollouts):
        members = [i for i, r in enumerate(rollouts) if r == rollout]
        rho = {i: math.exp(old[i] - behaviour[i]) for i in members}
        product = math.exp(max(-20.0, min(20.0, sum(old[i] - behaviour[i] for i in members))))
        mean = math.exp(sum(old[i] - behaviour[i] for i in members) / len(members))
        distance = {
            "none": 0.0,
            "geometric": mean,
            "k3": sum(rho[i] - 1 - math.log(rho[i]) for i in members) / len(members),
            "binary_kl": sum(divergence(math.exp(behaviour[i]), math.exp(old[i])) for i in members) / len(members),
        }[rule.gate]
        closed = distance > rule.gate_high or (rule.gate == "geometric" and distance < rule.gate_low)
        for i in members:
            ratio = {"token": rho[i], "sequence": product, "geometric": mean}[rule.level]
            inside = rule.low <= ratio <= rule.high
            weight = {
                "none": 1.0,
                "truncate": min(ratio, rule.high),
                "clip": max(rule.low, min(rule.high, ratio)),
                "mask": ratio if inside else 0.0,
            }[rule.mode]
            weights[i] = 0.0 if rule.gate != "none" and closed else weight
    return weights


# Numbers by hand


@pytest.mark.parametrize(
    ("rule", "expected", "filtered"),
    [
        ({"mode": "none"}, [1.0] * 5, 0),
        ({"mode": "truncate", "high": 2.0}, RHO, 0),
        ({"mode": "truncate", "high": 1.02}, [1.02, 0.951229, 1.0, 1.0, 0.606531], 1),
        ({"mode": "truncate", "low": 0.99}, RHO, 0),  # nothing is cut below
        ({"mode": "clip", "low": 0.7, "high": 1.02}, [1.02, 0.951229, 1.0, 1.0, 0.7], 2),
        ({"mode": "mask", "low": 0.5, "high": 5.0}, RHO, 0),
        ({"mode": "mask", "low": 0.7, "high": 1.02}, [0.0, 0.951229, 1.0, 1.0, 0.0], 2),
        ({"mode": "truncate", "level": "sequence", "high": 2.0}, [1.0] * 3 + [0.606531] * 2, 0),
        ({"mode": "truncate", "level": "sequence", "high": 0.8}, [0.8] * 3 + [0.606531] * 2, 3),
        ({"mode": "mask", "level": "sequence", "low": 0.7, "high": 2.0}, [1.0] * 3 + [0.0] * 2, 2),
        ({"mode": "truncate", "level": "geometric", "high": 2.0}, [1.0] * 3 + [0.778801] * 2, 0),
        ({"mode": "mask", "level": "geometric", "low": 0.99, "high": 1.01}, [1.0] * 3 + [0.0] * 2, 2),
        ({"mode": "clip", "level": "geometric", "low": 0.8, "high": 1.01}, [1.0] * 3 + [0.8] * 2, 2),
    ],
)
def test_weights_hand_vector(rule, expected, filtered):
    weights, sums = weigh(OLD, BEHAVIOUR, ROWS, **rule)
    assert weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert sums["correction_filtered"].item() == filtered
    assert sums["gate_filtered"].item() == 0
    assert sums["correction_weight_mean"].item() == pytest.approx(sum(expected), abs=1e-5)
    assert sums["weight_squared_mean"].item() == pytest.approx(sum(w * w for w in expected), abs=1e-5)


def test_rollout_sums_hand_vector():
    tokens, log_rho, k3, _ = rollout_sums(f64(OLD), f64(BEHAVIOUR), i64(ROWS), 3).unbind(-1)
    assert tokens.tolist() == [3.0, 2.0, 0.0]
    assert log_rho.tolist() == pytest.approx([0.0, -0.5, 0.0])
    # the geometric mean of the first rollout is exactly 1 although two of its tokens are off by a twentieth
    assert (k3 / tokens)[:2].tolist() == pytest.approx([0.000834, 0.053265], abs=1e-6)


def test_bernoulli_divergence_by_hand():
    found = bernoulli_kl(f64([math.log(0.2), math.log(0.5), -1.0]), f64([math.log(0.4), math.log(0.25), -1.0]))
    # .5 ln 2 + .5 ln (2/3) = .143841
    assert found.tolist() == pytest.approx([0.091516, 0.143841, 0.0], abs=1e-6)
    # probabilities 1 and 0 count as 1 - 1e-6 and 1e-6
    edge = bernoulli_kl(f64([0.0, 0.0, -math.inf]), f64([0.0, -math.inf, -40.0]))
    assert edge.tolist() == pytest.approx([0.0, (1 - 2e-6) * math.log((1 - 1e-6) / 1e-6), 0.0], rel=1e-9)


@pytest.mark.parametrize(
    ("gate", "admitted"),
    [
        ({"gate": "geometric", "gate_low": 0.99, "gate_high": 1.01}, [True, False]),
        ({"gate": "geometric", "gate_low": 0.7, "gate_high": 0.9}, [False, True]),
        ({"gate": "k3", "gate_high": 0.01}, [True, False]),
        ({"gate": "k3", "gate_high": 0.0005}, [False, False]),  # sees what cancels in the geometric mean
        ({"gate": "k3", "gate_high": 0.06}, [True, True]),
        ({"gate": "binary_kl", "gate_high": 0.003}, [True, False]),
    ],
)
def test_gates_close_on_whole_rollouts_and_survivors_keep_their_own_weight(gate, admitted):
    weights, sums = weigh(OLD, BEHAVIOUR, ROWS, mode="truncate", high=1.02, **gate)
    truncated = [1.02, 0.951229, 1.0, 1.0, 0.606531]
    assert weights.tolist() == pytest.approx([w * admitted[r] for w, r in zip(truncated, ROWS, strict=True)], abs=1e-6)
    assert sums["gate_filtered"].item() == sum(not admitted[row] for row in ROWS)
    assert sums["correction_filtered"].item() == 1  # the bounds of the ratio are counted apart
    assert sums["rho_mean"].item() == pytest.approx(sum(RHO), abs=1e-5)


def test_a_gate_alone_weighs_one():
    weights, _ = weigh(OLD, BEHAVIOUR, ROWS, mode="none", gate="k3", gate_high=0.01)
    assert weights.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_flash_reinforce_hand_vector():
    # all old log-probs -1; the first rollout's first token was recorded at -4: far outside a trust region of .003
    rule = {"mode": "truncate", "gate": "binary_kl", "gate_high": 0.003}
    weights, sums = weigh([-1.0] * 4, [-4.0, -1.0, -1.0, -1.0], [0, 0, 1, 1], **rule)
    assert weights.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert sums["gate_filtered"].item() == 2


def test_the_weight_of_truncation_without_a_bound_is_the_plain_ratio():
    weights, _ = weigh([-1.0, -1.0], [-8.0, -0.5], [0, 0], mode="truncate")
    assert weights.tolist() == pytest.approx([math.exp(7), math.exp(-0.5)])


def test_the_length_trap_of_the_product():
    # 1.1 a token is 2.6 over 10 tokens and 13,780 over 100
    old, rollouts = [math.log(1.1) - 2] * 110, [0] * 10 + [1] * 100
    weights, _ = weigh(old, [-2.0] * 110, rollouts, mode="truncate", level="sequence")
    assert weights[0].item() == pytest.approx(2.5937, abs=1e-4)
    assert weights[-1].item() == pytest.approx(13780.6, abs=0.1)
    geometric, _ = weigh(old, [-2.0] * 110, rollouts, mode="truncate", level="geometric")
    assert geometric.tolist() == pytest.approx([1.1] * 110)


def test_a_product_of_ratios_is_bounded_on_both_sides():
    weights, _ = weigh([-1.0] * 100, [-2.0] * 50 + [-0.5] * 50, [0] * 50 + [1] * 50, mode="truncate", level="sequence")
    assert weights[0].item() == math.exp(20)
    assert weights[-1].item() == math.exp(-20)


@pytest.mark.parametrize("mode", ["mask", "clip", "truncate"])
def test_the_bounds_of_the_ratio_belong_to_it(mode):
    behaviour, bounds = [0.0, 0.0, 0.0, 0.0], [math.exp(-0.7), math.exp(0.7)]
    weights, sums = weigh(
        [-0.7, 0.7, -0.7000001, 0.7000001], behaviour, [0] * 4, mode=mode, low=bounds[0], high=bounds[1]
    )
    assert weights[:2].tolist() == bounds
    assert sums["correction_filtered"].item() == (1 if mode == "truncate" else 2)


@pytest.mark.parametrize("gate", ["geometric", "k3", "binary_kl"])
def test_the_bound_of_a_gate_belongs_to_it(gate):
    old, behaviour, rollouts = [-0.5, -0.25, -0.125], [-0.75, -0.75, -0.125], [0, 0, 1]
    tokens, log_rho, k3, binary_kl = rollout_sums(f64(old), f64(behaviour), i64(rollouts), 4)[0]
    exact = {"geometric": (log_rho / tokens).exp(), "k3": k3 / tokens, "binary_kl": binary_kl / tokens}[gate].item()
    admitted, _ = weigh(old, behaviour, rollouts, gate=gate, gate_high=exact)
    refused, _ = weigh(old, behaviour, rollouts, gate=gate, gate_high=math.nextafter(exact, 0.0))
    assert admitted.tolist() == [1.0, 1.0, 1.0]
    assert refused.tolist() == [0.0, 0.0, 1.0]
    if gate == "geometric":
        lowest, _ = weigh(old, behaviour, rollouts, gate=gate, gate_low=exact)
        above, _ = weigh(old, behaviour, rollouts, gate=gate, gate_low=math.nextafter(exact, 9.0))
        assert (lowest[0].item(), above[0].item()) == (1.0, 0.0)


# Rollouts whose segments lie in several microbatches


@every_rule
def test_the_segments_of_a_rollout_are_weighed_together_wherever_they_lie(level, mode, gate):
    rule = CorrectionRule(level=level, mode=mode, low=0.9, high=1.02, gate=gate, gate_low=0.95, gate_high=1.03)
    old, behaviour, rollouts = f64(OLD), f64(BEHAVIOUR), i64([1, 0, 1, 0, 1])
    whole = rollout_sums(old, behaviour, rollouts, 2)
    parts = [slice(0, 2), slice(2, 2), slice(2, 5)]  # the second has no token
    pieces = sum(rollout_sums(old[p], behaviour[p], rollouts[p], 2) for p in parts)
    assert torch.allclose(whole, pieces, rtol=1e-14, atol=0)
    together, sums = correction_weights(old, behaviour, rollouts, rule, whole)
    apart = [correction_weights(old[p], behaviour[p], rollouts[p], rule, pieces) for p in parts]
    assert torch.allclose(together, torch.cat([weights for weights, _ in apart]), rtol=1e-14, atol=0)
    for name, value in sums.items():
        assert value.item() == pytest.approx(sum(s[name].item() for _, s in apart), rel=1e-12, abs=1e-12)


@every_rule
def test_a_rule_of_whole_rollouts_refuses_to_guess_them_from_a_microbatch(level, mode, gate):
    rule = CorrectionRule(level=level, mode=mode, gate=gate)
    tokens = f64(OLD), f64(BEHAVIOUR), i64(ROWS)
    if rule.needs_rollout:
        with pytest.raises(ValueError, match="whole rollouts"):
            correction_weights(*tokens, rule, None)
    else:
        weights, _ = correction_weights(*tokens, rule, None)
        assert torch.equal(weights, correction_weights(*tokens, rule, rollout_sums(*tokens, 2))[0])


# Loops and properties


@every_rule
@settings(derandomize=True, deadline=None, max_examples=25)
@given(columns=columns_of(logprobs, logprobs, rows), low=st.floats(0.1, 0.99), high=st.floats(1.01, 5.0))
def test_weights_equal_the_loop(level, mode, gate, columns, low, high):
    rule = CorrectionRule(level=level, mode=mode, low=low, high=high, gate=gate, gate_low=low / 2, gate_high=high / 2)
    old, behaviour, rollouts = f64(columns[0]), f64(columns[1]), i64(columns[2])
    weights, _ = correction_weights(old, behaviour, rollouts, rule, rollout_sums(old, behaviour, rollouts, 4))
    assert weights.tolist() == pytest.approx(loop_weights(*columns, rule), rel=1e-10, abs=1e-12)


@every_rule
@settings(derandomize=True, deadline=None, max_examples=10)
@given(columns=columns_of(logprobs, rows))
def test_a_ratio_of_one_makes_every_rule_a_no_op(level, mode, gate, columns):
    # bounds that admit nothing but 1, and no divergence at all
    bounds = {"low": 1.0, "high": 1.0, "gate_low": 1.0, "gate_high": 1.0 if gate == "geometric" else 0.0}
    weights, sums = weigh(columns[0], columns[0], columns[1], level=level, mode=mode, gate=gate, **bounds)
    assert weights.tolist() == [1.0] * len(columns[0])
    assert sums["correction_filtered"].item() == sums["gate_filtered"].item() == 0
    assert sums["rho_mean"].item() == sums["weight_squared_mean"].item() == len(columns[0])
    assert sums["log_rho_mean"].item() == sums["k3_mean"].item() == 0


@pytest.mark.parametrize("level", LEVELS)
@settings(derandomize=True, deadline=None)
@given(
    columns=columns_of(logprobs, logprobs, rows),
    low=st.floats(0.1, 1.0),
    high=st.floats(1.0, 5.0),
    factor=st.floats(1.0, 3.0),
)
def test_a_wider_band_keeps_a_superset(level, columns, low, high, factor):
    narrow, _ = weigh(*columns, level=level, mode="mask", low=low, high=high)
    wide, _ = weigh(*columns, level=level, mode="mask", low=low / factor, high=high * factor)
    assert torch.equal(wide[narrow > 0], narrow[narrow > 0])
    smaller, _ = weigh(*columns, level=level, mode="truncate", high=high)
    larger, _ = weigh(*columns, level=level, mode="truncate", high=high * factor)
    assert (larger >= smaller).all()


@pytest.mark.parametrize("gate", ["geometric", "k3", "binary_kl"])
@settings(derandomize=True, deadline=None)
@given(
    columns=columns_of(logprobs, logprobs, rows),
    low=st.floats(0.1, 1.0),
    high=st.floats(0.01, 5.0),
    factor=st.floats(1.0, 3.0),
)
def test_a_wider_gate_admits_a_superset(gate, columns, low, high, factor):
    narrow, closed = weigh(*columns, mode="truncate", gate=gate, gate_low=low, gate_high=high)
    wide, opened = weigh(*columns, mode="truncate", gate=gate, gate_low=low / factor, gate_high=high * factor)
    assert torch.equal(wide[narrow > 0], narrow[narrow > 0])
    assert opened["gate_filtered"].item() <= closed["gate_filtered"].item()


@settings(derandomize=True, deadline=None)
@given(columns_of(logprobs, logprobs, rows))
def test_sums_equal_the_loop(columns):
    weights, sums = weigh(*columns, mode="truncate", high=2.0)
    differences = [old - behaviour for old, behaviour, _ in zip(*columns, strict=True)]
    assert sums["rho_mean"].item() == pytest.approx(sum(math.exp(d) for d in differences))
    assert sums["log_rho_mean"].item() == pytest.approx(sum(differences), abs=1e-9)
    assert sums["k3_mean"].item() == pytest.approx(sum(math.exp(d) - 1 - d for d in differences), abs=1e-9)
    assert sums["weight_squared_mean"].item() == pytest.approx(sum(w * w for w in weights.tolist()))


# Numbers that break


@every_rule
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_in_one_rollout_changes_no_bit_of_another(level, mode, gate, garbage):
    rule = {"level": level, "mode": mode, "low": 0.5, "high": 1.02, "gate": gate, "gate_low": 0.9, "gate_high": 1.0}
    plain, _ = weigh(OLD, BEHAVIOUR, ROWS, **rule)
    beside, _ = weigh([*OLD, garbage, -1.0], [*BEHAVIOUR, -1.0, garbage], [*ROWS, 3, 2], **rule)
    assert torch.equal(plain, beside[:5])


@every_rule
def test_a_nan_among_the_recorded_log_probs_is_not_taken_for_a_rejection(level, mode, gate):
    weights, _ = weigh([-1.0, -1.0], [math.nan, -1.0], [0, 1], level=level, mode=mode, low=0.5, high=2.0, gate=gate)
    is_read = mode != "none" or gate != "none"
    assert weights[0].isnan().item() == is_read
    assert weights[1].item() == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_weights_carry_no_gradient_and_half_precision_makes_float32_weights(level):
    old = torch.tensor([-5.03, -1.0], dtype=torch.bfloat16, requires_grad=True)
    behaviour = torch.tensor([-5.0, -1.0], requires_grad=True)
    rule = CorrectionRule(level=level, mode="truncate", gate="k3", gate_high=1.0)
    sums = rollout_sums(old, behaviour, i64([0, 0]), 1)
    weights, metrics = correction_weights(old, behaviour, i64([0, 0]), rule, sums)
    assert (sums.dtype, weights.dtype) == (torch.float64, torch.float32)
    assert not any(x.requires_grad for x in (sums, weights, *metrics.values()))
    rho = math.exp(old[0].item() + 5.0)
    expected = {"token": [rho, 1.0], "sequence": [rho, rho], "geometric": [math.sqrt(rho)] * 2}[level]
    assert weights.tolist() == pytest.approx(expected)


@every_rule
def test_no_token_has_no_weight(level, mode, gate):
    weights, sums = weigh([], [], [], level=level, mode=mode, gate=gate)
    assert weights.shape == (0,)
    assert all(value.item() == 0.0 for value in sums.values())
