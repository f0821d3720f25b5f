"""How the ranks of a run are set up from its configuration."""

import pytest

from molt.train.cluster import ranks, runtime
from molt.train.config import Config, load_config
from molt.train.errors import ConfigError
from molt.train.experience import LocalPayloadStore
from molt.train.launch.parts import make_actor

PPO = ["algorithm.estimator=gae", "algorithm.kl_coef=0.1", "critic.path=c", "algorithm.updates_per_window=4"]


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The setups that ranks were made of, on a cluster without GPUs."""
    setups = []
    monkeypatch.setattr(ranks, "ActorGroup", lambda setup, store, **options: setups.append(setup))
    monkeypatch.setattr(runtime, "num_gpus", lambda: 0)
    return setups


def config(*overrides):
    return load_config(None, ["model.path=m", "train.num_updates=10", *overrides], Config)


def test_a_training_run_has_the_models_of_its_algorithm(made):
    make_actor(config(*PPO), LocalPayloadStore())
    (setup,) = made
    assert (setup.critic_path, setup.reference_path, setup.teacher_path) == ("c", "m", None)
    assert setup.num_steps == 40


def test_the_supervised_step_has_the_policy_alone(made):
    make_actor(config(*PPO), LocalPayloadStore(), supervised=True)
    (setup,) = made
    assert not setup.has_critic
    assert setup.reference_path is None
    assert setup.num_steps == 10


def test_an_offload_that_has_no_effect_is_refused(made):
    with pytest.raises(ConfigError, match=r"actor\.offload is 'optimizer', which has no effect without CUDA"):
        make_actor(config("actor.offload=optimizer"), LocalPayloadStore())
    assert made == []
