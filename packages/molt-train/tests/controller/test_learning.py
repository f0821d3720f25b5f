"""From the groups of a window to what the actor is given: every number by hand."""

import numpy as np
import pytest

from molt.train.config import ActorConfig, AlgorithmConfig, Config, RewardConfig, RolloutConfig
from molt.train.controller.learning import Learning, with_own_rewards
from molt.train.records.experience import Experience
from molt.train.records.rollout import Group, Outcome, Rollout
from molt.train.records.window import Scores, StepReport
from molt.train.window import plan_of


def group(name, *rewards, kind="completed", num_actions=(2, 1)):
    """One rollout a reward, each of one segment a number of actions."""
    rollouts = []
    for index, reward in enumerate(rewards):
        rollout_id = f"{name}.{index}"
        experiences = [
            Experience(
                segment_id=f"{rollout_id}/{position}",
                rollout_id=rollout_id,
                group_id=name,
                num_tokens=10 * (index + 1) + position,
                num_actions=number,
                oldest_version=0,
                newest_version=0,
                mean_version=0.0,
                payload=None,
            )
            for position, number in enumerate(num_actions)
        ]
        outcome = Outcome(kind=kind, reward=reward)
        rollouts.append(
            Rollout(rollout_id=rollout_id, group_id=name, attempt=1, outcome=outcome, experiences=tuple(experiences))
        )
    return Group(group_id=name, task_id=name, rollouts=tuple(rollouts))


class Actor:
    """Scores a row by its length, so that a row that gets another's scores shows."""

    def __init__(self, *, kl=0.0):
        self.windows, self.kl_coefs, self.num_scored = [], [], 0
        self._kl = kl

    async def score(self, window):
        self.num_scored += 1
        rows = [row for rank in window.ranks for microbatch in rank for row in microbatch.rows]
        scores = []
        for row in rows:
            base = np.full(row.experience.num_actions, -row.experience.num_tokens / 100, np.float32)
            scores.append(Scores(old=base, reference=base - self._kl, teacher=base + 0.5, values=-base))
        return scores

    async def train(self, windows, *, kl_coef):
        self.windows, self.kl_coefs = windows, [*self.kl_coefs, kl_coef]
        return StepReport(
            step=windows[0].step,
            loss=0.0,
            grad_norm=1.0,
            lr=1.0,
            logprob_gap_mean=0.0,
            logprob_gap_max=0.0,
            metrics={"kl_mean": self._kl},
        )

    @property
    def rows(self):
        """By segment."""
        rows = [row for window in self.windows for rank in window.ranks for batch in rank for row in batch.rows]
        return {row.experience.segment_id: row for row in rows}


def learning(actor, *, num_ranks=2, group_size=2, reward=None, **algorithm):
    config = Config(
        algorithm=AlgorithmConfig(**algorithm),
        reward=reward or RewardConfig(),
        rollout=RolloutConfig(group_size=group_size),
        actor=ActorConfig(num_ranks=num_ranks),
    )
    return Learning(config, actor, plan_of(config, hidden_size=64))


async def test_a_rollout_counts_once_and_every_segment_gets_its_advantage():
    actor = Actor()
    await learning(actor, estimator="group_mean").update([group("a", 1.0, 0.0), group("b", 0.5, 0.5)], step=1)
    advantages = {name: row.advantages.tolist() for name, row in actor.rows.items()}
    assert advantages["a.0/0"] == [0.5, 0.5]
    assert advantages["a.0/1"] == [0.5]
    assert advantages["a.1/0"] == [-0.5, -0.5]
    assert advantages["b.0/0"] == [0.0, 0.0]
    assert actor.num_scored == 0
    assert {row.weight for row in actor.rows.values()} == {1 / 12}
    assert sorted({row.rollout for row in actor.rows.values()}) == [0, 1, 2, 3]


