"""Values out of range, each refused in one line with key, value and what is wanted."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from molt.train.config import Config
from molt.train.config.chosen import leaf_values

from .refusals import refusal

AT_LEAST_ONE = (
    "train.num_updates",
    "train.groups_per_update",
    "train.microbatch_tokens",
    "train.keep_checkpoints",
    "algorithm.updates_per_window",
    "algorithm.kl_horizon",
    "rollout.group_size",
    "rollout.max_tokens",
    "actor.num_ranks",
    "actor.logprob_chunk",
    "engine.num_engines",
    "engine.tensor_parallel_size",
    "engine.max_num_seqs",
    "engine.max_model_len",
    "engine.kv_cache_mb",
    "agent.concurrency",
    "eval.samples",
    "pool.max_attempts",
    "gateway.max_body_bytes",
    "gateway.max_session_requests",
    "sft.batch_size",
)
NOT_NEGATIVE = (
    "train.max_staleness",
    "train.checkpoint_every",
    "train.max_refill",
    "rollout.oversample",
    "data.epochs",
    "eval.every",
    "eval.max_tokens",
    "pool.min_free_mb",
    "algorithm.aggregation_length",
    "algorithm.entropy_coef",
    "algorithm.kl_coef",
    "algorithm.kl_target",
    "reward.overlong_length",
    "reward.overlong_ramp",
    "critic.warmup_updates",
    "critic.value_clip",
    "actor.optimizer.lr",
    "actor.optimizer.weight_decay",
    "actor.optimizer.warmup_steps",
    "critic.optimizer.lr",
    "critic.optimizer.weight_decay",
    "critic.optimizer.warmup_steps",
    "agent.num_workers",
    "engine.max_restarts",
    "actor.max_restarts",
    "gateway.grace_s",
    "gateway.replay_s",
    "gateway.hold_s",
    "gateway.min_body_bytes_per_s",
)
ABOVE_ZERO = (
    "run.stall_timeout",
    "rollout.timeout_s",
    "pool.lease_ttl_s",
    "pool.session_idle_s",
    "pool.reward_wait_s",
    "pool.group_wait_s",
    "gateway.keepalive_s",
    "gateway.header_timeout_s",
    "gateway.write_timeout_s",
    "algorithm.clip_high",
    "algorithm.distillation_coef",
    "actor.optimizer.eps",
    "actor.optimizer.max_grad_norm",
    "critic.optimizer.eps",
    "critic.optimizer.max_grad_norm",
)
VALUES = leaf_values(Config())


@pytest.mark.parametrize("key", AT_LEAST_ONE)
def test_a_count_is_at_least_one(key):
    assert refusal(f"{key}=0") == f"{key} is 0; it must be at least 1"


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_an_amount_is_not_negative(key):
    value = "-0.5" if isinstance(VALUES[key], float) else "-1"
    assert refusal(f"{key}={value}") == f"{key} is {value}; it must not be negative"
    assert "negative" not in (refusal(f"{key}=0", "algorithm.estimator=gae") or "")


@pytest.mark.parametrize("key", ABOVE_ZERO)
def test_a_limit_is_above_zero(key):
    assert refusal(f"{key}=0.0") == f"{key} is 0.0; it must be above 0"


@pytest.mark.parametrize("key", [key for key, value in VALUES.items() if isinstance(value, float)])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_number_is_finite(key, value):
    assert refusal(f"{key}={value}") == f"{key} is {value}; it must be finite"


@pytest.mark.parametrize("key", ["rollout.temperature", "rollout.top_p"])
def test_sampling_that_leaves_no_probability_is_refused(key):
    assert refusal(f"{key}=0.0") == f"{key} is 0.0; it must be above 0: every token needs a probability to learn from"


def test_top_p_is_a_probability():
    assert refusal("rollout.top_p=1.5") == "rollout.top_p is 1.5; it must be at most 1"


@pytest.mark.parametrize("value", ["0.0", "1.01", "-1.0"])
@pytest.mark.parametrize("key", ["algorithm.gamma", "algorithm.clip_low"])
def test_a_discount_and_a_lower_clip_are_fractions_above_zero(key, value):
    assert refusal(f"{key}={value}") == f"{key} is {value}; it must be above 0 and at most 1"


@pytest.mark.parametrize("value", ["1.01", "-0.1"])
@pytest.mark.parametrize("key", ["algorithm.lam", "actor.optimizer.min_lr_ratio", "critic.optimizer.min_lr_ratio"])
def test_a_weight_of_longer_returns_and_a_ratio_of_rates_are_fractions(key, value):
    assert refusal(f"{key}={value}") == f"{key} is {value}; it must be at least 0 and at most 1"


@pytest.mark.parametrize("value", ["1.0", "-0.1"])
@pytest.mark.parametrize(
    "key", [f"{owner}.optimizer.{beta}" for owner in ("actor", "critic") for beta in ("beta1", "beta2")]
)
def test_a_decay_is_below_one(key, value):
    assert refusal(f"{key}={value}") == f"{key} is {value}; it must be at least 0 and below 1"


@pytest.mark.parametrize("value", ["1.0", "0.5", "-3.0"])
def test_a_dual_clip_is_above_one(value):
    assert refusal(f"algorithm.dual_clip={value}", "algorithm.updates_per_window=2") == (
        f"algorithm.dual_clip is {value}; it must be above 1 (3 is usual), or 0 for no bound"
    )
