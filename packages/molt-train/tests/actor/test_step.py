"""Optimizer steps of a policy that is a table of logits: every number below is worked out by hand.

At the start all five tokens have probability 1/5 after any token. The gradient of -log p(target) with respect to the
logits is p - onehot(target): -4/5 for the target and 1/5 for the others.
"""

import itertools
import math

import pytest
import torch

from molt.train.actor.batch import collate
from molt.train.actor.head import action_logprobs
from molt.train.actor.policy_update import report
from molt.train.actor.step import Share, Trainer, optimise
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


def logprobs(made, batch):
    return action_logprobs(made.policy, batch, temperature=made.temperature, chunk_size=2, with_entropy=False)[0]


def nll(made):
    """Maximum likelihood, so that gradients can be worked out by hand."""

    def loss_of(batch, share, position):
        return -logprobs(made, batch), {"chosen": batch.advantages_N.sum(), "largest_max": batch.targets_N.max()}

    return loss_of


@pytest.fixture
def trainer(tiny, policy_of):
    def make(*, optimizer=None, max_grad_norm=1e9, temperature=1.0):
        optimizer = optimizer or torch.optim.SGD(tiny.parameters(), lr=1.0)
        return Trainer(
            policy=policy_of(tiny),
            optimizer=optimizer,
            schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
            max_grad_norm=max_grad_norm,
            temperature=temperature,
        )

    return make


@pytest.fixture
def batch(make_payload, row_of):
    """Rows whose action tokens count 1 / `of` each."""

    def make(*rows, of=6, names=()):
        payloads = [make_payload(tokens, actions) for tokens, actions in rows]
        names = names or [f"r{index}" for index in range(len(rows))]
        pairs = [
            (payload, row_of(payload, weight=1 / of, name=name, advantages=[1.0] * int(payload.action_mask.sum())))
            for payload, name in zip(payloads, names, strict=True)
        ]
        return collate(pairs, device=CPU, layout="padded")

    return make


def share(*batches, num=6):
    return Share(list(batches), num, 4)


def gradient_of(*pairs):
    """Minus the summed gradient of -log p over (token before, target) pairs, at the start."""
    step = torch.zeros(5, 5)
    for before, target in pairs:
        step[before] -= 0.2
        step[before, target] += 1.0
    return step


PAIRS = [(1, 2), (2, 3), (1, 2), (0, 1), (1, 2), (3, 3)]
"""What the actions of `ROWS` are sampled after, and what they are."""


def test_a_step_sums_what_every_token_counts(trainer, tiny, batch):
    made = trainer()
    totals = optimise(made, [share(batch(*ROWS))], step=1, loss_of=nll(made))
    assert torch.allclose(tiny.table, gradient_of(*PAIRS) / 6)
    assert totals.losses == [pytest.approx(-CHANCE)]
    assert totals.lr == 1.0


@pytest.mark.parametrize("cut", [[1, 3], [2, 2], [1, 1, 1, 1]])
def test_a_step_does_not_depend_on_the_cut_into_microbatches(trainer, tiny, batch, cut):
    rows, made = iter(ROWS), trainer()
    microbatches = [batch(*itertools.islice(rows, size)) for size in cut]
    totals = optimise(made, [share(*microbatches)], step=1, loss_of=nll(made))
    assert torch.allclose(tiny.table, gradient_of(*PAIRS) / 6, atol=1e-7)
    assert totals.losses == [pytest.approx(-CHANCE)]
    assert totals.means(6)["chosen"] == pytest.approx(1.0)


def test_a_microbatch_without_rows_changes_nothing(trainer, tiny, batch):
    made = trainer()
    steps = [share(batch(*ROWS), batch())]
    totals = optimise(made, steps, step=1, loss_of=lambda b, i, j: (-logprobs(made, b), {}))
    assert torch.allclose(tiny.table, gradient_of(*PAIRS) / 6)
    assert totals.losses == [pytest.approx(-CHANCE)]


def test_a_name_that_ends_in_max_is_the_largest_of_all_microbatches(trainer, batch):
    made = trainer()
    totals = optimise(made, [share(batch(ROWS[2]), batch(ROWS[3]))], step=1, loss_of=nll(made))
    assert totals.means(3)["largest_max"] == 3.0


def test_the_weights_carry_the_denominator_of_all_ranks(trainer, tiny, batch):
    made = trainer()
    optimise(made, [share(batch(*ROWS, of=24), num=24)], step=1, loss_of=nll(made))
    assert torch.allclose(tiny.table, gradient_of(*PAIRS) / 24)


def test_the_gradient_is_clipped_to_its_bound_and_reported_as_it_was(trainer, tiny, batch):
    made = trainer(max_grad_norm=0.01)
    totals = optimise(made, [share(batch(ROWS[1], of=1), num=1)], step=1, loss_of=nll(made))
    norm = math.sqrt(0.8**2 + 4 * 0.2**2)
    assert totals.grad_norms == [pytest.approx(norm)]
    assert torch.allclose(tiny.table, gradient_of((1, 2)) * 0.01 / norm, atol=1e-6)