async def test_the_divergence_in_the_reward_is_taken_from_every_rollout_before_the_baseline():
    """Three actions of 0.2 nats each at coefficient 0.5 cost every rollout 0.3: no difference within a group."""
    actor = Actor(kl=0.2)
    subject = learning(actor, estimator="reinforce", kl_coef=0.5, kl_placement="reward", group_size=1)
    report = await subject.update([group("a", 1.0)], step=1)
    assert actor.num_scored == 1
    # REINFORCE without discount: each token's return is the reward minus the penalties from it on.
    assert actor.rows["a.0/0"].advantages == pytest.approx([0.7, 0.8])
    assert actor.rows["a.0/1"].advantages == pytest.approx([0.9])
    assert report.metrics["kl_mean"] == pytest.approx(0.2)


async def test_the_divergence_in_the_loss_goes_with_the_rows():
    actor = Actor(kl=0.2)
    await learning(actor, estimator="group_mean", kl_coef=0.5).update([group("a", 1.0, 0.0)], step=1)
    assert actor.rows["a.1/1"].reference == pytest.approx([-0.41])
    assert actor.rows["a.1/1"].advantages.tolist() == [-0.5]
    assert actor.kl_coefs == [0.5]


async def test_the_critics_values_reach_the_estimator_in_the_order_of_the_rows():
    actor = Actor()
    subject = learning(actor, estimator="gae", gamma=0.5, lam=0.0, group_size=1)
    await subject.update([group("a", 1.0), group("b", 0.0)], step=1)
    # Values are 0.10 at the two tokens of the first segment, 0.11 at the one of the second.
    returns = {name: row.returns for name, row in actor.rows.items()}
    assert returns["a.0/0"] == pytest.approx([0.05, 0.055])  # lambda 0: discount times the next value
    assert returns["a.0/1"] == pytest.approx([1.0])
    assert returns["b.0/1"] == pytest.approx([0.0])
    assert actor.rows["a.0/1"].values == pytest.approx([0.11])


async def test_a_teacher_gives_each_token_its_own_advantage():
    actor = Actor()
    subject = learning(actor, estimator="distillation", distillation_coef=2.0, group_size=1)
    await subject.update([group("a", 1.0)], step=1)
    assert actor.rows["a.0/0"].advantages == pytest.approx([1.0, 1.0])


async def test_an_adaptive_coefficient_follows_the_divergence_and_survives_a_resume():
    settings = {"estimator": "group_mean", "kl_coef": 0.1, "kl_target": 0.05, "kl_horizon": 10}
    actor = Actor(kl=0.2)
    subject = learning(actor, **settings)
    report = await subject.update([group("a", 1.0, 0.0)], step=1)
    assert report.metrics["kl_coef"] == 0.1
    # The divergence is far above its target: 20 % more over ten rollouts, of which two were seen.
    assert subject.progress() == {"kl_coef": pytest.approx(0.1 * (1 + 0.2 * 2 / 10))}
    resumed = learning(actor, **settings)
    resumed.restore(subject.progress())
    await resumed.update([group("a", 1.0, 0.0)], step=2)
    assert actor.kl_coefs == [0.1, pytest.approx(0.104)]


def test_rewards_are_shaped_for_learning_and_reported_as_they_were():
    subject = learning(Actor(), reward=RewardConfig(clip_high=1.0, truncated="zero"))
    groups = [group("a", 5.0, 1.0), group("b", 1.0, 1.0, kind="truncated")]
    kept = subject.usable(groups)
    assert [[r.outcome.reward for r in g.rollouts] for g in kept] == [[1.0, 1.0], [0.0, 0.0]]
    given = with_own_rewards(kept, groups)
    assert [[r.outcome.reward for r in g.rollouts] for g in given] == [[5.0, 1.0], [1.0, 1.0]]


async def test_the_optimizer_steps_of_a_window_share_its_baseline():
    actor = Actor()
    subject = learning(actor, estimator="batch_mean", updates_per_window=2, group_size=1)
    await subject.update([group("a", 1.0), group("b", 0.0)], step=1)
    assert len(actor.windows) == 2
    assert actor.rows["a.0/0"].advantages.tolist() == [0.5, 0.5]
    assert {row.weight for row in actor.rows.values()} == {1 / 3}
