"""What a rank makes of its share of a window: payloads reloaded, the objective of the run, a report."""

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from molt.train.actor.model import Policy
from molt.train.actor.rank import ActorRank
from molt.train.actor.setup import RankSetup
from molt.train.actor.step import Trainer
from molt.train.config import ActorConfig, AlgorithmConfig
from molt.train.experience import LocalPayloadStore
from molt.train.records.experience import Experience
from molt.train.records.window import Microbatch, RankWindow, Row

pytestmark = pytest.mark.usefixtures("process_group")

SETUP = RankSetup(
    rank=0,
    world_size=1,
    model_path="m",
    actor=ActorConfig(),
    algorithm=AlgorithmConfig(correction="tis", correction_high=2.0),
    temperature=1.0,
    num_steps=1,
    seed=0,
    collective_timeout_s=60.0,
)


@pytest.fixture
def rank(tiny):
    rank = ActorRank(SETUP, LocalPayloadStore())
    optimizer = torch.optim.SGD(tiny.parameters(), lr=1.0)
    policy = Policy(
        model=tiny,
        device=torch.device("cpu"),
        mesh=SimpleNamespace(device_mesh=None, moe_mesh=None),
        compute_dtype=torch.float32,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    # What `start` makes of a checkpoint.
    rank._trainer = Trainer(policy, optimizer, schedule, max_grad_norm=1e9, temperature=1.0)
    return rank


@pytest.fixture
def window(make_payload):
    def make(*rows):
        """One microbatch; `rows` are (tokens, actions, advantages of the actions, recorded log-probs)."""
        made = []
        for tokens, actions, advantages, logprobs in rows:
            payload = make_payload(tokens, actions, logprobs)
            experience = Experience(
                segment_id="s",
                rollout_id="r",
                group_id="g",
                num_tokens=len(tokens),
                num_actions=sum(actions),
                oldest_version=0,
                newest_version=0,
                mean_version=0.0,
                payload=payload,
            )
            made.append(Row(experience=experience, advantages=np.asarray(advantages, np.float32)))
        return RankWindow(
            microbatches=(Microbatch(rows=tuple(made)), Microbatch(rows=())),
            num_action_tokens=sum(row.experience.num_actions for row in made),
        )

    return make


def test_what_paid_off_becomes_likelier_and_what_did_not_less_likely(rank, tiny, window):
    report = rank.train([window(([1, 2], [0, 1], [1.0], None), ([3, 4], [0, 1], [-1.0], None))], step=4)
    step = torch.full((5,), -0.1)
    up, down = step.clone(), -step
    up[2] += 0.5
    down[4] -= 0.5
    assert torch.allclose(tiny.table[1], up)
    assert torch.allclose(tiny.table[3], down)
    assert (report.step, report.metrics["ratio_mean"], report.metrics["clip_fraction"]) == (4, 1.0, 0.0)


def test_the_correction_weighs_tokens_by_what_the_recorded_policy_thought_of_them(rank, tiny, window):
    unlikely = [0.0, math.log(0.05)]  # rho = 0.2 / 0.05 = 4, truncated to 2
    likely = [0.0, math.log(0.4)]  # rho = 0.5
    report = rank.train([window(([1, 2], [0, 1], [1.0], unlikely), ([3, 4], [0, 1], [1.0], likely))], step=1)
    assert tiny.table[1, 2].item() == pytest.approx(2.0 * 0.8 / 2)
    assert tiny.table[3, 4].item() == pytest.approx(0.5 * 0.8 / 2, abs=1e-6)
    assert report.metrics["rho_mean"] == pytest.approx(2.25, abs=1e-5)
    assert report.metrics["correction_filtered"] == 0.5


def test_the_supervised_objective_ignores_advantages_and_recorded_log_probs(rank, tiny, window):
    report = rank.train_supervised([window(([1, 2], [0, 1], [-7.0], [0.0, -9.0]))], step=1)
    assert tiny.table[1, 2].item() == pytest.approx(0.8)
    assert report.loss == pytest.approx(math.log(5))


def test_a_second_step_is_clipped_by_the_distance_from_the_policy_before_the_window(rank, window):
    clipped = msgspec.structs.replace(SETUP, algorithm=msgspec.structs.replace(SETUP.algorithm, clip_high=0.1))
    rank._setup = clipped
    same = window(([1, 2], [0, 1], [1.0], None))
    report = rank.train([same, same], step=1)
    # The first step raises p(2 | 1) from 0.2 to e^0.8 / (e^0.8 + 4 e^-0.2) = 0.405, a ratio above 1.1.
    assert report.metrics["clip_fraction"] == 0.5
    assert report.metrics["ratio_mean"] == pytest.approx((1 + 0.4046 / 0.2) / 2, abs=1e-3)


def test_weights_cannot_be_sent_before_there_is_anyone_to_send_them_to(rank):
    with pytest.raises(RuntimeError, match="refit before connect"):
        rank.refit(1)
