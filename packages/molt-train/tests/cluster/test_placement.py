import pytest

from molt.train.cluster.placement import Placement, place
from molt.train.config import Config, load_config
from molt.train.errors import ConfigError


def config(*overrides):
    return load_config(None, list(overrides), Config)


def test_without_gpus_everything_runs_on_the_cpu():
    assert place(config("actor.num_ranks=4"), num_gpus=0) == Placement(0, 0, "gloo")


def test_enough_gpus_are_given_whole():
    wide = config("actor.num_ranks=2", "engine.num_engines=2", "engine.tensor_parallel_size=3")
    assert place(wide, num_gpus=8) == Placement(1, 3, "nccl")


def test_a_single_gpu_is_shared():
    assert place(config("engine.num_engines=3"), num_gpus=1) == Placement(0.25, 0.25, "gloo")


def test_a_critic_of_its_own_has_as_many_gpus_as_the_actor():
    own = ["algorithm.estimator=gae", "critic.placement=own", "actor.num_ranks=2"]
    assert place(config(*own), num_gpus=5) == Placement(1, 1, "nccl")
    with pytest.raises(ConfigError, match=r"actor\.num_ranks 2 \(twice, for critic\.placement 'own'\) .* need 5"):
        place(config(*own), num_gpus=4)
    assert place(config("algorithm.estimator=gae", "critic.placement=own"), num_gpus=1) == Placement(
        1 / 3, 1 / 3, "gloo"
    )
    assert place(config("critic.placement=own"), num_gpus=2) == Placement(1, 1, "nccl"), "no critic without gae"


@pytest.mark.parametrize("overrides", [["actor.num_ranks=2"], ["engine.tensor_parallel_size=2"]])
def test_too_few_gpus_are_refused_by_name(overrides):
    with pytest.raises(ConfigError, match=r"has 1 GPUs, but actor\.num_ranks .* need 3: lower one of them"):
        place(config(*overrides), num_gpus=1)
