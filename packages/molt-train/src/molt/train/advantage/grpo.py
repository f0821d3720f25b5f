"""GRPO (arXiv:2402.03300): the reward standardised inside its group."""

import torch
from torch import Tensor

from molt.train.advantage.batch import RolloutBatch, refuse_discount

EPSILON = 1e-6


def grpo(batch: RolloutBatch, *, gamma: float) -> Tensor:
    """(R - mean) / (std + 1e-6) with the sample standard deviation (n - 1) of the group.

    Returns:
        float64 [N]; exactly 0 in a group of one and in a group of equal rewards.

    Raises:
        ConfigError: `gamma` is not 1.
    """
    refuse_discount(gamma, "grpo")
    centred_R, sizes_R = batch.centred()
    std_R = torch.sqrt(batch.group_sums(centred_R**2) / (sizes_R - 1).clamp(min=1))
    return batch.per_token(centred_R / (std_R + EPSILON))
