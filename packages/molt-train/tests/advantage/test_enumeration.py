"""Expected gradients by enumeration: every trajectory of a two-step, three-token policy, each with its probability.

The policy is a table of logits: one row for the first token, and one for the second given each first. The gradients
that they are held against are closed forms, so nothing is sampled and nothing is differentiated numerically.
"""
# ruff: noqa: TID252 - the folders of tests are no installed package

import itertools
import math

import pytest

from .estimates import estimate
from .oracles import rollout

V = 3
FIRST = [0.2, -0.3, 0.5]
SECOND = [[0.6, 0.1, -0.4], [-0.8, 0.3, 0.0], [0.05, 1.1, -0.2]]
REFERENCE_FIRST = [0.6, 0.1, -0.4]
REFERENCE_SECOND = [[0.0, 0.4, 0.2], [0.5, -0.5, 0.1], [-0.3, 0.2, 0.9]]
REWARD = [[1.0, 0.0, 0.25], [-0.5, 2.0, 0.0], [0.75, 0.1, -1.5]]
BETA = 0.3
TRAJECTORIES = list(itertools.product(range(V), repeat=2))


def softmax(logits):
    total = math.fsum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


P1, P2 = softmax(FIRST), [softmax(row) for row in SECOND]
Q1, Q2 = softmax(REFERENCE_FIRST), [softmax(row) for row in REFERENCE_SECOND]


def probability(a, b):
    return P1[a] * P2[a][b]


def analytic(value):
    """The gradient of E[value], by the closed form of a softmax: p(k) * (value of choosing k - value before)."""
    after = [math.fsum(P2[a][b] * value(a, b) for b in range(V)) for a in range(V)]
    before = math.fsum(P1[a] * after[a] for a in range(V))
    gradient = [P1[a] * (after[a] - before) for a in range(V)]
    for a in range(V):
        gradient += [P1[a] * P2[a][b] * (value(a, b) - after[a]) for b in range(V)]
    return gradient


def score(a, b, advantages):
    """advantage * gradient of log-prob, summed over the two tokens: d log softmax = indicator - probability."""
    gradient = [advantages[0] * ((k == a) - P1[k]) for k in range(V)]
    for row in range(V):
        gradient += [advantages[1] * ((k == b) - P2[row][k]) if row == a else 0.0 for k in range(V)]
    return gradient


def k1(a, b):
    return [math.log(P1[a] / Q1[a]), math.log(P2[a][b] / Q2[a][b])]


def expected_gradient(name, size, *, penalised=False, same_group=True, gamma=1.0):
    """E over all `size`-tuples of trajectories of the mean over them of their score with the estimator's advantages."""
    total = [0.0] * (V + V * V)
    for drawn in itertools.product(TRAJECTORIES, repeat=size):
        rollouts = [
            rollout(
                REWARD[a][b], 0 if same_group else i, 2, penalties=[BETA * x for x in k1(a, b)] if penalised else None
            )
            for i, (a, b) in enumerate(drawn)
        ]
        weight = math.prod(probability(a, b) for a, b in drawn) / size
        for (a, b), advantages in zip(drawn, estimate(name, rollouts, gamma=gamma), strict=True):
            total = [t + weight * s for t, s in zip(total, score(a, b, advantages), strict=True)]
    return total


def reward(a, b):
    return REWARD[a][b]


def penalised_reward(a, b):
    return REWARD[a][b] - BETA * math.fsum(k1(a, b))


def close(gradient):
    return pytest.approx(gradient, rel=0, abs=1e-10)


def test_the_analytic_gradient_is_the_slope_of_the_expected_reward():
    # one entry by hand: dJ/dtheta for the first token 0 is p (its mean reward - J)
    means = [math.fsum(P2[a][b] * REWARD[a][b] for b in range(V)) for a in range(V)]
    expected_reward = math.fsum(probability(a, b) * REWARD[a][b] for a, b in TRAJECTORIES)
    assert analytic(reward)[0] == pytest.approx(P1[0] * (means[0] - expected_reward))
    assert max(abs(x) for x in analytic(reward)) > 0.1


def test_reinforce_is_unbiased():
    assert expected_gradient("reinforce", 1) == close(analytic(reward))


def test_rloo_is_unbiased():
    assert expected_gradient("rloo", 2) == close(analytic(reward))


def test_the_mean_with_oneself_in_it_shrinks_the_gradient_by_n_minus_1_over_n():
    half = [x / 2 for x in analytic(reward)]
    assert expected_gradient("group_mean", 2) == close(half)
    assert expected_gradient("batch_mean", 2, same_group=False) == close(half)


@pytest.mark.parametrize(("name", "size"), [("reinforce", 1), ("rloo", 2)])
def test_k1_in_the_reward_gives_the_gradient_of_the_sequences_divergence(name, size):
    # E[grad of the penalty itself] is 0, so the gradient of E[R - beta KL] is the score times R - beta k1
    assert expected_gradient(name, size, penalised=True) == close(analytic(penalised_reward))


def test_a_tokens_own_penalty_alone_would_be_another_gradient():
    # what the outcome estimators would do if each token paid only for itself
    total = [0.0] * (V + V * V)
    for a, b in TRAJECTORIES:
        own = [REWARD[a][b] - BETA * x for x in k1(a, b)]
        total = [t + probability(a, b) * s for t, s in zip(total, score(a, b, own), strict=True)]
    gap = max(abs(x - y) for x, y in zip(total, analytic(penalised_reward), strict=True))
    assert gap > 1e-3


def test_a_discount_scales_the_first_tokens_share():
    gradient = analytic(reward)
    expected = [0.5 * x for x in gradient[:V]] + gradient[V:]
    assert expected_gradient("reinforce", 1, gamma=0.5) == close(expected)


def test_distillation_follows_each_tokens_divergence_from_the_teacher():
    # minus the gradient of KL(policy || teacher) of each token at its prefix, the prefix held fixed
    total = [0.0] * (V + V * V)
    for a, b in TRAJECTORIES:
        ((first, second),) = estimate("distillation", [rollout(0.0, gaps=[-x for x in k1(a, b)])])
        total = [t + probability(a, b) * s for t, s in zip(total, score(a, b, (first, second)), strict=True)]
    kl1 = math.fsum(P1[k] * math.log(P1[k] / Q1[k]) for k in range(V))
    expected = [-P1[k] * (math.log(P1[k] / Q1[k]) - kl1) for k in range(V)]
    for a in range(V):
        kl2 = math.fsum(P2[a][k] * math.log(P2[a][k] / Q2[a][k]) for k in range(V))
        expected += [-P1[a] * P2[a][k] * (math.log(P2[a][k] / Q2[a][k]) - kl2) for k in range(V)]
    assert total == close(expected)
