"""One update of a policy that is a table of logits: every number below is worked out by hand.

At the start all five tokens have probability 1/5 after any token. The gradient of -log p(target) with respect to the
logits is p - onehot(target): -4/5 for the target and 1/5 for the others.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from molt.train.actor.batch import collate
from molt.train.actor.model import Policy
from molt.train.actor.step import Share, Trainer, action_logprobs, update
from molt.train.errors import ActorError

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
CHANCE = -math.log(5)
ROWS = [
    ([1, 2, 3], [0, 1, 1]),
    ([1, 2], [0, 1]),
    ([4, 0, 1, 2], [0, 0, 1, 1]),
    ([3, 3], [0, 1]),
]
"""Tokens, and which of them are actions: six actions in all."""


def nll(current_N, old_N, batch):
    """Maximum likelihood, so that gradients can be worked out by hand."""
    return -current_N, {"chosen": batch.advantages_N.sum()}


@pytest.fixture
def trainer(tiny):
    def make(*, optimizer=None, max_grad_norm=1e9, temperature=1.0):
        optimizer = optimizer or torch.optim.SGD(tiny.parameters(), lr=1.0)
        return Trainer(
            policy=Policy(
                model=tiny,
                device=CPU,
                mesh=SimpleNamespace(device_mesh=None, moe_mesh=None),
                compute_dtype=torch.float32,
            ),
            optimizer=optimizer,
            schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
            max_grad_norm=max_grad_norm,
            temperature=temperature,
        )

    return make


@pytest.fixture
def batch(make_payload):
    def make(*rows, advantage=1.0):
        payloads = [make_payload(tokens, actions) for tokens, actions in rows]
        return collate([(p, np.full(int(p.action_mask.sum()), advantage, np.float32)) for p in payloads], device=CPU)

    return make


def gradient_of(*pairs):
    """Minus the summed gradient of -log p over (token before, target) pairs, at the start."""
    step = torch.zeros(5, 5)
    for before, target in pairs:
        step[before] -= 0.2
        step[before, target] += 1.0
    return step


PAIRS = [(1, 2), (2, 3), (1, 2), (0, 1), (1, 2), (3, 3)]
"""What the actions of `ROWS` are sampled after, and what they are."""


def test_an_update_is_the_token_mean_over_the_window(trainer, tiny, batch):
    report = update(trainer(), [Share([batch(*ROWS)], 6)], step=1, objective=nll)
    assert torch.allclose(tiny.table, gradient_of(*PAIRS) / 6)
    assert report.loss == pytest.approx(-CHANCE)
    assert (report.step, report.lr) == (1, 1.0)


@pytest.mark.parametrize("cut", [[1, 3], [2, 2], [1, 1, 1, 1], [4, 0, 0]])
def test_an_update_does_not_depend_on_the_cut_into_microbatches(trainer, tiny, batch, cut):
    rows = iter(ROWS)
    microbatches = [batch(*itertools.islice(rows, size)) for size in cut]
    report = update(trainer(), [Share(microbatches, 6)], step=1, objective=nll)
    assert torch.allclose(tiny.table, gradient_of(*PAIRS) / 6, atol=1e-7)
    assert report.loss == pytest.approx(-CHANCE)
    assert report.metrics["chosen"] == pytest.approx(1.0)


def test_the_denominator_counts_the_action_tokens_of_the_other_ranks(trainer, tiny, batch):
    update(trainer(), [Share([batch(*ROWS)], 24)], step=1, objective=nll)
    assert torch.allclose(tiny.table, gradient_of(*PAIRS) / 24)


def test_the_gradient_is_clipped_to_its_bound_and_reported_as_it_was(trainer, tiny, batch):
    report = update(trainer(max_grad_norm=0.01), [Share([batch(ROWS[1])], 1)], step=1, objective=nll)
    norm = math.sqrt(0.8**2 + 4 * 0.2**2)
    assert report.grad_norm == pytest.approx(norm)
    assert torch.allclose(tiny.table, gradient_of((1, 2)) * 0.01 / norm, atol=1e-6)


def test_the_log_probs_are_those_of_the_temperature(trainer, tiny, batch):
    with torch.no_grad():
        tiny.table[1] = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    found = action_logprobs(trainer(temperature=0.5), batch(([1, 2], [0, 1])))
    logits = [0.0, 2.0, 4.0, 6.0, 8.0]
    assert found.tolist() == pytest.approx([4.0 - math.log(sum(map(math.exp, logits)))])


def test_the_gap_is_between_the_recorded_log_probs_and_those_before_the_update(trainer, make_payload):
    payload = make_payload([1, 2, 3], [0, 1, 1], [0.0, CHANCE + 0.5, CHANCE - 0.25])
    batch = collate([(payload, np.ones(2, np.float32))], device=CPU)
    report = update(trainer(), [Share([batch], 2)], step=1, objective=nll)
    assert report.logprob_gap_mean == pytest.approx(0.375, abs=1e-6)
    assert report.logprob_gap_max == pytest.approx(0.5, abs=1e-6)
    assert report.metrics["logprob_mean"] == pytest.approx(CHANCE)


class Watch:
    """An objective that keeps the old and the current log-probs of every microbatch."""

    def __init__(self):
        self.seen = []

    def __call__(self, current_N, old_N, batch):
        self.seen.append((current_N.detach().tolist(), old_N.tolist()))
        return nll(current_N, old_N, batch)


def test_in_a_single_step_the_old_policy_is_the_current_one(trainer, batch):
    watch = Watch()
    update(trainer(), [Share([batch(ROWS[0]), batch(ROWS[1])], 3)], step=1, objective=watch)
    assert all(current == old for current, old in watch.seen)


def test_every_step_of_a_window_compares_with_the_policy_before_the_first(trainer, batch):
    watch = Watch()
    shares = [Share([batch(ROWS[0]), batch(ROWS[1])], 3), Share([batch(ROWS[1]), batch(ROWS[3])], 2)]
    report = update(trainer(), shares, step=1, objective=watch)
    assert [old for _, old in watch.seen] == [pytest.approx([CHANCE] * n) for n in (2, 1, 1, 1)]
    (first, _), (second, _), (third, _), (fourth, _) = watch.seen
    assert first + second == pytest.approx([CHANCE] * 3)
    assert third[0] > CHANCE + 0.1, "the first step has made the token likelier"
    assert fourth == pytest.approx([CHANCE])
    assert report.loss == pytest.approx(-(4 * CHANCE + third[0]) / 5), "the mean over the tokens of all steps"


def test_a_window_of_two_steps_steps_the_schedule_twice(trainer, batch):
    made = trainer()
    report = update(made, [Share([batch(ROWS[1])], 1), Share([batch(ROWS[1])], 1)], step=1, objective=nll)
    assert report.lr == 0.5
    assert made.schedule.get_last_lr() == [pytest.approx(1 / 3)]


def broken(value, *, at_step=1):
    calls = iter(range(1, 100))

    def objective(current_N, old_N, batch):
        factor = value if next(calls) == at_step else 1.0
        return -current_N * factor, {}

    return objective


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_weights_untouched(trainer, tiny, batch, value):
    made = trainer(optimizer=torch.optim.AdamW(tiny.parameters(), lr=1.0, weight_decay=0.1))
    with torch.no_grad():
        tiny.table.fill_(0.5)
    with pytest.raises(ActorError, match=r"update 7: gradient norm .* loss sum .*not finite, not applied"):
        update(made, [Share([batch(*ROWS)], 6)], step=7, objective=broken(value))
    assert torch.equal(tiny.table, torch.full((5, 5), 0.5))
    assert made.optimizer.state_dict()["state"] == {}
    assert made.schedule.last_epoch == 0


def test_an_infinite_loss_with_a_finite_gradient_is_not_applied_either(trainer, tiny, batch):
    def objective(current_N, old_N, batch):
        return math.inf - current_N, {}

    with pytest.raises(ActorError, match="loss sum inf"):
        update(trainer(), [Share([batch(ROWS[1])], 1)], step=1, objective=objective)
    assert not tiny.table.any()


def test_a_gradient_that_is_not_finite_leaves_the_weights_untouched(trainer, tiny, batch):
    def objective(current_N, old_N, batch):
        return torch.sqrt(current_N - current_N.detach()), {}  # a loss of 0, whose gradient is infinite

    with pytest.raises(ActorError, match=r"loss sum 0\.0"):
        update(trainer(), [Share([batch(ROWS[1])], 1)], step=1, objective=objective)
    assert not tiny.table.any()


def test_a_fault_in_the_second_step_keeps_the_first(trainer, tiny, batch):
    shares = [Share([batch(ROWS[1])], 1), Share([batch(ROWS[3])], 1)]
    with pytest.raises(ActorError):
        update(trainer(), shares, step=1, objective=broken(math.nan, at_step=2))
    assert torch.allclose(tiny.table, gradient_of((1, 2)))


def test_a_window_without_action_tokens_leaves_the_weights_untouched(trainer, tiny, batch):
    made = trainer(optimizer=torch.optim.AdamW(tiny.parameters(), lr=1.0, weight_decay=0.1))
    update(made, [Share([batch(*ROWS)], 6)], step=1, objective=nll)
    before = tiny.table.detach().clone()
    report = update(made, [Share([batch(([1, 2], [0, 0]))], 0)], step=2, objective=nll)
    assert torch.equal(tiny.table, before), "neither momentum nor weight decay moves them"
    assert (report.step, report.loss, report.grad_norm, report.metrics) == (2, 0.0, 0.0, {})
    assert made.schedule.last_epoch == 1


def test_a_step_without_action_tokens_is_passed_over_and_the_others_are_made(trainer, tiny, batch):
    shares = [Share([batch(([1, 2], [0, 0]))], 0), Share([batch(ROWS[1])], 1)]
    update(trainer(), shares, step=1, objective=nll)
    assert torch.allclose(tiny.table, gradient_of((1, 2)))


def test_a_rank_without_rows_of_its_own_makes_its_backward_pass_all_the_same(trainer, tiny, batch):
    report = update(trainer(), [Share([batch()], 6)], step=1, objective=nll)
    assert tiny.table.grad is not None, "every rank's collectives are alike"
    assert not tiny.table.any()
    assert (report.loss, report.grad_norm) == (0.0, 0.0)
