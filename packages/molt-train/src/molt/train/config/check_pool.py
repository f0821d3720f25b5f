"""Keys of the data, of rollouts and windows, and of the pool that contradict each other, or that do nothing."""

import math
from collections.abc import Sequence

from molt.train.config.algorithm import compares_groups
from molt.train.config.chosen import chosen_keys
from molt.train.config.data import DatasetConfig
from molt.train.config.sections import Config
from molt.train.errors import ConfigError


def check_data(config: Config) -> None:
    """Raise ConfigError for data sets that cannot be told apart, or that cannot be used as they are."""
    for section, path, sets in (
        ("data", config.data.path, config.data.sets),
        ("eval", config.eval.path, config.eval.sets),
    ):
        if path and sets:
            raise ConfigError(
                f"{section}.path is {path!r}, but {section}.sets names {len(sets)} data sets, too: give one of the two"
            )
        _check_sets(f"{section}.sets", sets)
    for number, dataset in enumerate(config.data.sets):
        if not (dataset.weight > 0 and math.isfinite(dataset.weight)):
            raise ConfigError(f"data.sets[{number}].weight is {dataset.weight}; it must be finite and above 0")


def _check_sets(key: str, sets: Sequence[DatasetConfig]) -> None:
    for number, dataset in enumerate(sets):
        where = f"{key}[{number}]"
        if not dataset.name or "/" in dataset.name:
            raise ConfigError(
                f"{where}.name is {dataset.name!r}; it must not be empty, nor have a slash: task ids are NAME/ID"
            )
        if dataset.name in (earlier.name for earlier in sets[:number]):
            raise ConfigError(f"{where}.name is {dataset.name!r}, the name of an earlier one: give each its own")
        if not dataset.path:
            raise ConfigError(f"{where}.path is empty: give the JSONL file of {dataset.name!r}")


def check_windows(config: Config) -> None:
    """Raise ConfigError for keys about the choice of groups that have no effect."""
    chosen, estimator = chosen_keys(config), config.algorithm.estimator
    compares = compares_groups(estimator, group_size=config.rollout.group_size)
    if config.train.drop_degenerate and not compares:
        raise ConfigError(
            f"train.drop_degenerate is true, which has no effect with algorithm.estimator {estimator!r}: groups whose "
            "rewards are all equal teach it something; leave it out, or set algorithm.estimator to one that compares a "
            "group, such as 'grpo'"
        )
    if "train.max_refill" in chosen and not config.train.drop_degenerate:
        raise ConfigError(
            f"train.max_refill is {config.train.max_refill}, which has no effect with train.drop_degenerate false: "
            "leave it out, or set train.drop_degenerate to true"
        )


def check_sessions(config: Config) -> None:
    """Raise ConfigError for a wait for rewards that ends before its sessions do."""
    pool = config.pool
    if pool.reward_wait_s < pool.session_idle_s:
        raise ConfigError(
            f"pool.reward_wait_s is {pool.reward_wait_s}, below pool.session_idle_s {pool.session_idle_s}: results "
            "would be refused of sessions that still take model calls; raise the one, or lower the other"
        )


def check_outcomes(config: Config) -> None:
    """Raise ConfigError for policies about outcomes that do nothing."""
    pool, evaluates = config.pool, bool(config.eval.path or config.eval.sets)
    policies = {name: getattr(pool, name) for name in ("on_failed", "on_timeout", "on_truncated")}
    for name, policy in policies.items():
        if policy == "retry" and pool.max_attempts == 1:
            raise ConfigError(
                f"pool.{name} is 'retry', which has no effect with pool.max_attempts 1: set pool.{name} to 'mask', or "
                "pool.max_attempts to 2 or more"
            )
    is_retried = evaluates or "retry" in (*policies.values(), pool.on_infrastructure)
    if "pool.max_attempts" in chosen_keys(config) and not is_retried:
        raise ConfigError(
            f"pool.max_attempts is {pool.max_attempts}, which has no effect when no outcome is retried: leave it out, "
            "or set pool.on_infrastructure to 'retry'"
        )


def check_refit(config: Config) -> None:
    """Raise ConfigError for a prefix cache that outlives its weights where every token is to be on policy."""
    if config.engine.keep_stale_cache and config.train.max_staleness == 0:
        raise ConfigError(
            "engine.keep_stale_cache is true, but with train.max_staleness 0 no token may come from older weights, and "
            "their keys and values do: set it to false, or train.max_staleness to 1 or more"
        )
