"""Faults that the keys show together: each stops the run before it spends anything."""

from molt.train.config.sections import CLIP_HIGH, CLIP_LOW, Config
from molt.train.errors import ConfigError

GROUP_ESTIMATORS = ("grpo", "rloo", "group_mean")


def check(config: Config) -> None:
    """Raise ConfigError for values out of range and for combinations that bias the learning or do nothing."""
    _check_ranges(config)
    _check_probabilities(config)
    size, estimator = config.rollout.group_size, config.algorithm.estimator
    if estimator in GROUP_ESTIMATORS and size < 2:
        raise ConfigError(
            f"rollout.group_size is {size}, but algorithm.estimator {estimator!r} compares the rollouts of a group: "
            "set rollout.group_size to 2 or more, or algorithm.estimator to 'reinforce_pp'"
        )
    if config.rollout.top_p < 1 and config.algorithm.correction != "none":
        raise ConfigError(
            f"rollout.top_p is {config.rollout.top_p}, which biases the ratios of algorithm.correction "
            f"{config.algorithm.correction!r}: set rollout.top_p to 1, or algorithm.correction to 'none'"
        )
    if config.algorithm.gamma != 1 and estimator != "reinforce_pp":
        raise ConfigError(
            f"algorithm.gamma is {config.algorithm.gamma}, which has no effect with algorithm.estimator {estimator!r}: "
            "set algorithm.gamma to 1, or algorithm.estimator to 'reinforce_pp'"
        )
    steps, groups = config.algorithm.updates_per_window, config.train.groups_per_update
    if groups % steps:
        raise ConfigError(
            f"algorithm.updates_per_window is {steps}, which does not divide train.groups_per_update {groups}: "
            "set it so that every optimizer step has equally many groups"
        )
    if steps == 1 and (config.algorithm.clip_low, config.algorithm.clip_high) != (CLIP_LOW, CLIP_HIGH):
        raise ConfigError(
            "algorithm.clip_low and algorithm.clip_high have no effect with algorithm.updates_per_window 1, where the "
            "policy ratio is always 1: leave them out, or set algorithm.updates_per_window to 2 or more"
        )
    if config.train.max_staleness > 0 and config.algorithm.correction == "none":
        raise ConfigError(
            f"train.max_staleness is {config.train.max_staleness}, so tokens may be off-policy, but "
            "algorithm.correction is 'none': set it to 'tis' or 'icepop', or train.max_staleness to 0"
        )
    if config.train.eval_every and not config.data.eval_path:
        raise ConfigError(
            f"train.eval_every is {config.train.eval_every}, which has no effect without held-out rows: give "
            "data.eval_path, or set train.eval_every to 0"
        )
    if config.rollout.sampling_policy != "enforce":
        raise ConfigError(
            f"rollout.sampling_policy is {config.rollout.sampling_policy!r}, but training needs the sampling that the "
            "loss assumes: set it to 'enforce'"
        )


def _check_ranges(config: Config) -> None:
    at_least_one = {
        "train.num_updates": config.train.num_updates,
        "train.groups_per_update": config.train.groups_per_update,
        "train.microbatch_tokens": config.train.microbatch_tokens,
        "train.keep_checkpoints": config.train.keep_checkpoints,
        "algorithm.updates_per_window": config.algorithm.updates_per_window,
        "rollout.group_size": config.rollout.group_size,
        "rollout.max_tokens": config.rollout.max_tokens,
        "actor.num_ranks": config.actor.num_ranks,
        "engine.num_engines": config.engine.num_engines,
        "engine.tensor_parallel_size": config.engine.tensor_parallel_size,
        "engine.max_num_seqs": config.engine.max_num_seqs,
        "engine.max_model_len": config.engine.max_model_len,
        "engine.kv_cache_mb": config.engine.kv_cache_mb,
        "agent.concurrency": config.agent.concurrency,
        "data.eval_samples": config.data.eval_samples,
        "pool.max_attempts": config.pool.max_attempts,
        "gateway.max_body_bytes": config.gateway.max_body_bytes,
        "gateway.max_session_requests": config.gateway.max_session_requests,
        "sft.batch_size": config.sft.batch_size,
    }
    for key, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{key} is {value}; it must be at least 1")
    not_negative = {
        "train.max_staleness": config.train.max_staleness,
        "train.checkpoint_every": config.train.checkpoint_every,
        "train.eval_every": config.train.eval_every,
        "actor.optimizer.lr": config.actor.optimizer.lr,
        "actor.optimizer.warmup_steps": config.actor.optimizer.warmup_steps,
        "agent.num_workers": config.agent.num_workers,
        "engine.max_restarts": config.engine.max_restarts,
        "gateway.grace_s": config.gateway.grace_s,
        "gateway.replay_s": config.gateway.replay_s,
        "gateway.hold_s": config.gateway.hold_s,
        "gateway.min_body_bytes_per_s": config.gateway.min_body_bytes_per_s,
    }
    for key, value in not_negative.items():
        if value < 0:
            raise ConfigError(f"{key} is {value}; it must not be negative")
    above_zero = {
        "run.stall_timeout": config.run.stall_timeout,
        "rollout.timeout_s": config.rollout.timeout_s,
        "pool.lease_ttl_s": config.pool.lease_ttl_s,
        "gateway.keepalive_s": config.gateway.keepalive_s,
        "gateway.header_timeout_s": config.gateway.header_timeout_s,
        "gateway.write_timeout_s": config.gateway.write_timeout_s,
        "actor.optimizer.max_grad_norm": config.actor.optimizer.max_grad_norm,
    }
    for key, value in above_zero.items():
        if value <= 0:
            raise ConfigError(f"{key} is {value}; it must be above 0")


def _check_probabilities(config: Config) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    for key, value in (("rollout.temperature", rollout.temperature), ("rollout.top_p", rollout.top_p)):
        if value <= 0:
            raise ConfigError(f"{key} is {value}; it must be above 0: every token needs a probability to learn from")
    if rollout.top_p > 1:
        raise ConfigError(f"rollout.top_p is {rollout.top_p}; it must be at most 1")
    if not 0 < algorithm.gamma <= 1:
        raise ConfigError(f"algorithm.gamma is {algorithm.gamma}; it must be above 0 and at most 1")
    if not 0 <= algorithm.correction_low < algorithm.correction_high:
        raise ConfigError(
            f"algorithm.correction_low is {algorithm.correction_low} and algorithm.correction_high "
            f"{algorithm.correction_high}; the first must be below the second, and not negative"
        )
