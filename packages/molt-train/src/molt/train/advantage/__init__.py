"""Stage 7, advantage: one short file an estimator, each a pure function of a `RolloutBatch`."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from molt.train.advantage.batch import RolloutBatch
from molt.train.advantage.group_mean import group_mean
from molt.train.advantage.grpo import grpo
from molt.train.advantage.reinforce_pp import reinforce_pp
from molt.train.advantage.rloo import rloo

__all__ = ["ESTIMATORS", "Estimator", "RolloutBatch", "compute_advantages"]


class Estimator(Protocol):
    """A pure function from rollouts to advantages."""

    def __call__(self, batch: RolloutBatch, *, gamma: float) -> Tensor:
        """Advantages of every action token of a window, float64 [N]; `gamma` is the discount an action token."""
        ...


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "group_mean": group_mean,
    "reinforce_pp": reinforce_pp,
}


def compute_advantages(
    name: str, rewards: np.ndarray, groups: np.ndarray, num_actions: np.ndarray, gamma: float
) -> np.ndarray:
    """Advantages of a window by the estimator `name`, computed in float64.

    Args:
        name: A key of `ESTIMATORS`.
        rewards: [R] one a rollout.
        groups: [R] integers, equal where two rollouts answer the same prompt.
        num_actions: [R] action tokens of each rollout over all its segments.
        gamma: Discount an action token.

    Returns:
        float32 [N], N the sum of `num_actions`, rollout by rollout.

    Raises:
        ConfigError: `gamma` is not 1 and the estimator does not discount.
    """
    batch = RolloutBatch(
        rewards_R=torch.as_tensor(rewards, dtype=torch.float64),
        groups_R=torch.as_tensor(groups, dtype=torch.int64),
        num_actions_R=torch.as_tensor(num_actions, dtype=torch.int64),
    )
    return ESTIMATORS[name](batch, gamma=gamma).to(torch.float32).numpy()
