"""Token-level importance correction: how much a token counts that another policy sampled. N action tokens.

rho = exp(old - behaviour) covers both the staleness of the rollout and the mismatch of the serving engine. The weights
multiply the loss and carry no gradient; a token of weight 0 stays in the denominator.
"""

from typing import Literal

import torch
from torch import Tensor

from molt.train.loss.ratio import action_sum, probability_ratio

Scheme = Literal["none", "tis", "icepop"]


def truncate(rho_N: Tensor, *, high: float) -> Tensor:
    """Truncated importance sampling, `tis` (Yao et al. 2025): min(rho, high)."""
    return rho_N.clamp(max=high)


def mask(rho_N: Tensor, *, low: float, high: float) -> Tensor:
    """IcePop (arXiv:2510.18855): rho inside [low, high], bounds included, else 0."""
    return torch.where((rho_N >= low) & (rho_N <= high), rho_N, 0.0)


def importance_weights(
    old_N: Tensor,
    behaviour_N: Tensor,
    *,
    scheme: Scheme,
    low: float,
    high: float,
    mask_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight of each action token under a correction scheme.

    Args:
        old_N: Log-probs of the actor before this window's first update.
        behaviour_N: Log-probs recorded when the tokens were sampled.
        scheme: `tis` truncates, `icepop` masks, `none` weighs every token 1.
        low: Lower bound of `icepop`.
        high: Upper bound of `tis` and `icepop`.
        mask_N: False at slots that are no actions. None: every slot is one.

    Returns:
        Detached weights, [N], and sums over the action tokens: `rho_mean`, `correction_weight_mean`,
        `correction_filtered` (tokens that the scheme truncated or masked).
    """
    rho_N = probability_ratio(old_N.detach(), behaviour_N.detach(), mask_N)
    match scheme:
        case "tis":
            weights_N, filtered_N = truncate(rho_N, high=high), rho_N > high
        case "icepop":
            weights_N, filtered_N = mask(rho_N, low=low, high=high), (rho_N < low) | (rho_N > high)
        case "none":
            weights_N, filtered_N = torch.ones_like(rho_N), torch.zeros_like(rho_N, dtype=torch.bool)
    return weights_N, {
        "rho_mean": action_sum(rho_N, mask_N),
        "correction_weight_mean": action_sum(weights_N, mask_N),
        "correction_filtered": action_sum(filtered_N, mask_N),
    }
