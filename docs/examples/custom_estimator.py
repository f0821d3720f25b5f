"""An estimator of your own: the reward minus the median of its group, which one lucky rollout hardly moves.

Use it from the folder of this file with

    [algorithm]
    estimator = "custom_estimator.py:group_median"

It gets the rollouts of a window and returns an advantage for each of their action tokens.
"""

import torch

from molt.train.advantage import Advantages, EstimatorSettings, RolloutBatch, refuse_discount


def group_median(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """R - median of the group; exactly 0 in a group of one and in a group of equal rewards."""
    refuse_discount(settings, "group_median")  # a discount would have no effect here: say so instead of ignoring it
    outcomes = batch.outcomes()  # one a rollout: its reward, less its KL penalty if the run has one
    advantages = torch.zeros_like(outcomes)
    for group in batch.groups_R.unique():
        members = batch.groups_R == group
        advantages[members] = outcomes[members] - outcomes[members].quantile(0.5)
    return Advantages(batch.per_token(advantages))
