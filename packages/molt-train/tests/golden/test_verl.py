"""Our advantages, losses and divergences are those of verl, value by value and gradient by gradient."""

import math

import numpy as np
import pytest

from molt.train.advantage import EstimatorSettings, TokenSignals, compute_advantages
from molt.train.config import AlgorithmConfig
from molt.train.loss import LossInputs, policy_loss, value_loss, weighted_sum
from molt.train.loss.kl import k1, k2, k3

EXACT = {"rel": 1e-9, "abs": 1e-9}
FLOAT32 = {"rel": 1e-6, "abs": 1e-6}  # advantages leave their stage in float32


@pytest.fixture(scope="module")
def verl(golden):
    return golden("verl")


def test_the_values_are_of_the_version_that_the_documents_name(verl):
    assert verl.content["versions"]["verl"] == "0.9.1"


def advantages(verl, case, *, signals=None, **settings):
    settings = EstimatorSettings(gamma=case.get("gamma", 1.0), lam=case.get("lam", 1.0), **settings)
    groups = np.array(case.get("groups", [0] * len(case["rewards"])))
    rewards, num_actions = np.array(case["rewards"]), np.array(verl.num_actions)
    return compute_advantages(
        case["estimator"], rewards, groups, num_actions, settings=settings, signals=signals or TokenSignals()
    )


@pytest.mark.parametrize("estimator", ["grpo", "group_mean", "rloo"])
def test_group_baselines(verl, estimator):
    for case in verl.cases(estimator=estimator):
        ours, _ = advantages(verl, case)
        assert ours.tolist() == pytest.approx(case["advantages"], **FLOAT32), case["what"]


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitened_advantages_up_to_their_choice_of_the_deviation(verl, estimator):
    # verl divides by the sample deviation of the N tokens, we by the population's.
    num_tokens = sum(verl.num_actions)
    for case in verl.cases(estimator=estimator):
        ours, _ = advantages(verl, case)
        theirs = np.array(case["advantages"]) * math.sqrt(num_tokens / (num_tokens - 1))
        assert ours.tolist() == pytest.approx(theirs.tolist(), **FLOAT32), case["what"]


def test_returns_are_discounted_over_action_tokens_only(verl):
    assert {case["gamma"] for case in verl.cases(estimator="reinforce_pp")} == {1.0, 0.9, 0.5}
    for case in verl.cases(estimator="reinforce_pp"):
        ours, _ = advantages(verl, {**case, "estimator": "reinforce"})
        assert ours.tolist() == pytest.approx(case["returns"], **FLOAT32)


def test_gae_skips_what_stands_between_action_tokens(verl):
    num_tokens = sum(verl.num_actions)
    for case in verl.cases(estimator="gae"):
        signals = TokenSignals(values=verl.actions(case["values"]).numpy())
        ours, returns = advantages(verl, case, signals=signals)
        theirs = np.array(case["advantages"]) * math.sqrt(num_tokens / (num_tokens - 1))
        assert ours.tolist() == pytest.approx(theirs.tolist(), **FLOAT32)
        assert returns.tolist() == pytest.approx(case["returns"], **FLOAT32)


def loss_inputs(verl, case):
    return LossInputs(
        current_N=verl.actions(case["current"]).requires_grad_(),
        old_N=verl.actions(case["old"]),
        advantages_N=verl.actions(case["advantages"]),
        correction_N=verl.actions(case["correction"]),
        sequence_N=verl.each_token(range(len(verl.num_actions))),
        num_sequences=len(verl.num_actions),
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_policy_losses_aggregated_and_corrected(verl, loss, aggregation):
    for case in verl.cases(kind="policy_loss", loss_name=loss, aggregation=aggregation):
        settings = AlgorithmConfig(
            loss=loss, clip_low=case["clip_low"], clip_high=case["clip_high"], dual_clip=case["dual_clip"]
        )
        inputs = loss_inputs(verl, case)
        losses, sums = policy_loss(inputs, settings=settings, kl_coef=0.0)
        total = weighted_sum(losses, verl.weights(aggregation), dp_size=1)
        total.backward()
        # Theirs adds 1e-8 to each row's number of tokens.
        assert total.item() == pytest.approx(case["loss"], rel=1e-7)
        assert inputs.current_N.grad.tolist() == pytest.approx(case["gradient"], rel=1e-7, abs=1e-12)
        clipped = float(sums["clip_fraction"]) / sum(verl.num_actions)
        assert clipped == pytest.approx(case["clip_fraction"], **FLOAT32)


def test_every_branch_of_the_clips_is_among_the_cases(verl):
    (case,) = verl.cases(loss_name="ppo", dual_clip=1.5, aggregation="token_mean")
    ratio = (verl.actions(case["current"]) - verl.actions(case["old"])).exp()
    rising = verl.actions(case["advantages"]) > 0
    assert ((ratio > 1.2) & rising).any(), "clipped above"
    assert ((ratio < 0.8) & ~rising).any(), "clipped below"
    assert ((ratio > 1.5) & ~rising).any(), "dual clip"
    assert ((ratio > 0.8) & (ratio < 1.2)).any(), "not clipped"


def test_the_value_loss(verl):
    for case in verl.cases(kind="value_loss"):
        values = verl.actions(case["values"]).requires_grad_()
        old, returns = verl.actions(case["old_values"]), verl.actions(case["returns"])
        losses, sums = value_loss(values, old, returns, clip=case["clip"])
        total = weighted_sum(losses, verl.weights("token_mean"), dp_size=1)
        total.backward()
        assert total.item() == pytest.approx(case["loss"], **EXACT)
        assert values.grad.tolist() == pytest.approx(case["gradient"], **EXACT)
        clipped = float(sums["value_clip_fraction"]) / len(values)
        assert clipped == pytest.approx(case["clip_fraction"], **FLOAT32)


@pytest.mark.parametrize(("name", "ours"), [("k1", k1), ("k2", k2), ("k3", k3)])
def test_divergences(verl, name, ours):
    (case,) = verl.cases(kind="divergence", name=name)
    result = ours(verl.actions(case["policy"]), verl.actions(case["reference"]))
    assert result.tolist() == pytest.approx(case["result"], **EXACT)
