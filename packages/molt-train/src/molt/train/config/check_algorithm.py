"""Algorithms that cannot be as configured, and keys that have no part in the one that is."""

import difflib
from typing import Any, NamedTuple

from molt.train.config.algorithm import ESTIMATORS, compares_groups, is_custom
from molt.train.config.chosen import chosen_keys
from molt.train.config.sections import Config
from molt.train.errors import ConfigError

_DISCOUNTING = ("reinforce", "reinforce_pp", "gae")


class _Part(NamedTuple):
    """Keys that act only under a condition."""

    keys: tuple[str, ...]
    acts: bool
    otherwise: str
    """What stands against it."""
    fix: str
    """What would make them act."""


def check_algorithm(config: Config) -> None:
    """Raise ConfigError for an algorithm that is not whole, or a key that it has no use for."""
    _check_estimator(config)
    _check_loss(config)
    _check_helpers(config)
    _check_reward(config)
    chosen = chosen_keys(config)
    for part in (*_parts_of_estimators(config, chosen), *_parts_of_losses(config), *_parts_of_kl(config)):
        for key in part.keys:
            if key in chosen and not part.acts:
                raise ConfigError(
                    f"{key} is {chosen[key]!r}, which has no effect with {part.otherwise}: leave it out, or {part.fix}"
                )


def _check_estimator(config: Config) -> None:
    estimator, size = config.algorithm.estimator, config.rollout.group_size
    if is_custom(estimator):
        where, _, function = estimator.rpartition(":")
        if not where or not function.isidentifier():
            raise ConfigError(
                f"algorithm.estimator is {estimator!r}; a function of your own is FILE.py:FUNCTION or module:FUNCTION"
            )
    elif estimator not in ESTIMATORS:
        (near,) = difflib.get_close_matches(estimator, ESTIMATORS, n=1, cutoff=0.0)
        raise ConfigError(
            f"algorithm.estimator is {estimator!r}, which is none of {', '.join(ESTIMATORS)}: the nearest is {near!r}; "
            "a function of your own is FILE.py:FUNCTION or module:FUNCTION"
        )
    if compares_groups(estimator, group_size=size) and size < 2:
        raise ConfigError(
            f"rollout.group_size is {size}, but algorithm.estimator {estimator!r} compares the rollouts of a group: "
            "set rollout.group_size to 2 or more, or algorithm.estimator to 'batch_mean' or 'reinforce_pp'"
        )
    if estimator == "batch_mean" and size * config.train.groups_per_update < 2:
        raise ConfigError(
            "train.groups_per_update is 1 with rollout.group_size 1, but algorithm.estimator 'batch_mean' compares the "
            "rollouts of a window: set train.groups_per_update to 2 or more"
        )


def _check_loss(config: Config) -> None:
    loss, steps = config.algorithm.loss, config.algorithm.updates_per_window
    if steps == 1 and loss in ("gspo", "cispo"):
        raise ConfigError(
            f"algorithm.loss is {loss!r}, which is plain policy gradient with algorithm.updates_per_window 1, where "
            "the policy ratio is always 1: set algorithm.updates_per_window to 2 or more, or algorithm.loss to "
            "'policy_gradient'"
        )
    if steps > 1 and loss == "policy_gradient":
        raise ConfigError(
            f"algorithm.updates_per_window is {steps}, but algorithm.loss 'policy_gradient' has no policy ratio, so "
            "every step after a window's first is biased: set algorithm.updates_per_window to 1, or algorithm.loss to "
            "'ppo'"
        )


def _check_helpers(config: Config) -> None:
    """The other models: reference, teacher, critic."""
    algorithm, warmup = config.algorithm, config.critic.warmup_updates
    if algorithm.estimator == "distillation" and not algorithm.teacher_path:
        raise ConfigError(
            "algorithm.teacher_path is empty, but algorithm.estimator 'distillation' learns from a teacher: give the "
            "folder or the hub name of a model with the policy's tokenizer"
        )
    if algorithm.estimator == "distillation" and algorithm.kl_coef and algorithm.kl_placement == "reward":
        raise ConfigError(
            "algorithm.kl_placement is 'reward', but algorithm.estimator 'distillation' makes no advantage of rewards: "
            "set algorithm.kl_placement to 'loss', or algorithm.kl_coef to 0"
        )
    if algorithm.estimator == "gae" and warmup >= config.train.num_updates:
        raise ConfigError(
            f"critic.warmup_updates is {warmup}, so that the policy never learns in the {config.train.num_updates} "
            "updates of train.num_updates: set it lower"
        )


