"""Corrections that bias the loss or contradict themselves: each refused in one line with key, value and fix."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .refusals import refusal

CUSTOM = ("algorithm.correction=custom", "algorithm.correction_level=token")
NAMES = ("tis", "icepop", "seq-mask-tis", "mis", "k3-gate", "flash")


@pytest.mark.parametrize("name", NAMES)
def test_a_named_correction_is_sound_as_it_is(name):
    assert refusal(f"algorithm.correction={name}") is None


@pytest.mark.parametrize("correction", NAMES)
def test_a_cut_distribution_has_other_ratios_than_the_correction_assumes(correction):
    assert refusal("rollout.top_p=0.9", f"algorithm.correction={correction}") == (
        f"rollout.top_p is 0.9, which biases the ratios of algorithm.correction {correction!r}: "
        "set rollout.top_p to 1, or algorithm.correction to 'none'"
    )


def test_a_cut_distribution_without_a_correction_is_accepted():
    assert refusal("rollout.top_p=0.9", "algorithm.correction=none", "train.max_staleness=0") is None


def test_off_policy_tokens_need_a_correction():
    assert refusal("train.max_staleness=2", "algorithm.correction=none") == (
        "train.max_staleness is 2, so tokens may be off-policy, but algorithm.correction is 'none': "
        "set it to 'tis' or 'icepop', or train.max_staleness to 0"
    )


@pytest.mark.parametrize(
    ("loss", "steps", "is_sound"),
    [("ppo", 2, True), ("ppo", 1, False), ("gspo", 2, False), ("policy_gradient", 1, False)],
)
def test_decoupled_ppo_is_the_clipped_loss_of_several_steps(loss, steps, is_sound):
    message = refusal(
        "algorithm.correction=decoupled-ppo", f"algorithm.loss={loss}", f"algorithm.updates_per_window={steps}"
    )
    if is_sound:
        assert message is None
    else:
        assert message.startswith(
            f"algorithm.correction is 'decoupled-ppo', but algorithm.loss is {loss!r} with "
            f"algorithm.updates_per_window {steps}: "
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("correction_level", "'sequence'"),
        ("correction_mode", "'mask'"),
        ("correction_low", "0.5"),
        ("correction_high", "3.0"),
        ("gate", "'k3'"),
        ("gate_low", "0.5"),
        ("gate_high", "0.1"),
    ],
)
def test_keys_of_no_correction_are_refused(key, value):
    assert refusal("train.max_staleness=0", "algorithm.correction=none", f"algorithm.{key}={value}") == (
        f"algorithm.{key} is {value}, which has no effect with algorithm.correction 'none': leave it out, or set "
        "algorithm.correction to 'custom'"
    )


def test_a_custom_correction_says_its_level_and_its_mode():
    assert refusal("algorithm.correction=custom", "algorithm.correction_mode=mask") == (
        "algorithm.correction_level is not given, which algorithm.correction 'custom' needs: 'token', 'sequence' or "
        "'geometric'"
    )
    assert refusal(*CUSTOM) == (
        "algorithm.correction_mode is not given, which algorithm.correction 'custom' needs: 'truncate', 'clip', 'mask' "
        "or 'none'"
    )
    assert refusal(*CUSTOM, "algorithm.correction_mode=truncate") is None


def test_who_says_so_may_leave_off_policy_tokens_uncorrected_or_to_a_gate():
    none = ("algorithm.correction=custom", "algorithm.correction_mode=none", "train.max_staleness=8")
    assert refusal(*none) is None
    assert refusal(*none, "rollout.top_p=0.9") is None
    assert refusal(*none, "algorithm.gate=k3", "algorithm.gate_high=0.01") is None
    assert refusal(*none, "algorithm.correction_level=token").startswith(
        "algorithm.correction_level is 'token', which has no effect with algorithm.correction_mode 'none'"
    )


def test_a_name_of_which_nothing_is_left_is_refused():
    assert refusal("algorithm.correction_mode=none").startswith(
        "algorithm.correction_mode is 'none', which leaves nothing of algorithm.correction 'tis'"
    )
    assert refusal("algorithm.correction=flash", "algorithm.correction_mode=none") is None


@pytest.mark.parametrize(
    ("low", "high"), [("1.5", "2.0"), ("0.5", "0.9"), ("2.0", "0.5"), ("1.0", "1.0"), ("-0.5", "2.0")]
)
def test_the_bounds_have_the_ratio_of_an_on_policy_token_between_them(low, high):
    message = refusal(
        "algorithm.correction=icepop", f"algorithm.correction_low={low}", f"algorithm.correction_high={high}"
    )
    assert message == (
        f"algorithm.correction_low is {low} and algorithm.correction_high {high}; between them must lie 1, which rho "
        "is where a token is on-policy, and neither may be negative"
    )


def test_a_lower_bound_of_what_is_truncated_above_is_refused():
    assert refusal("algorithm.correction_low=0.5") == (
        "algorithm.correction_low is 0.5, which has no effect where rho is truncated above only: leave it out, or set "
        "algorithm.correction_mode to 'clip' or 'mask'"
    )
    assert refusal("algorithm.correction_low=0.5", "algorithm.correction_mode=clip") is None


@pytest.mark.parametrize("mode", ["clip", "mask"])
def test_a_mode_without_bounds_is_refused(mode):
    mode = f"algorithm.correction_mode={mode}"
    assert "which has no effect without bounds" in refusal(*CUSTOM, mode)
    assert refusal(*CUSTOM, mode, "algorithm.correction_high=2.0") is None


@pytest.mark.parametrize(
    ("gate", "key"), [("none", "gate_low"), ("none", "gate_high"), ("k3", "gate_low"), ("binary_kl", "gate_low")]
)
def test_a_bound_that_a_gate_does_not_have_is_refused(gate, key):
    message = refusal(f"algorithm.gate={gate}", f"algorithm.{key}=0.1")
    assert message.startswith(f"algorithm.{key} is 0.1, which has no effect with algorithm.gate {gate!r}: leave it out")


def test_a_gate_of_ones_own_says_its_bound_for_the_scales_differ():
    assert refusal("algorithm.correction=flash", "algorithm.gate=k3") == (
        "algorithm.gate_high is not given, and algorithm.gate 'k3' has no bound without it"
    )
    assert refusal("algorithm.correction=flash", "algorithm.gate=k3", "algorithm.gate_high=0.01") is None


@pytest.mark.parametrize(("low", "high"), [("0.9", "0.99"), ("1.01", "1.1"), ("-0.1", "1.1")])
def test_a_geometric_gate_lets_rollouts_of_the_policy_through(low, high):
    message = refusal("algorithm.correction=seq-mask-tis", f"algorithm.gate_low={low}", f"algorithm.gate_high={high}")
    assert message.startswith(f"algorithm.gate_low is {low} and algorithm.gate_high {high}; between them must lie 1, ")


@pytest.mark.parametrize("correction", ["k3-gate", "flash"])
def test_a_gate_on_a_divergence_is_above_zero(correction):
    assert refusal(f"algorithm.correction={correction}", "algorithm.gate_high=0.0") == (
        "algorithm.gate_high is 0.0; it must be above 0, or every rollout is gated"
    )
