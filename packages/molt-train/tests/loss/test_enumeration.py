"""Expected gradients, exactly: every sequence of a policy of two steps and three tokens, weighted by its probability.

The analytic gradients are those of softmax, written out in loops: for f a function of the token, the expectation
sum_k p_k f_k has the derivative p_k (f_k - mean f) by the logit of k.
"""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import pytest
import torch

from molt.train.config import CorrectionRule
from molt.train.loss import (
    SURROGATES,
    LossInputs,
    correction_weights,
    policy_loss,
    reward_penalty,
    rollout_sums,
    weighted_sum,
)
from molt.train.loss.kl import k1, k2, k3

from .vectors import f64, gradient, i64, settings_of

# Logits of the first token, then those of the second after each first one.
POLICY = [[0.2, -0.3, 0.5], [0.9, 0.0, -0.4], [-0.2, 0.3, 0.1], [0.6, -0.7, 0.2]]
SAMPLER = [[-0.1, 0.4, 0.3], [0.1, 0.5, -0.6], [0.4, -0.3, 0.2], [-0.2, 0.1, 0.9]]
OLDER = [[0.0, 0.1, 0.4], [0.7, 0.2, -0.5], [0.1, 0.0, 0.3], [0.3, -0.4, 0.5]]
REFERENCE = [[0.6, 0.1, -0.4], [0.2, -0.1, 0.3], [0.5, 0.0, -0.8], [-0.3, 0.4, 0.0]]
REWARD = [[1.0, 0.0, -0.5], [0.3, 2.0, 0.0], [-1.0, 0.7, 0.4]]

SEQUENCES = [(a, b) for a in range(3) for b in range(3)]
ROLLOUTS = i64([i for i in range(9) for _ in range(2)])
WHOLE = CorrectionRule(level="sequence", mode="truncate")
TOKEN = CorrectionRule(level="token", mode="truncate")
NONE = CorrectionRule()
PPO, DIVERGENCE = settings_of(), settings_of(kl_coef=1.0)
EXACT = {"rel": 0, "abs": 1e-10}


def softmax(logits):
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def probability(logits, sequence):
    a, b = sequence
    return softmax(logits[0])[a] * softmax(logits[1 + a])[b]


def parameters():
    return f64(POLICY, grad=True)


def token_logprobs(logits):
    """Log-probs of both tokens of every sequence, [18]."""
    logs = torch.log_softmax(logits if isinstance(logits, torch.Tensor) else f64(logits), dim=-1)
    return torch.stack([part for a, b in SEQUENCES for part in (logs[0, a], logs[1 + a, b])])


def token_shares(sampler):
    """The probability of its sequence, for each token."""
    return f64([probability(sampler, sequence) for sequence in SEQUENCES for _ in range(2)])


def expected_gradient(theta, loss_N, sampler):
    return gradient(weighted_sum(loss_N, token_shares(sampler), dp_size=1), theta).flatten().tolist()


def loss_of(theta, *, sampler=POLICY, old=None, advantages=None, rule=NONE, rows=None, algorithm=PPO):
    """The package's loss of every token of every sequence that `sampler` recorded."""
    current_N, behaviour_N = token_logprobs(theta), token_logprobs(sampler)
    old_N = current_N.detach() if old is None else token_logprobs(old)
    correction_N, _ = correction_weights(
        old_N, behaviour_N, ROLLOUTS, rule, rollout_sums(old_N, behaviour_N, ROLLOUTS, 9)
    )
    inputs = LossInputs(
        current_N=current_N,
        old_N=old_N,
        advantages_N=f64([0.0] * 18) if advantages is None else advantages,
        correction_N=correction_N,
        sequence_N=ROLLOUTS if rows is None else rows,
        num_sequences=9 if rows is None else 18,
        reference_N=token_logprobs(REFERENCE),
    )
    return policy_loss(inputs, settings=algorithm, kl_coef=algorithm.kl_coef)[0]


# Analytic gradients, [12]: by the logits of the first token, then of the second after each first one


