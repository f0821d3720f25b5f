"""Values out of range, and keys that contradict each other: each refused in one line with key, value and fix."""

import pytest

from molt.train.config import Config, check, load_config
from molt.train.errors import ConfigError

AT_LEAST_ONE = (
    "train.num_updates",
    "train.groups_per_update",
    "train.microbatch_tokens",
    "train.keep_checkpoints",
    "algorithm.updates_per_window",
    "rollout.group_size",
    "rollout.max_tokens",
    "actor.num_ranks",
    "engine.num_engines",
    "engine.tensor_parallel_size",
    "engine.max_num_seqs",
    "engine.max_model_len",
    "engine.kv_cache_mb",
    "agent.concurrency",
    "data.eval_samples",
    "pool.max_attempts",
    "gateway.max_body_bytes",
    "gateway.max_session_requests",
    "sft.batch_size",
)
NOT_NEGATIVE = (
    "train.max_staleness",
    "train.checkpoint_every",
    "train.eval_every",
    "actor.optimizer.lr",
    "actor.optimizer.warmup_steps",
    "agent.num_workers",
    "engine.max_restarts",
    "gateway.grace_s",
    "gateway.replay_s",
    "gateway.hold_s",
    "gateway.min_body_bytes_per_s",
)
ABOVE_ZERO = (
    "run.stall_timeout",
    "rollout.timeout_s",
    "pool.lease_ttl_s",
    "gateway.keepalive_s",
    "gateway.header_timeout_s",
    "gateway.write_timeout_s",
    "actor.optimizer.max_grad_norm",
)


def refusal(*overrides):
    """Why a config is refused; None when it is accepted."""
    try:
        check(load_config(None, overrides, Config))
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message
        return message
    return None


def test_the_defaults_are_sound():
    assert refusal() is None


@pytest.mark.parametrize("key", AT_LEAST_ONE)
def test_a_count_is_at_least_one(key):
    assert refusal(f"{key}=0") == f"{key} is 0; it must be at least 1"


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_an_amount_is_not_negative(key):
    value = "-0.5" if key in ("actor.optimizer.lr", "gateway.grace_s", "gateway.replay_s", "gateway.hold_s") else "-1"
    assert refusal(f"{key}={value}") == f"{key} is {value}; it must not be negative"
    assert refusal(f"{key}=0") is None


@pytest.mark.parametrize("key", ABOVE_ZERO)
def test_a_limit_is_above_zero(key):
    assert refusal(f"{key}=0.0") == f"{key} is 0.0; it must be above 0"


@pytest.mark.parametrize("key", ["rollout.temperature", "rollout.top_p"])
def test_sampling_that_leaves_no_probability_is_refused(key):
    assert refusal(f"{key}=0.0") == f"{key} is 0.0; it must be above 0: every token needs a probability to learn from"


def test_top_p_is_a_probability():
    assert refusal("rollout.top_p=1.5") == "rollout.top_p is 1.5; it must be at most 1"


@pytest.mark.parametrize("gamma", ["0.0", "1.01", "-1.0"])
def test_gamma_is_a_discount(gamma):
    message = refusal(f"algorithm.gamma={gamma}", "algorithm.estimator=reinforce_pp")
    assert message == f"algorithm.gamma is {gamma}; it must be above 0 and at most 1"


@pytest.mark.parametrize(("low", "high"), [("2.0", "2.0"), ("3.0", "1.0"), ("-0.5", "2.0")])
def test_a_correction_has_a_band_that_tokens_can_lie_in(low, high):
    message = refusal(f"algorithm.correction_low={low}", f"algorithm.correction_high={high}")
    assert message == (
        f"algorithm.correction_low is {low} and algorithm.correction_high {high}; the first must be below the second, "
        "and not negative"
    )


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "group_mean"])
def test_an_estimator_that_compares_needs_a_group(estimator):
    assert refusal("rollout.group_size=1", f"algorithm.estimator={estimator}") == (
        f"rollout.group_size is 1, but algorithm.estimator {estimator!r} compares the rollouts of a group: "
        "set rollout.group_size to 2 or more, or algorithm.estimator to 'reinforce_pp'"
    )


def test_an_estimator_that_does_not_compare_needs_none():
    assert refusal("rollout.group_size=1", "algorithm.estimator=reinforce_pp") is None


@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_a_cut_distribution_has_other_ratios_than_the_correction_assumes(correction):
    assert refusal("rollout.top_p=0.9", f"algorithm.correction={correction}") == (
        f"rollout.top_p is 0.9, which biases the ratios of algorithm.correction {correction!r}: "
        "set rollout.top_p to 1, or algorithm.correction to 'none'"
    )


def test_a_cut_distribution_without_a_correction_is_accepted():
    assert refusal("rollout.top_p=0.9", "algorithm.correction=none", "train.max_staleness=0") is None


def test_a_discount_that_does_nothing_is_refused():
    assert refusal("algorithm.gamma=0.9") == (
        "algorithm.gamma is 0.9, which has no effect with algorithm.estimator 'grpo': "
        "set algorithm.gamma to 1, or algorithm.estimator to 'reinforce_pp'"
    )
    assert refusal("algorithm.gamma=0.9", "algorithm.estimator=reinforce_pp") is None


def test_the_steps_of_a_window_have_equally_many_groups():
    assert refusal("algorithm.updates_per_window=3", "train.groups_per_update=16") == (
        "algorithm.updates_per_window is 3, which does not divide train.groups_per_update 16: "
        "set it so that every optimizer step has equally many groups"
    )
    assert refusal("algorithm.updates_per_window=4", "train.groups_per_update=16") is None


@pytest.mark.parametrize("key", ["clip_low", "clip_high"])
def test_a_clip_that_does_nothing_is_refused(key):
    assert refusal(f"algorithm.{key}=0.1").startswith(
        "algorithm.clip_low and algorithm.clip_high have no effect with algorithm.updates_per_window 1"
    )
    assert refusal(f"algorithm.{key}=0.1", "algorithm.updates_per_window=2") is None


def test_off_policy_tokens_need_a_correction():
    assert refusal("train.max_staleness=2", "algorithm.correction=none") == (
        "train.max_staleness is 2, so tokens may be off-policy, but algorithm.correction is 'none': "
        "set it to 'tis' or 'icepop', or train.max_staleness to 0"
    )


@pytest.mark.parametrize("policy", ["default", "client"])
def test_training_samples_as_the_loss_assumes(policy):
    assert refusal(f"rollout.sampling_policy={policy}") == (
        f"rollout.sampling_policy is {policy!r}, but training needs the sampling that the loss assumes: "
        "set it to 'enforce'"
    )


def test_evaluations_need_held_out_rows():
    assert refusal("train.eval_every=5").startswith("train.eval_every is 5, which has no effect without held-out rows")
    assert refusal("train.eval_every=5", "data.eval_path=held_out.jsonl") is None
