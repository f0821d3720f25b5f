"""What a replay has a use for, and what it refuses."""

import pytest

from molt.train.config.check_replay import check_replay
from molt.train.errors import ConfigError


@pytest.mark.parametrize(
    "key",
    ["algorithm.estimator=rloo", "actor.optimizer.lr=1e-4", "reward.clip_high=1", "train.num_updates=3", "run.seed=2"],
)
def test_keys_of_the_updates_act(key):
    check_replay([key])


@pytest.mark.parametrize(
    "key",
    [
        "engine.num_engines=2",
        "rollout.temperature=0.5",
        "rollout.group_size=4",
        "train.max_staleness=0",
        "train.groups_per_update=2",
        "data.path=other.jsonl",
        "agent.path=a.py",
        "eval.every=2",
        "pool.max_attempts=1",
        "gateway.hold_s=1",
        "server.port=1",
        "run.stall_timeout=1",
    ],
)
def test_how_rollouts_were_made_is_recorded_and_stays(key):
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{name} has no effect in a replay, which makes the updates of recorded"):
        check_replay(["algorithm.estimator=rloo", key])


@pytest.mark.parametrize("key", ["algorithm.preset=dapo", "actor.max_restarts=1", "run.dir=elsewhere"])
def test_keys_whose_fix_is_another_say_so(key):
    with pytest.raises(ConfigError, match=f"^{key.partition('=')[0]} has no effect in a replay, since "):
        check_replay([key])
