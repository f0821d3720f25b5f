"""What the weights before a window say of it, and the update that follows: a table of logits, numbers by hand."""

import math

import numpy as np
import pytest
import torch

from molt.train.actor import policy_update
from molt.train.actor.batch import collate
from molt.train.actor.policy_update import update_policy
from molt.train.actor.step import Share, Trainer
from molt.train.config import AlgorithmConfig

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
CHANCE = -math.log(5)
PLAIN = AlgorithmConfig(loss="policy_gradient", correction="none")


@pytest.fixture
def trainer(tiny, policy_of):
    def make(*, temperature=1.0):
        optimizer = torch.optim.SGD(tiny.parameters(), lr=1.0)
        return Trainer(
            policy=policy_of(tiny),
            optimizer=optimizer,
            schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
            max_grad_norm=1e9,
            temperature=temperature,
        )

    return make


@pytest.fixture
def batch(make_payload, row_of):
    """Rows of (tokens, actions), each a dict of what `row_of` takes, `logprobs` of the recording beside them."""

    def make(*rows):
        pairs = []
        for (tokens, actions), given in rows:
            given = dict(given)
            payload = make_payload(tokens, actions, given.pop("logprobs", None))
            pairs.append((payload, row_of(payload, **given)))
        return collate(pairs, device=CPU, layout="padded")

    return make


def update(made, shares, algorithm=PLAIN, **options):
    return update_policy(made, shares, step=1, algorithm=algorithm, kl_coef=algorithm.kl_coef, **options)


@pytest.fixture
def seen(monkeypatch):
    """The inputs of every loss that is computed."""
    inputs = []
    original = policy_update.policy_loss

    def keep(given, **options):
        inputs.append(given)
        return original(given, **options)

    monkeypatch.setattr(policy_update, "policy_loss", keep)
    return inputs


ONE = (([1, 2], [0, 1]), {"advantages": [1.0]})


def test_in_a_single_step_the_old_policy_is_the_current_one(trainer, batch, seen):
    update(trainer(), [Share([batch(ONE), batch(ONE)], 2, 1)])
    assert all(torch.equal(given.old_N, given.current_N.detach()) for given in seen)
    assert len(seen) == 2


def test_every_step_of_a_window_compares_with_the_policy_before_the_first(trainer, batch, seen):
    update(trainer(), [Share([batch(ONE)], 1, 1), Share([batch(ONE)], 1, 1)])
    first, second = seen
    assert first.old_N.tolist() == second.old_N.tolist() == [pytest.approx(CHANCE)]
    assert float(second.current_N.detach()) > CHANCE + 0.1, "the first step has made the token likelier"


def test_old_and_current_log_probs_are_those_of_the_temperature(trainer, tiny, batch, seen):
    with torch.no_grad():
        tiny.table[1] = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    update(trainer(temperature=0.5), [Share([batch(ONE)], 1, 1), Share([batch(ONE)], 1, 1)])
    expected = 4.0 - math.log(sum(math.exp(logit) for logit in (0.0, 2.0, 4.0, 6.0, 8.0)))
    assert seen[0].current_N.detach().tolist() == [pytest.approx(expected)]
    assert seen[0].old_N.tolist() == [pytest.approx(expected)]


def test_the_gap_is_between_the_recorded_log_probs_and_those_before_the_update(trainer, batch):
    row = (([1, 2, 3], [0, 1, 1]), {"advantages": [1.0, 1.0], "logprobs": [0.0, CHANCE + 0.5, CHANCE - 0.25]})
    report = update(trainer(), [Share([batch(row)], 2, 1)])
    assert report.logprob_gap_mean == pytest.approx(0.375, abs=1e-6)
    assert report.logprob_gap_max == pytest.approx(0.5, abs=1e-6)
    assert report.metrics["logprob_mean"] == pytest.approx(CHANCE)


