"""What an estimator sees: rewards and groups of rollouts, and how many action tokens each rollout has.

Shapes: R rollouts of the window, N action tokens of the window (rollout by rollout, in order). Segments do not appear:
a rollout counts once in every mean, however many rows it was cut into.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from molt.train.errors import ConfigError


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one window."""

    rewards_R: Tensor
    """float64 [R]"""
    groups_R: Tensor
    """int64 [R]: equal where two rollouts answer the same prompt"""
    num_actions_R: Tensor
    """int64 [R]: action tokens of the rollout over all its segments; may be 0"""

    def per_token(self, values_R: Tensor) -> Tensor:
        """Each rollout's value at each of its action tokens, [R] -> [N]."""
        return torch.repeat_interleave(values_R, self.num_actions_R)

    def centred(self) -> tuple[Tensor, Tensor]:
        """Reward minus its group's mean, float64 [R], and the size of the group, int64 [R].

        Exactly 0 where all rewards of the group are equal: a mean of equal floats need not be equal to them.
        """
        _, index_R, sizes_G = torch.unique(self.groups_R, return_inverse=True, return_counts=True)
        empty_G = torch.zeros(len(sizes_G), dtype=self.rewards_R.dtype)
        means_G = empty_G.index_add(0, index_R, self.rewards_R) / sizes_G
        low_G = empty_G.scatter_reduce(0, index_R, self.rewards_R, "amin", include_self=False)
        high_G = empty_G.scatter_reduce(0, index_R, self.rewards_R, "amax", include_self=False)
        centred_R = self.rewards_R - means_G[index_R]
        return torch.where((low_G == high_G)[index_R], 0.0, centred_R), sizes_G[index_R]

    def group_sums(self, values_R: Tensor) -> Tensor:
        """The sum of `values_R` over each rollout's group, [R] -> [R]."""
        _, index_R = torch.unique(self.groups_R, return_inverse=True)
        sums_R = torch.zeros_like(values_R).index_add(0, index_R, values_R)
        return sums_R[index_R]


def refuse_discount(gamma: float, estimator: str) -> None:
    """Raises ConfigError for a discount that an estimator without token rewards would ignore."""
    if gamma != 1.0:
        raise ConfigError(
            f"algorithm.gamma is {gamma}, but {estimator!r} discounts nothing; "
            "set it to 1.0, or algorithm.estimator to 'reinforce_pp'"
        )
