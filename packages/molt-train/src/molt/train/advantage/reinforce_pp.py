"""REINFORCE++ (arXiv:2501.03262): discounted returns, whitened over all action tokens of the window."""

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch
from molt.train.advantage.centre import whiten


def reinforce_pp(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """(G - mean) / (std + 1e-8) with the population standard deviation over the window's action tokens.

    G is the return of `reinforce`: rewards and KL penalties of the tokens, discounted over action tokens only.

    Returns:
        float64 [N]; exactly 0 when all returns are equal.
    """
    return Advantages(whiten(batch.discounted_sums(batch.token_rewards(), settings.gamma)))