def test_a_gate_decides_on_all_segments_of_a_rollout_wherever_they_lie(trainer, tiny, batch):
    """Two segments in two microbatches: one is exactly on-policy, the other far off, and together they are too far."""
    near = (([1, 2], [0, 1]), {"advantages": [1.0], "rollout": 0})
    far = (([3, 4], [0, 1]), {"advantages": [1.0], "rollout": 0, "logprobs": [0.0, CHANCE + 1.5]})
    other = (([2, 2], [0, 1]), {"advantages": [1.0], "rollout": 1})
    algorithm = AlgorithmConfig(loss="policy_gradient", correction="flash", gate_high=0.1)
    report = update(trainer(), [Share([batch(near), batch(far, other)], 3, 2)], algorithm)
    moved = {before for before in range(5) if tiny.table[before].abs().sum() > 0}
    assert moved == {2}, "only the other rollout trains"
    assert report.metrics["gate_filtered"] == pytest.approx(2 / 3)


def test_rejected_tokens_leave_no_mark_on_the_denominator(trainer, tiny, batch):
    rows = [
        (([2, 2], [0, 1]), {"advantages": [1.0], "rollout": 1, "weight": 0.25}),
        (([3, 4], [0, 1]), {"advantages": [1.0], "rollout": 0, "weight": 0.25, "logprobs": [0.0, CHANCE + 3]}),
    ]
    update(trainer(), [Share([batch(*rows)], 2, 2)], AlgorithmConfig(loss="policy_gradient", correction="icepop"))
    assert float(tiny.table[2, 2].detach()) == pytest.approx(0.8 * 0.25)
    assert not tiny.table[3].any()


def test_the_effective_sample_size_is_reported_as_a_share_of_the_tokens(trainer, batch):
    rows = [
        (([2, 2], [0, 1]), {"advantages": [1.0]}),
        (([3, 4], [0, 1]), {"advantages": [1.0], "logprobs": [0.0, CHANCE - math.log(2)]}),
    ]
    report = update(trainer(), [Share([batch(*rows)], 2, 1)], AlgorithmConfig(loss="policy_gradient"))
    # Weights 1 and 2: (1 + 2)^2 / (2 * (1 + 4)).
    assert report.metrics["effective_sample_size"] == pytest.approx(0.9)


def test_the_divergence_in_the_loss_pulls_towards_the_reference(trainer, tiny, batch):
    row = (([1, 2], [0, 1]), {"advantages": [0.0], "reference": [CHANCE - 1.0]})
    algorithm = AlgorithmConfig(loss="policy_gradient", correction="none", kl_coef=0.5)
    report = update(trainer(), [Share([batch(row)], 1, 1)], algorithm)
    # k2 has the gradient (current - reference) = 1, times the gradient of the log-prob; one step of rate 1.
    assert float(tiny.table[1, 2].detach()) == pytest.approx(-0.5 * 0.8)
    assert report.metrics["kl_mean"] == pytest.approx(1.0)


def test_the_entropy_bonus_flattens(trainer, tiny, batch):
    with torch.no_grad():
        tiny.table[1] = torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0])
    before = _entropy(tiny.table[1])
    row = (([1, 2], [0, 1]), {"advantages": [0.0]})
    report = update(trainer(), [Share([batch(row)], 1, 1)], AlgorithmConfig(correction="none", entropy_coef=0.5))
    assert report.metrics["entropy_mean"] == pytest.approx(before, abs=1e-5)
    assert _entropy(tiny.table[1]) > before + 0.05


def test_no_action_token_at_all_is_an_update_that_changes_nothing(trainer, tiny, batch):
    report = update(trainer(), [Share([batch()], 0, 0)])
    assert not tiny.table.any()
    assert (report.loss, report.grad_norm, report.logprob_gap_max) == (0.0, 0.0, 0.0)


def _entropy(logits):
    p = np.exp(np.asarray(logits.detach()))
    p = p / p.sum()
    return float(-(p * np.log(p)).sum())
