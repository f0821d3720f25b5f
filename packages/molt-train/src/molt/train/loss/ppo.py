"""PPO: the clipped surrogate, with separate bounds and an optional dual clip. N action tokens."""

import torch
from torch import Tensor

from molt.train.config import AlgorithmConfig
from molt.train.loss.inputs import LossInputs
from molt.train.loss.ratio import probability_ratio, token_sum


def ppo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token, r = exp(current - old).

    arXiv:1707.06347; separate bounds as in DAPO (arXiv:2503.14476). With `dual_clip` c above 0 (arXiv:1912.09729),
    tokens of negative advantage lose at most -c A, so that a ratio far above 1 cannot throw the step.

    Returns:
        [N], and the sums `clip_fraction` (tokens whose gradient the clip took away) and, with a dual clip,
        `dual_clip_fraction` (tokens whose gradient the dual clip took away).
    """
    advantages_N = inputs.advantages_N
    ratio_N = probability_ratio(inputs.current_N, inputs.old_N)
    plain_N, clipped_N = ratio_N * advantages_N, clip_ratio(ratio_N, settings) * advantages_N
    loss_N, sums = -torch.minimum(plain_N, clipped_N), {"clip_fraction": token_sum(clipped_N < plain_N)}
    if settings.dual_clip > 0:
        bound_N = torch.where(advantages_N < 0, -settings.dual_clip * advantages_N, torch.inf)
        sums["dual_clip_fraction"] = token_sum(bound_N < loss_N)
        loss_N = torch.minimum(loss_N, bound_N)
    return loss_N, sums


def clip_ratio(ratio_N: Tensor, settings: AlgorithmConfig) -> Tensor:
    """The ratio inside [1 - clip_low, 1 + clip_high]."""
    return ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
