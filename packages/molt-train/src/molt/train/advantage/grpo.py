"""GRPO (arXiv:2402.03300): the reward standardised inside its group."""

import torch

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch, refuse_discount
from molt.train.advantage.centre import centre, group_sums

EPSILON = 1e-6


def grpo(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """(R - mean) / (std + 1e-6) with the sample standard deviation (n - 1) of the group.

    R is less the rollout's whole KL penalty.

    Returns:
        float64 [N]; exactly 0 in a group of one and in a group of equal rewards.

    Raises:
        ConfigError: `settings.gamma` is not 1.
    """
    refuse_discount(settings, "grpo")
    centred_R, sizes_R = centre(batch.outcomes(), batch.groups_R)
    std_R = torch.sqrt(group_sums(centred_R**2, batch.groups_R) / (sizes_R - 1).clamp(min=1))
    return Advantages(batch.per_token(centred_R / (std_R + EPSILON)))
