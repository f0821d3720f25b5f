"""Policy surrogates: the loss of each action token, before any aggregation. N action tokens."""

import torch
from torch import Tensor

from molt.train.loss.ratio import action_sum, probability_ratio


def ppo_clip(
    current_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    mask_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(current - old).

    arXiv:1707.06347, with separate bounds as in DAPO (arXiv:2503.14476).

    Args:
        current_N: Log-probs of the forward pass being differentiated.
        old_N: Log-probs before this window's first update. `current_N.detach()` makes r exactly 1.
        advantages_N: Advantage of each token.
        clip_low: Width of the band below 1.
        clip_high: Width of the band above 1.
        mask_N: False at slots that are no actions; their loss is 0. None: every slot is one.

    Returns:
        The loss of each token, [N], and sums over the action tokens: `ratio_mean`, `clip_fraction`.
    """
    ratio_N = probability_ratio(current_N, old_N, mask_N)
    if mask_N is not None:
        advantages_N = torch.where(mask_N, advantages_N, 0.0)
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    is_clipped_N = clipped_N * advantages_N < ratio_N * advantages_N
    return loss_N, {"ratio_mean": action_sum(ratio_N, mask_N), "clip_fraction": action_sum(is_clipped_N, mask_N)}
