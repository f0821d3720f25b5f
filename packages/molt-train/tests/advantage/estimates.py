"""Call an estimator on rollouts written as `oracles.rollout` does, in float64."""

import torch

from molt.train.advantage import ESTIMATORS, EstimatorSettings, RolloutBatch


def batch_of(rollouts):
    def tokens(signal):
        return torch.tensor([x for one in rollouts for x in one[signal]], dtype=torch.float64)

    return RolloutBatch(
        rewards_R=torch.tensor([one["reward"] for one in rollouts], dtype=torch.float64),
        groups_R=torch.tensor([one["group"] for one in rollouts], dtype=torch.int64),
        num_actions_R=torch.tensor([len(one["penalties"]) for one in rollouts], dtype=torch.int64),
        penalties_N=tokens("penalties"),
        values_N=tokens("values"),
        teacher_gap_N=tokens("gaps"),
    )


def nested(flat, rollouts):
    assert flat.dtype == torch.float64
    numbers = iter(flat.tolist())
    out = [[next(numbers) for _ in one["penalties"]] for one in rollouts]
    assert next(numbers, None) is None
    return out


def estimate(name, rollouts, *, gamma=1.0, lam=1.0, coef=1.0):
    """The advantages of each rollout's tokens."""
    settings = EstimatorSettings(gamma=gamma, lam=lam, distillation_coef=coef)
    return nested(ESTIMATORS[name](batch_of(rollouts), settings).advantages_N, rollouts)


def estimate_returns(rollouts, *, gamma=1.0, lam=1.0):
    """What the critic is to learn, by `gae`."""
    returns_N = ESTIMATORS["gae"](batch_of(rollouts), EstimatorSettings(gamma=gamma, lam=lam)).returns_N
    assert returns_N is not None
    return nested(returns_N, rollouts)