def test_the_log_probs_are_those_of_the_temperature(trainer, tiny, batch):
    with torch.no_grad():
        tiny.table[1] = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    found = logprobs(trainer(temperature=0.5), batch(([1, 2], [0, 1])))
    logits = [0.0, 2.0, 4.0, 6.0, 8.0]
    assert found.tolist() == pytest.approx([4.0 - math.log(sum(map(math.exp, logits)))])


def test_a_window_of_two_steps_steps_the_schedule_twice(trainer, batch):
    made = trainer()
    steps = [share(batch(ROWS[1], of=1), num=1), share(batch(ROWS[1], of=1), num=1)]
    totals = optimise(made, steps, step=1, loss_of=nll(made))
    assert totals.lr == 0.5
    assert made.schedule.get_last_lr() == [pytest.approx(1 / 3)]


def broken(made, value, *, at_step=0):
    def loss_of(batch, share, position):
        return -logprobs(made, batch) * (value if share == at_step else 1.0), {}

    return loss_of


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_weights_untouched(trainer, tiny, batch, value):
    made = trainer(optimizer=torch.optim.AdamW(tiny.parameters(), lr=1.0, weight_decay=0.1))
    with torch.no_grad():
        tiny.table.fill_(0.5)
    with pytest.raises(ActorError, match=r"update 7: the loss is (nan|inf): not applied. Of rollouts r0, r1, r2, r3"):
        optimise(made, [share(batch(*ROWS))], step=7, loss_of=broken(made, value))
    assert torch.equal(tiny.table, torch.full((5, 5), 0.5))
    assert made.optimizer.state_dict()["state"] == {}
    assert made.schedule.last_epoch == 0


def test_only_the_rollouts_of_a_broken_loss_are_named(trainer, tiny, batch):
    made = trainer()

    def loss_of(microbatch, index, position):
        loss_N = -logprobs(made, microbatch)
        return torch.where(microbatch.targets_N == 1, math.nan, loss_N), {}

    microbatches = [batch(*ROWS[:2], names=("first", "second")), batch(*ROWS[2:], names=("third", "fourth"))]
    with pytest.raises(ActorError, match=r"Of rollouts third$"):
        optimise(made, [share(*microbatches)], step=1, loss_of=loss_of)
    assert not tiny.table.any()


def test_an_infinite_loss_with_a_finite_gradient_is_not_applied_either(trainer, tiny, batch):
    made = trainer()
    with pytest.raises(ActorError, match="the loss is inf"):
        optimise(made, [share(batch(ROWS[1]))], step=1, loss_of=lambda b, i, j: (math.inf - logprobs(made, b), {}))
    assert not tiny.table.any()


def test_a_gradient_that_is_not_finite_leaves_the_weights_untouched_and_names_the_microbatch(trainer, tiny, batch):
    made = trainer()

    def loss_of(microbatch, index, position):
        current_N = logprobs(made, microbatch)
        if position == 0:
            return -current_N, {}
        return torch.sqrt(current_N - current_N.detach()), {}  # a loss of 0, whose gradient is infinite

    microbatches = [batch(ROWS[0], names=("first",)), batch(ROWS[1], names=("second",))]
    with pytest.raises(ActorError, match=r"gradient norm is .*Of rollouts second$"):
        optimise(made, [share(*microbatches)], step=1, loss_of=loss_of)
    assert not tiny.table.any()


def test_a_fault_in_the_second_step_keeps_the_first(trainer, tiny, batch):
    made = trainer()
    steps = [share(batch(ROWS[1], of=1), num=1), share(batch(ROWS[3], of=1), num=1)]
    with pytest.raises(ActorError):
        optimise(made, steps, step=1, loss_of=broken(made, math.nan, at_step=1))
    assert torch.allclose(tiny.table, gradient_of((1, 2)))


def test_a_window_without_action_tokens_leaves_the_weights_untouched(trainer, tiny, batch):
    made = trainer(optimizer=torch.optim.AdamW(tiny.parameters(), lr=1.0, weight_decay=0.1))
    optimise(made, [share(batch(*ROWS))], step=1, loss_of=nll(made))
    before = tiny.table.detach().clone()
    totals = optimise(made, [share(batch(([1, 2], [0, 0])), num=0)], step=2, loss_of=nll(made))
    assert torch.equal(tiny.table, before), "neither momentum nor weight decay moves them"
    made_report = report(totals, step=2, num_action_tokens=0)
    assert (made_report.step, made_report.loss, made_report.grad_norm) == (2, 0.0, 0.0)
    assert made.schedule.last_epoch == 1


def test_a_step_without_action_tokens_is_passed_over_and_the_others_are_made(trainer, tiny, batch):
    made = trainer()
    steps = [share(batch(([1, 2], [0, 0])), num=0), share(batch(ROWS[1], of=1), num=1)]
    optimise(made, steps, step=1, loss_of=nll(made))
    assert torch.allclose(tiny.table, gradient_of((1, 2)))


def test_a_rank_without_rows_of_its_own_makes_its_backward_pass_all_the_same(trainer, tiny, batch):
    made = trainer()
    totals = optimise(made, [share(batch())], step=1, loss_of=lambda b, i, j: (-logprobs(made, b), {}))
    assert tiny.lm_head.weight.grad is not None, "every rank's collectives are alike"
    assert not tiny.table.any()
    assert (totals.losses, totals.grad_norms) == ([0.0], [0.0])