def reward_gradient():
    first, result = softmax(POLICY[0]), []
    mean_after = [sum(p * r for p, r in zip(softmax(POLICY[1 + a]), REWARD[a], strict=True)) for a in range(3)]
    mean = sum(p * m for p, m in zip(first, mean_after, strict=True))
    result += [first[k] * (mean_after[k] - mean) for k in range(3)]
    for a in range(3):
        second = softmax(POLICY[1 + a])
        result += [first[a] * second[k] * (REWARD[a][k] - mean_after[a]) for k in range(3)]
    return result


def divergences(state):
    """The log ratio to the reference of each token in a state, and its mean: the reverse divergence there."""
    p, q = softmax(POLICY[state]), softmax(REFERENCE[state])
    logs = [math.log(x / y) for x, y in zip(p, q, strict=True)]
    return logs, sum(x * log for x, log in zip(p, logs, strict=True))


def state_probabilities(visitor):
    return [1.0, *softmax(visitor[0])]


def sequence_divergence_gradient():
    """Of KL(policy || reference) over whole sequences: the first token answers for what it leads to as well."""
    result = token_divergence_gradient(POLICY)
    first, after = softmax(POLICY[0]), [divergences(1 + a)[1] for a in range(3)]
    mean_after = sum(p * d for p, d in zip(first, after, strict=True))
    for k in range(3):
        result[k] += first[k] * (after[k] - mean_after)
    return result


def token_divergence_gradient(visitor):
    """Of the sum over states of KL(policy || reference) there, with how often `visitor` comes there held fixed."""
    result = []
    for state, visits in enumerate(state_probabilities(visitor)):
        logs, mean = divergences(state)
        result += [visits * p * (log - mean) for p, log in zip(softmax(POLICY[state]), logs, strict=True)]
    return result


def forward_divergence_gradient(visitor):
    """As above, of KL(reference || policy)."""
    result = []
    for state, visits in enumerate(state_probabilities(visitor)):
        result += [visits * (p - q) for p, q in zip(softmax(POLICY[state]), softmax(REFERENCE[state]), strict=True)]
    return result


def negative(values):
    return [-x for x in values]


def distance(left, right):
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


# Rewards

REWARDS = f64([REWARD[a][b] for a, b in SEQUENCES for _ in range(2)])


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_every_surrogate_climbs_the_expected_reward(name):
    theta = parameters()
    found = expected_gradient(theta, loss_of(theta, advantages=REWARDS, algorithm=settings_of(loss=name)), POLICY)
    assert found == pytest.approx(negative(reward_gradient()), **EXACT)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_constant_baseline_does_not_change_the_gradient(name):
    theta = parameters()
    found = expected_gradient(theta, loss_of(theta, advantages=REWARDS - 0.7, algorithm=settings_of(loss=name)), POLICY)
    assert found == pytest.approx(negative(reward_gradient()), **EXACT)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("rows", [None, i64(list(range(18)))], ids=["one segment", "a segment each token"])
def test_sequence_importance_sampling_is_unbiased_however_a_rollout_is_cut(name, rows):
    theta = parameters()
    loss_N = loss_of(
        theta, sampler=SAMPLER, advantages=REWARDS, rule=WHOLE, rows=rows, algorithm=settings_of(loss=name)
    )
    assert expected_gradient(theta, loss_N, SAMPLER) == pytest.approx(negative(reward_gradient()), **EXACT)


@pytest.mark.parametrize("rule", [NONE, TOKEN], ids=["uncorrected", "token"])
def test_no_correction_and_that_of_single_tokens_are_biased(rule):
    theta = parameters()
    found = expected_gradient(theta, loss_of(theta, sampler=SAMPLER, advantages=REWARDS, rule=rule), SAMPLER)
    assert distance(found, negative(reward_gradient())) > 1e-2


# Divergence from the reference


@pytest.mark.parametrize(("sampler", "rule"), [(POLICY, NONE), (SAMPLER, WHOLE)], ids=["on-policy", "off-policy"])
def test_k1_in_the_reward_is_the_divergence_of_whole_sequences(sampler, rule):
    theta = parameters()
    penalties = reward_penalty(token_logprobs(theta), token_logprobs(REFERENCE), coef=0.3).reshape(9, 2)
    returns = torch.stack([penalties.sum(1), penalties[:, 1]], dim=1).flatten()  # each token, what is from it on
    loss_N = loss_of(
        theta, sampler=sampler, advantages=-returns, rule=rule, algorithm=settings_of(loss="policy_gradient")
    )
    expected = [0.3 * x for x in sequence_divergence_gradient()]
    assert expected_gradient(theta, loss_N, sampler) == pytest.approx(expected, **EXACT)