def _check_reward(config: Config) -> None:
    reward, longest = config.reward, config.engine.max_model_len
    begins = reward.overlong_length - reward.overlong_ramp
    if reward.clip_low is not None and reward.clip_high is not None and reward.clip_low >= reward.clip_high:
        raise ConfigError(
            f"reward.clip_low is {reward.clip_low} and reward.clip_high {reward.clip_high}; the first must be below "
            "the second"
        )
    if reward.overlong_ramp and not reward.overlong_length:
        raise ConfigError(
            f"reward.overlong_ramp is {reward.overlong_ramp}, which has no effect with reward.overlong_length 0: give "
            "reward.overlong_length, or leave it out"
        )
    if reward.overlong_ramp > reward.overlong_length:
        raise ConfigError(
            f"reward.overlong_ramp is {reward.overlong_ramp}, which is more than reward.overlong_length "
            f"{reward.overlong_length}: the ramp ends there, so make it shorter"
        )
    if reward.overlong_length and begins >= longest:
        raise ConfigError(
            f"reward.overlong_length is {reward.overlong_length}, whose penalty begins at {begins} tokens, which no "
            f"segment exceeds: engine.max_model_len is {longest}; set reward.overlong_length lower"
        )


def _parts_of_estimators(config: Config, chosen: dict[str, Any]) -> list[_Part]:
    estimator = config.algorithm.estimator
    name, custom = f"algorithm.estimator {estimator!r}", is_custom(estimator)
    compares = compares_groups(estimator, group_size=config.rollout.group_size)
    critics = tuple(key for key in chosen if key.startswith("critic."))
    distils = estimator == "distillation"
    to_gae, to_distil = "set algorithm.estimator to 'gae'", "set algorithm.estimator to 'distillation'"
    to_discount = "set algorithm.estimator to 'reinforce_pp' or 'gae'"
    to_compare = "set algorithm.estimator to one that compares a group, such as 'grpo'"
    rewards = ("reward.clip_low", "reward.clip_high", "reward.overlong_length")
    return [
        _Part(("algorithm.gamma",), estimator in _DISCOUNTING or custom, name, to_discount),
        _Part(("algorithm.lam",), estimator == "gae" or custom, name, to_gae),
        _Part(critics, estimator == "gae", name, to_gae),
        _Part(("algorithm.singleton",), compares, name, to_compare),
        _Part(("algorithm.teacher_path", "algorithm.distillation_coef"), distils, name, to_distil),
        _Part(rewards, not distils, name, "choose one that learns from rewards"),
    ]


def _parts_of_losses(config: Config) -> list[_Part]:
    algorithm = config.algorithm
    loss, aggregation = f"algorithm.loss {algorithm.loss!r}", f"algorithm.aggregation {algorithm.aggregation!r}"
    clips = ("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "critic.value_clip")
    one_step = "algorithm.updates_per_window 1, where policy and values are still those before the window"
    to_ppo = "set algorithm.loss to 'ppo'"
    return [
        _Part(("algorithm.clip_low",), algorithm.loss in ("ppo", "gspo"), loss, to_ppo),
        _Part(("algorithm.clip_high",), algorithm.loss != "policy_gradient", loss, to_ppo),
        _Part(("algorithm.dual_clip",), algorithm.loss == "ppo", loss, to_ppo),
        _Part(clips, algorithm.updates_per_window > 1, one_step, "set algorithm.updates_per_window to 2 or more"),
        _Part(
            ("algorithm.aggregation_length",),
            algorithm.aggregation == "constant",
            aggregation,
            "set algorithm.aggregation to 'constant'",
        ),
    ]


def _parts_of_kl(config: Config) -> list[_Part]:
    coef, target = config.algorithm.kl_coef, config.algorithm.kl_target
    needs_coef = ("algorithm.kl_placement", "algorithm.kl_target", "algorithm.kl_horizon", "algorithm.reference_path")
    return [
        _Part(needs_coef, coef > 0, "algorithm.kl_coef 0", "give algorithm.kl_coef"),
        _Part(("algorithm.kl_horizon",), target > 0, "algorithm.kl_target 0", "give algorithm.kl_target"),
    ]
