"""RLOO (arXiv:2402.14740): the reward minus the mean of the other rewards of its group."""

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch, refuse_discount
from molt.train.advantage.centre import centre


def rloo(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """R_i - (sum of the group - R_i) / (n - 1), which is n / (n - 1) times the distance from the group's mean.

    R is less the rollout's whole KL penalty.

    Returns:
        float64 [N]; exactly 0 in a group of one, which has no others to compare with, and in a group of equal rewards.

    Raises:
        ConfigError: `settings.gamma` is not 1.
    """
    refuse_discount(settings, "rloo")
    centred_R, sizes_R = centre(batch.outcomes(), batch.groups_R)
    return Advantages(batch.per_token(centred_R * sizes_R / (sizes_R - 1).clamp(min=1)))
