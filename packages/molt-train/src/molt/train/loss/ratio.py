"""Probability ratios: computed in float32 or wider, with a bounded exponent, blind to masked slots. N action tokens."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def probability_ratio(numerator_N: Tensor, denominator_N: Tensor, mask_N: Tensor | None = None) -> Tensor:
    """exp(numerator - denominator) of two log-probs [N], the difference clamped to +-20.

    Slots where `mask_N` is False count as difference 0 before anything is exponentiated: whatever stands there, NaN
    included, reaches neither the value nor the gradient.
    """
    wide = torch.promote_types(numerator_N.dtype, torch.float32)
    log_ratio_N = numerator_N.to(wide) - denominator_N.to(wide)
    if mask_N is not None:
        log_ratio_N = torch.where(mask_N, log_ratio_N, 0.0)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def action_sum(values_N: Tensor, mask_N: Tensor | None = None) -> Tensor:
    """The detached sum of `values_N` over the action tokens, a float scalar."""
    values_N = values_N.detach()
    if mask_N is not None:
        values_N = torch.where(mask_N, values_N, 0)
    return values_N.sum(dtype=torch.promote_types(values_N.dtype, torch.float32))