def test_k2_in_the_loss_on_policy_is_the_divergence_of_each_token():
    theta = parameters()
    found = expected_gradient(theta, loss_of(theta, algorithm=DIVERGENCE), POLICY)
    assert found == pytest.approx(token_divergence_gradient(POLICY), **EXACT)
    # it leaves out what a token leads to
    assert distance(found, sequence_divergence_gradient()) > 1e-3


def test_k2_in_the_loss_off_policy_is_right_in_every_state_that_the_sampler_visits():
    theta = parameters()
    found = expected_gradient(theta, loss_of(theta, sampler=SAMPLER, rule=TOKEN, algorithm=DIVERGENCE), SAMPLER)
    assert found == pytest.approx(token_divergence_gradient(SAMPLER), **EXACT)


def test_k2_in_the_loss_with_sequence_weights_is_the_on_policy_one():
    theta = parameters()
    found = expected_gradient(theta, loss_of(theta, sampler=SAMPLER, rule=WHOLE, algorithm=DIVERGENCE), SAMPLER)
    assert found == pytest.approx(token_divergence_gradient(POLICY), **EXACT)


def test_k2_in_the_loss_stays_right_when_the_policy_has_left_the_one_before_the_window():
    # three policies: sampler, the one before the window, and current; the weight is old/sampler * current/old
    theta = parameters()
    found = expected_gradient(
        theta, loss_of(theta, sampler=SAMPLER, old=OLDER, rule=TOKEN, algorithm=DIVERGENCE), SAMPLER
    )
    assert found == pytest.approx(token_divergence_gradient(SAMPLER), **EXACT)


def test_k2_in_the_loss_off_policy_without_weights_is_wrong():
    theta = parameters()
    found = expected_gradient(theta, loss_of(theta, sampler=SAMPLER, rule=NONE, algorithm=DIVERGENCE), SAMPLER)
    assert distance(found, token_divergence_gradient(SAMPLER)) > 1e-2
    assert distance(found, token_divergence_gradient(POLICY)) > 1e-2


def test_k1_as_a_loss_does_nothing_and_k3_follows_the_other_divergence():
    # why neither is offered
    theta = parameters()
    policy_N, reference_N = token_logprobs(theta), token_logprobs(REFERENCE)
    assert expected_gradient(theta, k1(policy_N, reference_N), POLICY) == pytest.approx([0.0] * 12, **EXACT)
    policy_N = token_logprobs(theta)
    found = expected_gradient(theta, k3(policy_N, reference_N), POLICY)
    assert found == pytest.approx(forward_divergence_gradient(POLICY), **EXACT)


@pytest.mark.parametrize("flows", [False, True])
def test_k3_off_policy_is_right_only_with_a_gradient_through_its_weight(flows):
    theta = parameters()
    policy_N = token_logprobs(theta)
    weights_N = (policy_N - token_logprobs(SAMPLER)).exp()
    loss_N = (weights_N if flows else weights_N.detach()) * k3(policy_N, token_logprobs(REFERENCE))
    expected = token_divergence_gradient(SAMPLER) if flows else forward_divergence_gradient(SAMPLER)
    assert expected_gradient(theta, loss_N, SAMPLER) == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (k1, [0.0, 0.0, 0.0]),
        (k2, [-0.200774, -0.121776, 0.322550]),
        (k3, [-0.168230, -0.102037, 0.270267]),
    ],
)
def test_hand_vector_of_a_single_step(estimate, expected):
    theta = f64(POLICY[0], grad=True)
    logs = torch.log_softmax(theta, -1)
    loss = (logs.detach().exp() * estimate(logs, torch.log_softmax(f64(REFERENCE[0]), -1))).sum()
    assert gradient(loss, theta).tolist() == pytest.approx(expected, abs=1e-6)
