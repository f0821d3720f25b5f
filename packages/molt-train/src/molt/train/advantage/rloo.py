"""RLOO (arXiv:2402.14740): the reward minus the mean of the other rewards of its group."""

from torch import Tensor

from molt.train.advantage.batch import RolloutBatch, refuse_discount


def rloo(batch: RolloutBatch, *, gamma: float) -> Tensor:
    """R_i - (sum of the group - R_i) / (n - 1), which is n / (n - 1) times the distance from the group's mean.

    Returns:
        float64 [N]; exactly 0 in a group of one, which has no others to compare with, and in a group of equal rewards.

    Raises:
        ConfigError: `gamma` is not 1.
    """
    refuse_discount(gamma, "rloo")
    centred_R, sizes_R = batch.centred()
    return batch.per_token(centred_R * sizes_R / (sizes_R - 1).clamp(min=1))
