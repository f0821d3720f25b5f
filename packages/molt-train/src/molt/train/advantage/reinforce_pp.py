"""REINFORCE++ (arXiv:2501.03262): discounted returns, whitened over all action tokens of the window."""

import torch
from torch import Tensor

from molt.train.advantage.batch import RolloutBatch

EPSILON = 1e-8


def reinforce_pp(batch: RolloutBatch, *, gamma: float) -> Tensor:
    """(G - mean) / (std + 1e-8) with the population standard deviation over the window's action tokens.

    The reward falls on the last action token of the rollout. The return of an earlier one is discounted once for every
    action token in between, and not for the tokens of tools or templates.

    Returns:
        float64 [N]; exactly 0 when all returns are equal.
    """
    ends_R = batch.num_actions_R.cumsum(0)
    steps_to_end_N = batch.per_token(ends_R) - 1 - torch.arange(int(batch.num_actions_R.sum()))
    discounts_N = torch.pow(gamma, steps_to_end_N.to(torch.float64))
    returns_N = batch.per_token(batch.rewards_R) * discounts_N
    if not len(returns_N) or returns_N.min() == returns_N.max():
        return torch.zeros_like(returns_N)
    return (returns_N - returns_N.mean()) / (returns_N.std(correction=0) + EPSILON)
