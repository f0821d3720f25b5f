"""Batch-mean baseline of FlashREINFORCE (github.com/yifanzhang-pro/FlashREINFORCE): one mean for the whole window."""

import torch

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch, refuse_discount
from molt.train.advantage.centre import centre


def batch_mean(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """R - mean over all rollouts of the window, without a standard deviation.

    A rollout counts once in the mean, whatever its number of segments or tokens, so one sample a prompt is enough. R is
    less the rollout's whole KL penalty.

    Returns:
        float64 [N]; exactly 0 in a window of one rollout and in one of equal rewards.

    Raises:
        ConfigError: `settings.gamma` is not 1.
    """
    refuse_discount(settings, "batch_mean")
    centred_R, _ = centre(batch.outcomes(), torch.zeros_like(batch.groups_R))
    return Advantages(batch.per_token(centred_R))
