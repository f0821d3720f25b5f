"""Values that are out of range, each alone."""

import math
from collections.abc import Callable

from molt.train.config.chosen import leaf_values
from molt.train.config.sections import Config
from molt.train.errors import ConfigError

_AT_LEAST_ONE = (
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
_NOT_NEGATIVE = (
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
_ABOVE_ZERO = (
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
_ABOVE_ZERO_TO_ONE = ("algorithm.gamma", "algorithm.clip_low")
_ZERO_TO_ONE = ("algorithm.lam", "actor.optimizer.min_lr_ratio", "critic.optimizer.min_lr_ratio")
_ZERO_TO_BELOW_ONE = tuple(f"{owner}.optimizer.{beta}" for owner in ("actor", "critic") for beta in ("beta1", "beta2"))
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda value: value >= 1, "be at least 1"),
    (_NOT_NEGATIVE, lambda value: value >= 0, "not be negative"),
    (_ABOVE_ZERO, lambda value: value > 0, "be above 0"),
    (_ABOVE_ZERO_TO_ONE, lambda value: 0 < value <= 1, "be above 0 and at most 1"),
    (_ZERO_TO_ONE, lambda value: 0 <= value <= 1, "be at least 0 and at most 1"),
    (_ZERO_TO_BELOW_ONE, lambda value: 0 <= value < 1, "be at least 0 and below 1"),
)


def check_ranges(config: Config) -> None:
    """Raise ConfigError for the first value that is out of its range."""
    values = leaf_values(config)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} is {value}; it must be finite")
    for keys, is_inside, wanted in _RANGES:
        for key in keys:
            if not is_inside(values[key]):
                raise ConfigError(f"{key} is {values[key]}; it must {wanted}")
    _check_probabilities(config)
    if config.algorithm.dual_clip and config.algorithm.dual_clip <= 1:
        raise ConfigError(
            f"algorithm.dual_clip is {config.algorithm.dual_clip}; it must be above 1 (3 is usual), or 0 for no bound"
        )


def _check_probabilities(config: Config) -> None:
    rollout = config.rollout
    for key, value in (("rollout.temperature", rollout.temperature), ("rollout.top_p", rollout.top_p)):
        if value <= 0:
            raise ConfigError(f"{key} is {value}; it must be above 0: every token needs a probability to learn from")
    if rollout.top_p > 1:
        raise ConfigError(f"rollout.top_p is {rollout.top_p}; it must be at most 1")
