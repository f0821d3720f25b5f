"""REINFORCE (Williams 1992): the discounted return of each token, without a baseline."""

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch


def reinforce(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """G_t = sum over u >= t of gamma^(u - t) * r_u over the action tokens of the rollout.

    The reward falls on the rollout's last action token, whatever the number of segments, and is discounted once for
    every action token in between, not for the tokens of tools or templates. A KL penalty is taken from the reward of
    its token.

    Returns:
        float64 [N].
    """
    return Advantages(batch.discounted_sums(batch.token_rewards(), settings.gamma))
