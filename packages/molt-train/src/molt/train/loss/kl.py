"""Divergence of the policy from the reference, estimated at sampled tokens. N action tokens.

With x = policy - reference, a difference of log-probs:

    k1 = x                  its mean over samples of the policy is KL(policy || reference)
    k2 = x^2 / 2            its *gradient* has that of KL(policy || reference) as its mean
    k3 = exp(-x) - 1 + x    the mean of k1, never negative and less noisy; for gates and metrics

The value and the gradient are two questions (arXiv:2506.09477, arXiv:2510.01555, arXiv:2512.21852). As a loss, k1 has
the mean gradient 0, and k3 that of KL(reference || policy), another objective. So there are two placements, and no
choice of estimator:

- in the reward, k1: the policy gradient does the rest, and each token answers for the divergence after it too;
- in the loss, k2: each token answers for its own divergence only. These gradients are right under samples of the
  current policy, so tokens that another policy sampled are weighted by current over behaviour, as a constant.
"""

import torch
from torch import Tensor

from molt.train.loss.ratio import log_ratio


def k1(policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """The difference policy - reference of two log-probs [N], in float32 or wider."""
    wide = torch.promote_types(policy_N.dtype, torch.float32)
    return policy_N.to(wide) - reference_N.to(wide)


def k2(policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """Half the squared difference of two log-probs [N]. Not clamped: however far it is, the policy is drawn back."""
    return 0.5 * k1(policy_N, reference_N).square()


def k3(policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(-x) - 1 + x, x = policy - reference of two log-probs [N], x clamped to +-20."""
    x_N = log_ratio(policy_N, reference_N)
    return torch.expm1(-x_N) + x_N


def reward_penalty(old_N: Tensor, reference_N: Tensor, *, coef: float) -> Tensor:
    """What is taken from the reward of each token: coef * k1, nats times reward a nat, float64 [N].

    Args:
        old_N: Log-probs of the sampled tokens before the window's first update.
        reference_N: Their log-probs under the reference policy.
        coef: `kl_coef`, or what it has adapted to.
    """
    return coef * k1(old_N.detach().double(), reference_N.detach())
