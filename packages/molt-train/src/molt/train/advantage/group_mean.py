"""Group-mean baseline: the reward minus the mean of its group. The advantage of Dr. GRPO (arXiv:2503.20783)."""

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch, refuse_discount
from molt.train.advantage.centre import centre


def group_mean(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """R - mean of the group, without a standard deviation. R is less the rollout's whole KL penalty.

    Returns:
        float64 [N]; exactly 0 in a group of one and in a group of equal rewards.

    Raises:
        ConfigError: `settings.gamma` is not 1.
    """
    refuse_discount(settings, "group_mean")
    centred_R, _ = centre(batch.outcomes(), batch.groups_R)
    return Advantages(batch.per_token(centred_R))
