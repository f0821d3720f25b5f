"""Our generalized advantages and discounted returns are those of TorchRL."""

import numpy as np
import pytest
import torch

from molt.train.advantage import EstimatorSettings, RolloutBatch, compute_advantages
from molt.train.advantage.gae import gae
from molt.train.advantage.reinforce import reinforce


@pytest.fixture(scope="module")
def torchrl(golden):
    return golden("torchrl")


def batch_of(cases):
    """All cases as the rollouts of one window."""
    return RolloutBatch(
        rewards_R=torch.tensor([case["reward"] for case in cases], dtype=torch.float64),
        groups_R=torch.arange(len(cases)),
        num_actions_R=torch.tensor([len(case["values"]) for case in cases]),
        values_N=torch.tensor([value for case in cases for value in case["values"]], dtype=torch.float64),
    )


def test_the_values_are_of_the_version_that_the_documents_name(torchrl):
    assert torchrl.content["versions"]["torchrl"] == "0.14.1"


def test_what_the_critic_is_to_predict(torchrl):
    for case in torchrl.cases():
        result = gae(batch_of([case]), EstimatorSettings(gamma=case["gamma"], lam=case["lam"]))
        assert result.returns_N.tolist() == pytest.approx(case["value_targets"], rel=1e-12, abs=1e-12)


def test_advantages_whitened_over_the_window(torchrl):
    # Ours are whitened, theirs are not: theirs are whitened here, all rollouts of the same coefficients together.
    two = torchrl.cases(gamma=0.9, lam=0.8)
    assert len(two) == 2
    settings = EstimatorSettings(gamma=0.9, lam=0.8)
    plain = np.concatenate([case["advantages"] for case in two])
    whitened = (plain - plain.mean()) / plain.std()
    assert gae(batch_of(two), settings).advantages_N.tolist() == pytest.approx(whitened.tolist(), rel=1e-6)


def test_discounted_returns(torchrl):
    for case in torchrl.cases():
        result = reinforce(batch_of([case]), EstimatorSettings(gamma=case["gamma"]))
        assert result.advantages_N.tolist() == pytest.approx(case["returns"], rel=1e-12, abs=1e-12)


def test_rollouts_of_a_window_do_not_touch(torchrl):
    two = torchrl.cases(gamma=0.9, lam=0.8)
    rewards, lengths = np.array([c["reward"] for c in two]), np.array([len(c["values"]) for c in two])
    ours, _ = compute_advantages("reinforce", rewards, np.arange(2), lengths, settings=EstimatorSettings(gamma=0.9))
    theirs = [value for case in two for value in case["returns"]]
    assert ours.tolist() == pytest.approx(theirs, rel=1e-6)
