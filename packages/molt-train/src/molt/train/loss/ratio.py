"""Probability ratios: computed in float32 or wider, with a bounded exponent. N action tokens."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8: no ratio of interest is larger, and float32 still has room to multiply it."""


def log_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """The difference of two log-probs [N], in float32 or wider, clamped to +-20; its gradient is 0 beyond."""
    wide = torch.promote_types(numerator_N.dtype, torch.float32)
    return (numerator_N.to(wide) - denominator_N.to(wide)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def probability_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """exp(`log_ratio`) of two log-probs [N]."""
    return log_ratio(numerator_N, denominator_N).exp()


def token_sum(values_N: Tensor) -> Tensor:
    """The detached sum over the tokens, a float scalar: a mean of the window once it is added up and divided."""
    return values_N.detach().sum(dtype=torch.promote_types(values_N.dtype, torch.float32))
