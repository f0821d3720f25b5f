"""Faults that the keys show alone or together: each stops the run before it spends anything."""

from molt.train.config.check_algorithm import check_algorithm
from molt.train.config.check_correction import check_correction
from molt.train.config.check_eval import check_eval
from molt.train.config.check_pool import check_data, check_outcomes, check_refit, check_sessions, check_windows
from molt.train.config.check_ranges import check_ranges
from molt.train.config.sections import Config
from molt.train.errors import ConfigError


def check(config: Config) -> None:
    """Raise ConfigError for values out of range and for combinations that bias the learning or do nothing."""
    check_ranges(config)
    check_algorithm(config)
    check_correction(config)
    check_data(config)
    check_eval(config)
    check_outcomes(config)
    check_refit(config)
    check_sessions(config)
    check_windows(config)
    steps, groups = config.algorithm.updates_per_window, config.train.groups_per_update
    if groups % steps:
        raise ConfigError(
            f"algorithm.updates_per_window is {steps}, which does not divide train.groups_per_update {groups}: "
            "set it so that every optimizer step has equally many groups"
        )
    if config.rollout.sampling_policy != "enforce":
        raise ConfigError(
            f"rollout.sampling_policy is {config.rollout.sampling_policy!r}, but training needs the sampling that the "
            "loss assumes: set it to 'enforce'"
        )
