"""What a rank makes of its share of a window: payloads reloaded, the models of the run, the objective, a report."""

import math

import msgspec
import numpy as np
import pytest
import torch

from molt.train.actor import frozen, value_model
from molt.train.actor import rank as module
from molt.train.actor.rank import ActorRank, CriticRank
from molt.train.actor.setup import RankSetup
from molt.train.config import ActorConfig, AlgorithmConfig, CriticConfig, OptimizerConfig
from molt.train.errors import PayloadLostError
from molt.train.experience import LocalPayloadStore
from molt.train.records.refit import Interrupted, RefitReport
from molt.train.records.window import Microbatch, RankWindow

pytestmark = pytest.mark.usefixtures("process_group")

CHANCE = -math.log(5)
FREE = OptimizerConfig(max_grad_norm=1e9)
SETUP = RankSetup(
    rank=0,
    world_size=1,
    model_path="policy",
    actor=ActorConfig(optimizer=FREE),
    algorithm=AlgorithmConfig(correction="tis", correction_high=2.0),
    critic=CriticConfig(optimizer=FREE),
    temperature=1.0,
    num_steps=1,
    seed=0,
    collective_timeout_s=60.0,
)
PPO = AlgorithmConfig(estimator="gae")


@pytest.fixture
def models(tiny, monkeypatch, policy_of):
    """By path, what there is to load; every optimizer is SGD with learning rate 1."""
    found = {"policy": tiny, "critic": type(tiny)(), "reference": type(tiny)(), "teacher": type(tiny)()}

    def load_policy(path, settings):
        return policy_of(found[path])

    for where in (module, frozen, value_model):
        monkeypatch.setattr(where, "load_policy", load_policy)
    monkeypatch.setattr(module, "shape_of", lambda model: "shape")
    monkeypatch.setattr(module, "make_optimizer", lambda model, settings: torch.optim.SGD(model.parameters(), lr=1.0))
    monkeypatch.setattr(module.torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    return found


@pytest.fixture
def start(models):
    def make(cls=ActorRank, **changes):
        made = cls(msgspec.structs.replace(SETUP, **changes), LocalPayloadStore())
        made.shapes = made.start("tcp://nowhere:0")
        return made

    return make


@pytest.fixture
def row(make_payload, row_of):
    def make(tokens, actions, advantages, logprobs=None, **others):
        return row_of(make_payload(tokens, actions, logprobs), advantages=advantages, **others)

    return make


def window(*microbatches, num_rollouts=8):
    """Microbatches of rows, and an empty one."""
    return RankWindow(
        microbatches=(*(Microbatch(rows=tuple(rows)) for rows in microbatches), Microbatch(rows=())),
        num_action_tokens=sum(row.experience.num_actions for rows in microbatches for row in rows),
        num_rollouts=num_rollouts,
    )


def test_what_paid_off_becomes_likelier_and_what_did_not_less_likely(start, tiny, row):
    good, bad = row([1, 2], [0, 1], [1.0], weight=0.5), row([3, 4], [0, 1], [-1.0], weight=0.5)
    report = start().train([window([good, bad])], step=4, kl_coef=0.0)
    step = torch.full((5,), -0.1)
    up, down = step.clone(), -step
    up[2] += 0.5
    down[4] -= 0.5
    assert torch.allclose(tiny.table[1], up)
    assert torch.allclose(tiny.table[3], down)
    assert (report.step, report.metrics["ratio_mean"], report.metrics["clip_fraction"]) == (4, 1.0, 0.0)


def test_the_correction_weighs_tokens_by_what_the_recorded_policy_thought_of_them(start, tiny, row):
    unlikely = [0.0, math.log(0.05)]  # rho = 0.2 / 0.05 = 4, truncated to 2
    likely = [0.0, math.log(0.4)]  # rho = 0.5
    rows = [row([1, 2], [0, 1], [1.0], unlikely, weight=0.5), row([3, 4], [0, 1], [1.0], likely, weight=0.5)]
    report = start().train([window(rows)], step=1, kl_coef=0.0)
    assert tiny.table[1, 2].item() == pytest.approx(2.0 * 0.8 / 2)
    assert tiny.table[3, 4].item() == pytest.approx(0.5 * 0.8 / 2, abs=1e-6)
    assert report.metrics["rho_mean"] == pytest.approx(2.25, abs=1e-5)
    assert report.metrics["correction_filtered"] == 0.5


def test_a_second_step_is_clipped_by_the_distance_from_the_policy_before_the_window(start, row):
    clipped = msgspec.structs.replace(SETUP.algorithm, clip_high=0.1)
    same = window([row([1, 2], [0, 1], [1.0])])
    report = start(algorithm=clipped).train([same, same], step=1, kl_coef=0.0)
    # The first step raises p(2 | 1) from 0.2 to e^0.8 / (e^0.8 + 4 e^-0.2) = 0.405, a ratio above 1.1.
    assert report.metrics["clip_fraction"] == 0.5
    assert report.metrics["ratio_mean"] == pytest.approx((1 + 0.4046 / 0.2) / 2, abs=1e-3)


def test_the_weight_of_the_divergence_is_the_callers(start, models, row):
    with torch.no_grad():
        models["reference"].table[1] = torch.tensor([0.0, 0.0, math.log(4.0), 0.0, 0.0])  # p(2 | 1) = 1/2, else 1/8
    setup = {"algorithm": AlgorithmConfig(kl_coef=0.1, reference_path="reference")}
    reference = start(**setup).score(window([row([1, 2], [0, 1], [0.0])]))[0].reference
    tables = []
    for kl_coef in (0.0, 2.0):
        models["policy"].lm_head.weight.data.zero_()
        start(**setup).train([window([row([1, 2], [0, 1], [0.0], reference=reference)])], step=1, kl_coef=kl_coef)
        tables.append(models["policy"].table[1, 2].item())
    assert tables[0] == 0.0
    # The gradient of k2 is (l - reference) (onehot - p), and l - reference = log(2/5).
    assert tables[1] == pytest.approx(-2.0 * math.log(0.4) * 0.8, abs=1e-5)


def test_the_supervised_objective_ignores_advantages_and_recorded_log_probs(start, tiny, row):
    report = start().train_supervised([window([row([1, 2], [0, 1], [-7.0], [0.0, -9.0])])], step=1)
    assert tiny.table[1, 2].item() == pytest.approx(0.8)
    assert report.loss == pytest.approx(math.log(5))


def test_the_supervised_objective_weighs_a_row_as_the_window_says(start, tiny, row):
    rows = [row([1, 2], [0, 1], [1.0], weight=0.25), row([3, 4], [0, 1], [1.0], weight=0.75)]
    start().train_supervised([window(rows)], step=1)
    assert tiny.table[1, 2].item() == pytest.approx(0.25 * 0.8)
    assert tiny.table[3, 4].item() == pytest.approx(0.75 * 0.8)


def test_weights_cannot_be_sent_before_there_is_anyone_to_send_them_to(start):
    with pytest.raises(RuntimeError, match="refit before connect"):
        start().refit(1)


class Engines:
    """Stands for what a refit reaches: remembers the versions that were served."""

    def __init__(self, *_, **__):
        self.served = []

    def refit(self, version):
        self.served.append(version)
        return Interrupted(held=1)

    def shutdown(self):
        pass


def test_weights_are_sent_as_the_version_that_they_are_and_not_below_the_one_that_is_wanted(start, row, monkeypatch):
    engines = Engines()
    monkeypatch.setattr(module, "make_refitter", lambda *args, **kwargs: engines)
    rank = start()
    rank.connect({}, client=None, transfer="gloo")
    assert rank.refit(0) == RefitReport(version=0, interrupted=Interrupted(held=1))
    assert rank.refit(1) == RefitReport(version=0, sent=False)
    rank.train([window([row([1, 2], [0, 1], [1.0])])], step=1, kl_coef=0.0)
    assert rank.refit(0).version == 1, "an engine that joins late gets what there is by then, under its own name"
    assert engines.served == [0, 1]


def test_weights_of_an_update_that_failed_half_way_are_of_no_version(start, row, monkeypatch):
    engines = Engines()
    monkeypatch.setattr(module, "make_refitter", lambda *args, **kwargs: engines)
    rank = start()
    rank.connect({}, client=None, transfer="gloo")

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    monkeypatch.setattr(module, "update_policy", fail)
    with pytest.raises(RuntimeError, match="injected"):
        rank.train([window([row([1, 2], [0, 1], [1.0])])], step=1, kl_coef=0.0)
    assert not rank.refit(0).sent
    assert engines.served == []


def test_an_algorithm_without_other_models_has_nothing_to_score(start, row):
    rank = start()
    assert rank.shapes == {"policy": "shape"}
    (score,) = rank.score(window([row([1, 2], [0, 1], [1.0])]))
    assert (score.old, score.reference, score.teacher, score.values) == (None, None, None, None)


def test_scores_come_row_by_row_through_the_microbatches_with_a_number_an_action(start, models, row):
    with torch.no_grad():
        models["policy"].table[1] = torch.tensor([0.0, 0.0, math.log(4.0), 0.0, 0.0])
        models["reference"].table[3] = torch.tensor([0.0, 0.0, 0.0, 0.0, math.log(4.0)])
    kl = AlgorithmConfig(kl_coef=0.1, kl_placement="reward", reference_path="reference")
    rank = start(algorithm=kl)
    assert rank.shapes.keys() == {"policy", "reference"}
    first, second, third = rank.score(
        window(
            [row([1, 2, 3, 0], [0, 1, 0, 1], [0.0, 0.0]), row([3, 4], [0, 1], [0.0])],
            [row([0, 1, 2], [0, 0, 1], [0.0])],
        )
    )
    half, eighth = math.log(1 / 2), math.log(1 / 8)
    assert first.old == pytest.approx([half, CHANCE], abs=1e-6)
    assert first.reference == pytest.approx([CHANCE, eighth], abs=1e-6)
    assert second.old == pytest.approx([CHANCE], abs=1e-6)
    assert second.reference == pytest.approx([half], abs=1e-6)
    assert third.old == pytest.approx([half], abs=1e-6)
    assert {array.dtype for score in (first, second, third) for array in (score.old, score.reference)} == {
        np.dtype(np.float32)
    }
    assert first.teacher is None
    assert first.values is None


def test_the_divergence_in_the_loss_needs_the_reference_alone(start, row):
    rank = start(algorithm=AlgorithmConfig(kl_coef=0.1))
    (score,) = rank.score(window([row([1, 2], [0, 1], [0.0])]))
    assert score.old is None
    assert score.reference == pytest.approx([CHANCE]), "without a path of its own it is what the policy was loaded from"


def test_distillation_scores_with_the_teacher_and_the_policy_at_the_run_s_temperature(start, models, row):
    with torch.no_grad():
        models["teacher"].table[1] = torch.tensor([0.0, 0.0, 2 * math.log(4.0), 0.0, 0.0])
    rank = start(algorithm=AlgorithmConfig(estimator="distillation", teacher_path="teacher"), temperature=2.0)
    (score,) = rank.score(window([row([1, 2], [0, 1], [0.0])]))
    assert score.teacher == pytest.approx([math.log(1 / 2)], abs=1e-6)
    assert score.old == pytest.approx([CHANCE], abs=1e-6)
    assert score.reference is None


def test_frozen_policies_have_no_gradient_no_dropout_and_never_move(start, models, row):
    both = AlgorithmConfig(estimator="distillation", teacher_path="teacher", kl_coef=0.5, reference_path="reference")
    rank = start(algorithm=both)
    scored = window([row([1, 2], [0, 1], [1.0], reference=[CHANCE])])
    before = rank.score(scored)
    rank.train([scored], step=1, kl_coef=0.5)
    after = rank.score(scored)
    assert before[0].old != after[0].old
    for name in ("reference", "teacher"):
        assert not models[name].training
        assert not any(p.requires_grad for p in models[name].parameters())
        assert getattr(before[0], name) == getattr(after[0], name)


def test_a_colocated_critic_gives_values_and_learns_with_the_policy(start, models, row):
    rank = start(algorithm=PPO, critic=CriticConfig(path="critic", optimizer=FREE))
    assert rank.shapes.keys() == {"policy", "critic"}
    unknown = window([row([1, 2, 3], [0, 1, 1], [0.0, 0.0])])
    assert rank.score(unknown)[0].values.tolist() == [0.0, 0.0], "what nothing is known of is worth 0"
    trained = [row([1, 2], [0, 1], [1.0], values=[0.0], returns=[1.0])]
    report = rank.train([window(trained)], step=1, kl_coef=0.0)
    assert report.metrics["value_loss"] == pytest.approx(0.5)
    assert report.metrics["critic_grad_norm"] == pytest.approx(math.sqrt(2))
    assert report.metrics["ratio_mean"] == 1.0
    assert models["policy"].table[1, 2].item() == pytest.approx(0.8)
    # The value of the state after token 1 moves by 1 through its own weight and by 1 through the bias.
    assert rank.score(unknown)[0].values == pytest.approx([2.0, 1.0])


def test_the_trunk_of_the_critic_is_loaded_from_where_it_is_said_to_be(start, models):
    start(algorithm=PPO, critic=CriticConfig(path="critic", optimizer=FREE))
    assert isinstance(models["critic"].lm_head, value_model.ValueHead)
    assert not isinstance(models["policy"].lm_head, value_model.ValueHead)
    assert SETUP.critic_path == "policy", "left out, it is the policy's"


@pytest.mark.parametrize(("step", "moves"), [(1, False), (2, False), (3, True)])
def test_while_the_critic_warms_up_the_policy_stays_as_it_is(start, models, row, step, moves):
    critic = CriticConfig(path="critic", warmup_updates=2, optimizer=FREE)
    rank = start(algorithm=PPO, critic=critic)
    recorded = [0.0, CHANCE - 0.25]
    trained = window([row([1, 2], [0, 1], [1.0], recorded, values=[0.0], returns=[1.0])])
    report = rank.train([trained], step=step, kl_coef=0.0)
    assert bool(models["policy"].table.any()) is moves
    assert models["critic"].lm_head.weight[0, 1].item() == pytest.approx(1.0), "the critic learns all along"
    assert (report.lr, report.grad_norm > 0) == (1.0 if moves else 0.0, moves)
    assert report.logprob_gap_mean == pytest.approx(0.25)
    assert report.logprob_gap_max == pytest.approx(0.25)
    assert report.metrics["value_loss"] == pytest.approx(0.5)


def test_warming_up_takes_no_step_from_the_schedule_of_the_policy():
    setup = msgspec.structs.replace(
        SETUP,
        algorithm=AlgorithmConfig(estimator="gae", updates_per_window=4),
        critic=CriticConfig(warmup_updates=3),
        num_steps=40,
    )
    assert setup.num_policy_steps == 28
    assert msgspec.structs.replace(setup, algorithm=AlgorithmConfig()).num_policy_steps == 40


def test_a_critic_of_its_own_leaves_the_actor_without_one_and_does_its_part(start, models, row):
    own = CriticConfig(path="critic", placement="own", optimizer=FREE)
    actor, critic = start(algorithm=PPO, critic=own), start(CriticRank, algorithm=PPO, critic=own, role="critic")
    assert (actor.shapes.keys(), critic.shapes.keys()) == ({"policy"}, {"critic"})
    trained = window([row([1, 2], [0, 1], [1.0], values=[0.0], returns=[1.0])])
    assert actor.score(trained)[0].values is None
    assert critic.score(trained)[0].values == pytest.approx([0.0])
    assert "value_loss" not in actor.train([trained], step=1, kl_coef=0.0).metrics
    assert critic.train([trained], step=1)["value_loss"] == pytest.approx(0.5)
    assert critic.score(trained)[0].values == pytest.approx([2.0])


@pytest.mark.parametrize("placement", ["colocated", "own"])
def test_policy_and_critic_come_back_from_a_checkpoint_with_the_controller_s_progress(
    start, models, row, tmp_path, monkeypatch, placement
):
    monkeypatch.setattr(module.checkpoint, "export", lambda trainer, folder, source: folder.mkdir())
    setup = {"algorithm": PPO, "critic": CriticConfig(path="critic", placement=placement, optimizer=FREE)}
    trained = window([row([1, 2], [0, 1], [1.0], values=[0.0], returns=[1.0])])
    actor = start(**setup)
    critic = start(CriticRank, role="critic", **setup) if placement == "own" else actor
    actor.train([trained], step=1, kl_coef=0.0)
    if placement == "own":
        critic.train([trained], step=1)
        critic.save(str(tmp_path), step=1)
    actor.save(str(tmp_path), step=1, progress={"kl_coef": 0.25})
    tables = [models["policy"].table.clone(), models["critic"].lm_head.weight.clone()]
    actor.train([trained], step=2, kl_coef=0.0)
    if placement == "own":
        critic.load(str(tmp_path))
    assert actor.load(str(tmp_path)) == (1, {"kl_coef": 0.25})
    assert torch.equal(models["policy"].table, tables[0])
    assert torch.equal(models["critic"].lm_head.weight, tables[1])
    assert tables[1].any()


class CountingStore(LocalPayloadStore):
    """Counts what is fetched; `lost` payloads are gone."""

    def __init__(self):
        self.num_fetched, self.is_lost = 0, False

    def get(self, ref):
        if self.is_lost:
            raise PayloadLostError("gone")
        self.num_fetched += 1
        return super().get(ref)


def test_a_rank_fetches_a_payload_once_a_window_and_keeps_none_afterwards(models, row):
    store = CountingStore()
    rank = ActorRank(SETUP, store)
    rank.start("tcp://nowhere:0")
    first, second = (window([row([1, 2], [0, 1], [1.0], name=name)]) for name in "ab")
    rank.reload([first])
    rank.score(first)
    rank.reload([first, second])
    rank.train([first, second], step=1, kl_coef=0.0)
    assert store.num_fetched == 2
    rank.reload([first])
    assert store.num_fetched == 3


def test_a_payload_that_is_gone_is_found_out_before_anything_is_trained(models, tiny, row):
    store = CountingStore()
    rank = ActorRank(SETUP, store)
    rank.start("tcp://nowhere:0")
    before, store.is_lost = tiny.table.clone(), True
    with pytest.raises(PayloadLostError, match="gone"):
        rank.reload([window([row([1, 2], [0, 1], [1.0])])])
    assert torch.equal(tiny.table, before)
