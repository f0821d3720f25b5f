"""Corrections that bias the loss, or whose keys contradict each other."""

import math

from molt.train.config.algorithm import AlgorithmConfig, CorrectionRule
from molt.train.config.presets import correction_rule
from molt.train.config.sections import Config
from molt.train.errors import ConfigError

_KEYS = ("correction_level", "correction_mode", "correction_low", "correction_high", "gate", "gate_low", "gate_high")


def check_correction(config: Config) -> None:
    """Raise ConfigError for a correction that does not fit the run or itself."""
    algorithm, rule = config.algorithm, correction_rule(config.algorithm)
    is_idle = rule.mode == "none" and rule.gate == "none"
    if config.rollout.top_p < 1 and not is_idle:
        raise ConfigError(
            f"rollout.top_p is {config.rollout.top_p}, which biases the ratios of algorithm.correction "
            f"{algorithm.correction!r}: set rollout.top_p to 1, or algorithm.correction to 'none'"
        )
    if config.train.max_staleness > 0 and algorithm.correction == "none":
        raise ConfigError(
            f"train.max_staleness is {config.train.max_staleness}, so tokens may be off-policy, but "
            "algorithm.correction is 'none': set it to 'tis' or 'icepop', or train.max_staleness to 0"
        )
    if algorithm.correction == "decoupled-ppo" and (algorithm.loss != "ppo" or algorithm.updates_per_window < 2):
        raise ConfigError(
            f"algorithm.correction is 'decoupled-ppo', but algorithm.loss is {algorithm.loss!r} with "
            f"algorithm.updates_per_window {algorithm.updates_per_window}: it corrects the clipped loss of several "
            "steps a window; set algorithm.loss to 'ppo' and algorithm.updates_per_window to 2 or more, or "
            "algorithm.correction to 'tis'"
        )
    if is_idle and algorithm.correction not in ("none", "custom"):
        raise ConfigError(
            "algorithm.correction_mode is 'none', which leaves nothing of algorithm.correction "
            f"{algorithm.correction!r}: leave it out, or set algorithm.correction to 'custom'"
        )
    _check_said(algorithm)
    _check_weights(algorithm, rule)
    _check_gate(algorithm, rule)


def _check_said(algorithm: AlgorithmConfig) -> None:
    """What `none` and `custom` leave to say."""
    if algorithm.correction == "none":
        for key in _KEYS:
            if (value := getattr(algorithm, key)) not in ("", None):
                raise ConfigError(
                    f"algorithm.{key} is {value!r}, which has no effect with algorithm.correction 'none': leave it "
                    "out, or set algorithm.correction to 'custom'"
                )
    if algorithm.correction == "custom":
        for key, choices in (
            ("correction_mode", "'truncate', 'clip', 'mask' or 'none'"),
            ("correction_level", "'token', 'sequence' or 'geometric'"),
        ):
            if not getattr(algorithm, key) and algorithm.correction_mode != "none":
                raise ConfigError(f"algorithm.{key} is not given, which algorithm.correction 'custom' needs: {choices}")


def _check_weights(algorithm: AlgorithmConfig, rule: CorrectionRule) -> None:
    if algorithm.correction_mode == "none":
        for key in ("correction_level", "correction_low", "correction_high"):
            if (value := getattr(algorithm, key)) not in ("", None):
                raise ConfigError(
                    f"algorithm.{key} is {value!r}, which has no effect with algorithm.correction_mode 'none': leave "
                    "it out, or set algorithm.correction_mode to 'truncate', 'clip' or 'mask'"
                )
    if rule.mode == "none":
        return
    if rule.mode == "truncate" and algorithm.correction_low is not None:
        raise ConfigError(
            f"algorithm.correction_low is {algorithm.correction_low}, which has no effect where rho is truncated above "
            "only: leave it out, or set algorithm.correction_mode to 'clip' or 'mask'"
        )
    if not (0 <= rule.low <= 1 <= rule.high and rule.low < rule.high):
        raise ConfigError(
            f"algorithm.correction_low is {rule.low} and algorithm.correction_high {rule.high}; between them must lie "
            "1, which rho is where a token is on-policy, and neither may be negative"
        )
    if rule.mode != "truncate" and rule.low == 0 and math.isinf(rule.high):
        raise ConfigError(
            f"algorithm.correction_mode is {rule.mode!r}, which has no effect without bounds: give "
            "algorithm.correction_low or algorithm.correction_high"
        )


def _check_gate(algorithm: AlgorithmConfig, rule: CorrectionRule) -> None:
    idle = {"none": ("gate_low", "gate_high"), "k3": ("gate_low",), "binary_kl": ("gate_low",)}
    for key in idle.get(rule.gate, ()):
        if (value := getattr(algorithm, key)) is not None:
            raise ConfigError(
                f"algorithm.{key} is {value}, which has no effect with algorithm.gate {rule.gate!r}: leave it out, or "
                "set algorithm.gate to 'geometric'"
            )
    if rule.gate == "none":
        return
    if math.isinf(rule.gate_high):
        raise ConfigError(f"algorithm.gate_high is not given, and algorithm.gate {rule.gate!r} has no bound without it")
    if rule.gate == "geometric" and not 0 <= rule.gate_low < 1 < rule.gate_high:
        raise ConfigError(
            f"algorithm.gate_low is {rule.gate_low} and algorithm.gate_high {rule.gate_high}; between them must lie 1, "
            "the mean of rho where a rollout is on-policy, and neither may be negative"
        )
    if rule.gate_high <= 0:
        raise ConfigError(f"algorithm.gate_high is {rule.gate_high}; it must be above 0, or every rollout is gated")
