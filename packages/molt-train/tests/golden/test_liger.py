"""From hidden states to the gradients of the head, our chunked log-probs and losses are those of Liger."""

import pytest
import torch

from molt.train.config import AlgorithmConfig
from molt.train.loss import LossInputs, policy_loss, weighted_sum
from molt.train.loss.logprob import head_logprobs


@pytest.fixture(scope="module")
def liger(golden):
    return golden("liger")


def test_the_values_are_of_the_version_that_the_documents_name(liger):
    assert liger.content["versions"]["liger-kernel"] == "0.8.5"


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        ("ppo", "token_mean"),
        ("ppo", "sequence_mean"),
        ("ppo", "constant"),
        ("gspo", "sequence_mean"),
        ("cispo", "token_mean"),
    ],
)
def test_losses_and_gradients_through_the_head(liger, loss, aggregation):
    (case,) = liger.cases(loss_name=loss, aggregation=aggregation)
    is_action = torch.tensor(liger.content["mask"], dtype=torch.bool)
    hidden = torch.tensor(case["hidden"], dtype=torch.float64).requires_grad_()
    weight = torch.tensor(case["weight"], dtype=torch.float64).requires_grad_()
    current, _ = head_logprobs(
        hidden[is_action],
        weight,
        torch.tensor(case["tokens"])[is_action],
        temperature=case["temperature"],
        chunk_size=3,
        with_entropy=False,
    )
    inputs = LossInputs(
        current_N=current,
        old_N=liger.actions(case["old"]),
        advantages_N=liger.each_token(case["advantages"]).double(),
        correction_N=liger.actions(case["correction"]),
        sequence_N=liger.each_token(range(len(liger.num_actions))),
        num_sequences=len(liger.num_actions),
    )
    settings = AlgorithmConfig(loss=loss, clip_low=liger.content["clip_low"], clip_high=liger.content["clip_high"])
    losses, _ = policy_loss(inputs, settings=settings, kl_coef=0.0)
    total = weighted_sum(losses, liger.weights(aggregation), dp_size=1)
    total.backward()
    assert total.item() == pytest.approx(case["loss"], rel=1e-5)
    for ours, theirs in ((hidden.grad, case["hidden_gradient"]), (weight.grad, case["weight_gradient"])):
        # Theirs are computed in float32.
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-4, atol=1e-6)
