"""REINFORCE++ with a group baseline (arXiv:2501.03262): centred inside the group, whitened over the window."""

import torch

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch, refuse_discount
from molt.train.advantage.centre import centre, whiten


def reinforce_pp_baseline(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """R - mean of the group, at each action token, whitened as in `reinforce_pp`.

    R is less the rollout's whole KL penalty. The whitening moves all tokens by one amount, so a group of equal rewards,
    which is at 0 before it, shares that amount where long and short rollouts differ in reward. A group of one has no
    baseline: its tokens are no part of the whitening.

    Returns:
        float64 [N]; exactly 0 in a group of one, and everywhere when every group has equal rewards.

    Raises:
        ConfigError: `settings.gamma` is not 1.
    """
    refuse_discount(settings, "reinforce_pp_baseline")
    centred_R, sizes_R = centre(batch.outcomes(), batch.groups_R)
    centred_N, compared_N = batch.per_token(centred_R), batch.per_token(sizes_R > 1)
    advantages_N = torch.zeros_like(centred_N)
    advantages_N[compared_N] = whiten(centred_N[compared_N])
    return Advantages(advantages_N)
