"""Which keys a replay has a use for: those of the updates. How rollouts were made is recorded, and stays."""

from collections.abc import Sequence

from molt.train.errors import ConfigError

_SECTIONS = ("algorithm.", "reward.", "critic.", "actor.", "cluster.")
_KEYS = (
    "model.path",
    "run.seed",
    "train.num_updates",
    "train.microbatch_tokens",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "rollout.train_off_policy",
    "rollout.train_auxiliary",
    "pool.on_failed",
    "pool.on_timeout",
    "pool.on_truncated",
)
_WITHOUT_EFFECT = {
    "algorithm.preset": "its keys are written out in the run's config.toml: give those that differ",
    "actor.max_restarts": "a replay that is interrupted starts again: leave it out",
    "run.dir": "a replay never writes into the run: give --out DIR",
}


def check_replay(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override that a replay would have no use for.

    A replay makes the updates again, so the keys of the updates act: all of algorithm, reward, critic, actor and
    cluster, and those few of other sections that say where it starts, how its windows are cut and which of the
    recorded tokens and outcomes count. What engines, workers, data and the gateway did is in the recording.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in _WITHOUT_EFFECT:
            raise ConfigError(f"{key} has no effect in a replay, since {_WITHOUT_EFFECT[key]}")
        if key not in _KEYS and not key.startswith(_SECTIONS):
            raise ConfigError(
                f"{key} has no effect in a replay, which makes the updates of recorded rollouts again: leave it out "
                f"(these act: {', '.join((*(f'{section}*' for section in _SECTIONS), *_KEYS))})"
            )
