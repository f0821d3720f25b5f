"""Group-mean baseline: the reward minus the mean of its group, without a standard deviation (arXiv:2503.20783)."""

from torch import Tensor

from molt.train.advantage.batch import RolloutBatch, refuse_discount


def group_mean(batch: RolloutBatch, *, gamma: float) -> Tensor:
    """R - mean of the group.

    Returns:
        float64 [N]; exactly 0 in a group of one and in a group of equal rewards.

    Raises:
        ConfigError: `gamma` is not 1.
    """
    refuse_discount(gamma, "group_mean")
    centred_R, _ = batch.centred()
    return batch.per_token(centred_R)
