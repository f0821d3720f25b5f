"""Which processes get which GPUs, and how weights cross from the one kind to the other."""

from dataclasses import dataclass
from typing import Literal

from molt.train.config import Config
from molt.train.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """GPUs of an actor rank and of an engine, and the backend of the weight transfer between them."""

    gpus_per_rank: float
    gpus_per_engine: float
    transfer: Literal["gloo", "nccl"]


def place(config: Config, *, num_gpus: int) -> Placement:
    """Ranks and engines on `num_gpus` GPUs: one GPU a rank and one a worker of an engine, over nccl.

    A critic with ranks of its own needs as many GPUs again as the actor. Without GPUs everything runs on the CPU, over
    gloo. One GPU is shared by one rank and the engines, also over gloo, since nccl has no two members on one GPU.
    Raises ConfigError when there are too few.
    """
    workers = config.engine.num_engines * config.engine.tensor_parallel_size
    has_own_critic = config.algorithm.estimator == "gae" and config.critic.placement == "own"
    needed = config.actor.num_ranks * (2 if has_own_critic else 1) + workers
    if num_gpus == 0:
        return Placement(0, 0, "gloo")
    if num_gpus >= needed:
        return Placement(1, config.engine.tensor_parallel_size, "nccl")
    if num_gpus == 1 and config.actor.num_ranks == 1 and config.engine.tensor_parallel_size == 1:
        return Placement(1 / needed, 1 / needed, "gloo")
    critic = " (twice, for critic.placement 'own')" if has_own_critic else ""
    raise ConfigError(
        f"the cluster has {num_gpus} GPUs, but actor.num_ranks {config.actor.num_ranks}{critic} and "
        f"engine.num_engines {config.engine.num_engines} of "
        f"engine.tensor_parallel_size {config.engine.tensor_parallel_size} need {needed}: "
        "lower one of them"
    )
