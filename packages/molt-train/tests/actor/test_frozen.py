"""A frozen policy is the trained one's equal, to the last bit, until the trained one moves."""

import pytest
import torch

from molt.train.actor.batch import collate
from molt.train.actor.frozen import load_frozen
from molt.train.actor.head import action_logprobs
from molt.train.actor.model import load_policy
from molt.train.config import ActorConfig

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def checkpoint(save_qwen3, tmp_path_factory):
    return str(save_qwen3(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1, attention_dropout=0.5))


@pytest.fixture
def batch(make_payload, row_of):
    payload = make_payload([3, 7, 11, 2, 5], [0, 1, 1, 0, 1])
    return collate([(payload, row_of(payload))], device=torch.device("cpu"), layout="padded")


def logprobs(policy, batch):
    return action_logprobs(policy, batch, temperature=1.0, chunk_size=64, with_entropy=False)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_divergence_from_an_unchanged_policy_is_exactly_0(checkpoint, batch, dtype):
    settings = ActorConfig(dtype=dtype)
    policy, frozen = load_policy(checkpoint, settings), load_frozen(checkpoint, settings)
    policy.model.eval()
    assert torch.equal(logprobs(policy, batch), logprobs(frozen, batch))


def test_it_has_no_gradient_and_drops_nothing_out(checkpoint, batch):
    frozen = load_frozen(checkpoint, ActorConfig())
    trained = load_policy(checkpoint, ActorConfig())
    assert not torch.equal(logprobs(trained, batch), logprobs(trained, batch)), "attention_dropout is 0.5"
    assert torch.equal(logprobs(frozen, batch), logprobs(frozen, batch))
    assert not logprobs(frozen, batch).requires_grad
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())
