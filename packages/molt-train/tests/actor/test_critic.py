"""The critic's update, on a value of one number a token that can be followed by hand."""

import math

import pytest
import torch

from molt.train.actor.batch import collate
from molt.train.actor.critic import Critic
from molt.train.actor.step import Share, Trainer
from molt.train.actor.value_model import ValueHead
from molt.train.errors import ActorError

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")


@pytest.fixture
def critic(tiny, policy_of):
    """V of the state after token k is `weight[0, k] + bias`; SGD with learning rate 1."""
    tiny.lm_head = ValueHead(5, device=CPU)
    optimizer = torch.optim.SGD(tiny.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return Critic(Trainer(policy_of(tiny), optimizer, schedule, max_grad_norm=1e9, temperature=1.0), value_clip=0.0)


@pytest.fixture
def share(make_payload, row_of):
    def make(*rows):
        """A microbatch a row of (tokens, actions, weight, values, returns), and an empty one."""
        payloads = [make_payload(tokens, actions) for tokens, actions, *_ in rows]
        made = [
            (payload, row_of(payload, weight=weight, values=values, returns=returns))
            for payload, (_, _, weight, values, returns) in zip(payloads, rows, strict=True)
        ]
        batches = [collate([row], device=CPU, layout="padded") for row in made]
        num_action_tokens = sum(row.experience.num_actions for _, row in made)
        return Share([*batches, collate([], device=CPU, layout="padded")], num_action_tokens, len(rows))

    return make


def set_values(critic, values):
    with torch.no_grad():
        critic.trainer.policy.model.lm_head.weight[0] = torch.tensor(values)


def test_a_value_is_of_the_state_before_the_action(critic, share):
    set_values(critic, [0.0, 10.0, 20.0, 30.0, 40.0])
    batch = share(([4, 1, 3, 2, 0], [0, 0, 1, 0, 1], 1.0, [0, 0], [0, 0])).batches[0]
    assert critic.values(batch).tolist() == [10.0, 20.0], "read at tokens 1 and 2, which come before actions 3 and 0"
    assert not critic.values(batch).requires_grad


def test_values_move_towards_the_returns_by_the_weights_of_the_rows(critic, share):
    metrics = critic.update(
        [share(([1, 2], [0, 1], 0.25, [0.0], [1.0]), ([3, 3, 4], [0, 1, 1], 0.375, [0.0, 0.0], [-2.0, 0.0]))], step=1
    )
    weight, bias = critic.trainer.policy.model.lm_head.weight[0], critic.trainer.policy.model.lm_head.bias
    # d/dV of .5 (V - return)^2 at V = 0 is -return: 1 after token 1 by .25; -2 and 0 after token 3 by .375.
    assert weight.tolist() == pytest.approx([0.0, 0.25, 0.0, -0.75, 0.0])
    assert bias.item() == pytest.approx(-0.5)
    assert metrics["value_loss"] == pytest.approx(0.25 * 0.5 * 1 + 0.375 * 0.5 * 4)
    assert metrics["critic_grad_norm"] == pytest.approx(math.sqrt(0.25**2 + 0.75**2 + 0.5**2))
    assert metrics["critic_lr"] == 1.0
    assert metrics["return_mean"] == pytest.approx(-1 / 3)


def test_the_explained_variance_is_that_of_the_values_before_the_update(critic, share):
    set_values(critic, [0.0, 1.0, 0.0, 2.0, 0.0])
    rows = [([1, 2], [0, 1], 0.5, [1.0], [2.0]), ([3, 3, 3], [0, 1, 1], 0.5, [2.0, 2.0], [4.0, 0.0])]
    metrics = critic.update([share(*rows)], step=1)
    # Returns 2, 4, 0: variance 8/3. Errors 1, 2, 2: mean square 3.
    assert metrics["explained_variance"] == pytest.approx(1 - 3 / (8 / 3))


def test_returns_that_are_all_alike_have_no_variance_to_explain(critic, share):
    metrics = critic.update([share(([1, 2, 3], [0, 1, 1], 0.5, [0.0, 0.0], [0.7, 0.7]))], step=1)
    assert metrics["explained_variance"] == 0.0


def test_a_value_that_has_moved_to_the_clip_gets_no_gradient(tiny, critic, share):
    clipped = Critic(critic.trainer, value_clip=0.2)
    set_values(clipped, [0.0, 0.7, 0.0, 0.1, 0.0])
    rows = [([1, 2], [0, 1], 0.5, [0.3], [1.0]), ([3, 4], [0, 1], 0.5, [0.2], [0.0])]
    metrics = clipped.update([share(*rows)], step=1)
    assert metrics["value_loss"] == pytest.approx(0.065)
    assert metrics["value_clip_fraction"] == 0.5
    assert tiny.lm_head.weight[0].tolist() == pytest.approx([0.0, 0.7, 0.0, 0.05, 0.0])


def test_each_share_is_a_step_and_one_without_actions_is_none(critic, share):
    one = share(([1, 2], [0, 1], 1.0, [0.0], [1.0]))
    nothing = share()
    metrics = critic.update([one, nothing, one], step=1)
    # V = 0, then 2: losses of half of 1 and half of 1.
    assert metrics["value_loss"] == pytest.approx(0.5)
    assert metrics["value_mean"] == pytest.approx((0.0 + 2.0) / 2)
    assert critic.trainer.policy.model.lm_head.bias.item() == pytest.approx(0.0)


@pytest.mark.parametrize(("values", "returns"), [(None, [1.0]), ([0.0], None)])
def test_a_row_without_values_or_returns_is_refused(critic, make_payload, row_of, values, returns):
    payload = make_payload([1, 2], [0, 1])
    given = {name: array for name, array in (("values", values), ("returns", returns)) if array is not None}
    batch = collate([(payload, row_of(payload, **given))], device=CPU, layout="padded")
    with pytest.raises(ValueError, match="no returns, or no values"):
        critic.update([Share([batch], 1, 1)], step=1)


def test_a_return_that_is_not_finite_never_reaches_the_weights(critic, share):
    with pytest.raises(ActorError, match="update 3"):
        critic.update([share(([1, 2], [0, 1], 1.0, [0.0], [math.nan]))], step=3)
    assert not critic.trainer.policy.model.lm_head.weight.any()
