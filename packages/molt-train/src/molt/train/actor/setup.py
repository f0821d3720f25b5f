"""How a rank is set up: importable without torch, so that the controller's process stays light."""

import msgspec

from molt.train.config import ActorConfig, AlgorithmConfig


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank is set up."""

    rank: int
    world_size: int
    model_path: str
    actor: ActorConfig
    algorithm: AlgorithmConfig
    temperature: float
    num_steps: int
    """Optimizer steps that the learning-rate schedule spans."""
    seed: int
    collective_timeout_s: float
