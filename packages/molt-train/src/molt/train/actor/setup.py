"""How a rank is set up: importable without torch, so that the controller's process stays light."""

from typing import Literal

import msgspec

from molt.train.config import ActorConfig, AlgorithmConfig, CriticConfig


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank is set up."""

    rank: int
    world_size: int
    model_path: str
    actor: ActorConfig
    algorithm: AlgorithmConfig
    critic: CriticConfig = CriticConfig()
    role: Literal["actor", "critic"] = "actor"
    """`critic`: a rank of the critic's own, see `critic.placement`."""
    temperature: float
    num_steps: int
    """Optimizer steps of the whole run, over which learning-rate schedules span."""
    seed: int
    collective_timeout_s: float
    verify_refit: Literal["sample", "full"] = "sample"
    """How closely a refit compares what engines hold with what was sent."""
    stacks: str = ""
    """Folder in which its process listens for who asks for its stacks; empty: it does not."""

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm learns values."""
        return self.algorithm.estimator == "gae"

    @property
    def critic_path(self) -> str:
        """What the critic's trunk is loaded from."""
        return self.critic.path or self.model_path

    @property
    def reference_path(self) -> str | None:
        """The policy that `algorithm.kl_coef` holds on to; None without one."""
        return (self.algorithm.reference_path or self.model_path) if self.algorithm.kl_coef > 0 else None

    @property
    def teacher_path(self) -> str | None:
        """The policy that is learned from; None without one."""
        return self.algorithm.teacher_path if self.algorithm.estimator == "distillation" else None

    @property
    def needs_old(self) -> bool:
        """Whether advantages are made of the policy's own log-probs before the window."""
        kl_in_reward = self.reference_path is not None and self.algorithm.kl_placement == "reward"
        return kl_in_reward or self.teacher_path is not None

    @property
    def num_warmup_updates(self) -> int:
        """First updates of the run in which the policy stays as it is."""
        return self.critic.warmup_updates if self.has_critic else 0

    @property
    def num_policy_steps(self) -> int:
        """Optimizer steps of the policy: none are made while the critic warms up."""
        return max(1, self.num_steps - self.num_warmup_updates * self.algorithm.updates_per_window)
