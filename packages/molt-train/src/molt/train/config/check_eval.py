"""Keys of `[eval]` that contradict each other, or that nothing would come of."""

from molt.train.config.chosen import chosen_keys
from molt.train.config.sections import Config
from molt.train.errors import ConfigError

_NEED_ROWS = ("every", "samples", "threshold", "max_tokens", "temperature", "top_p", "pinned", "keep_best")


def check_eval(config: Config) -> None:
    """Raise ConfigError for an evaluation that cannot be as configured, or a key of it without effect."""
    settings, chosen = config.eval, chosen_keys(config)
    if not (settings.path or settings.sets):
        for key in (f"eval.{name}" for name in _NEED_ROWS):
            if key in chosen:
                raise ConfigError(
                    f"{key} is {chosen[key]!r}, which has no effect without held-out rows: give eval.path or "
                    "[[eval.sets]], or leave it out"
                )
    if settings.temperature is not None and settings.temperature < 0:
        raise ConfigError(f"eval.temperature is {settings.temperature}; it must not be negative (0 is greedy)")
    if settings.top_p is not None and not 0 < settings.top_p <= 1:
        raise ConfigError(f"eval.top_p is {settings.top_p}; it must be above 0 and at most 1")
    if settings.top_p is not None and settings.temperature == 0:
        raise ConfigError(
            f"eval.top_p is {settings.top_p}, which has no effect with eval.temperature 0 (greedy): leave it out"
        )
    for number, dataset in enumerate(settings.sets):
        if dataset.weight != 1.0:
            raise ConfigError(
                f"eval.sets[{number}].weight is {dataset.weight}, which has no effect: an evaluation uses every row; "
                "leave it out"
            )
    _check_beside_training(config)


def _check_beside_training(config: Config) -> None:
    settings = config.eval
    if settings.keep_best and not settings.pinned:
        raise ConfigError(
            "eval.keep_best is true, but with eval.pinned false an evaluation may span versions, and is of no "
            "checkpoint: leave eval.pinned true"
        )
    if settings.keep_best and not settings.every:
        raise ConfigError(
            "eval.keep_best is true, which has no effect with eval.every 0, where only the last checkpoint is "
            "evaluated: set eval.every, or leave eval.keep_best out"
        )
    if not settings.pinned and not settings.every:
        raise ConfigError(
            "eval.pinned is false, but with eval.every 0 training is evaluated at its two ends only: set eval.every, "
            "or leave eval.pinned out"
        )
