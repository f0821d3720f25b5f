"""Generalized advantage estimation (arXiv:1506.02438) over action tokens, for PPO with a critic (arXiv:1707.06347)."""

import torch

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch
from molt.train.advantage.centre import whiten


def gae(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """A_t = delta_t + gamma * lam * A_(t+1), delta_t = r_t + gamma * V_(t+1) - V_t, inside each rollout.

    The next token is the next action token: the critic's values at tool texts and templates take no part, and a tool
    call does not end the episode. Rewards are those of `reinforce`.

    V after the last action token is 0, for truncated rollouts too: their reward is final, since the limits on turns and
    tokens belong to the task, and nothing follows that a critic could value (arXiv:1712.00378, section on time limits
    as part of the task).

    Returns:
        Advantages whitened over the window's action tokens, as in `reinforce_pp`, and returns A + V from the advantages
        before the whitening: the critic learns rewards in their own unit.

    Raises:
        ValueError: The batch has no values.
    """
    if batch.values_N is None:
        raise ValueError("gae needs the critic's values of the action tokens")
    next_values_N = torch.where(batch.tokens_left() == 0, 0.0, batch.values_N.roll(-1))
    deltas_N = batch.token_rewards() + settings.gamma * next_values_N - batch.values_N
    advantages_N = batch.discounted_sums(deltas_N, settings.gamma * settings.lam)
    return Advantages(whiten(advantages_N), returns_N=advantages_N + batch.values_N)
