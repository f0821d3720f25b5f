"""The actor ranks as one, with a stand-in for Ray: every call reaches all of them, and faults have a name."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from ray.exceptions import RayActorError, RayTaskError

from molt.train.actor.setup import RankSetup
from molt.train.cluster import ranks as module
from molt.train.cluster.placement import Placement
from molt.train.cluster.ranks import ActorGroup
from molt.train.cluster.weight_sync import TRANSFER_TIMEOUT_S
from molt.train.config import ActorConfig, AlgorithmConfig, CriticConfig
from molt.train.errors import ActorDeadError, ActorError, PayloadLostError, RunError
from molt.train.experience import LocalPayloadStore
from molt.train.observe.waits import Waits
from molt.train.records.experience import Experience
from molt.train.records.window import Microbatch, Row, Scores, StepReport, TrainWindow

SETUP = RankSetup(
    rank=0,
    world_size=2,
    model_path="m",
    actor=ActorConfig(),
    algorithm=AlgorithmConfig(),
    temperature=1.0,
    num_steps=1,
    seed=0,
    collective_timeout_s=60.0,
)


class Rank:
    """A Ray actor: keeps its calls, answers with its number, or as it is told."""

    def __init__(self, setup):
        self.setup, self.calls, self.fault, self.is_killed = setup, [], None, False
        self.answers = {}
        """By method, what it answers."""
        self.call = SimpleNamespace(remote=self._call)
        self.pid = SimpleNamespace(remote=self._pid)

    async def _call(self, method, *args, **kwargs):
        self.calls.append((method, args, kwargs))
        if self.fault:
            raise self.fault
        if self.fault is False:
            await asyncio.Event().wait()
        return self.answers.get(method, f"{method} on {self.setup.rank}")

    async def _pid(self):
        if self.is_killed:
            raise RayActorError
        return 100 + self.setup.rank


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    made = []

    def start(setup, store):
        made.append(Rank(setup))
        return made[-1]

    remote = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=start))
    monkeypatch.setattr(module.ray, "remote", lambda cls: remote)
    monkeypatch.setattr(module.ray, "kill", lambda rank: setattr(rank, "is_killed", True))
    monkeypatch.setattr(module, "node_address", lambda: ("10.0.0.1", 4711))
    return made


@pytest.fixture
def group():
    return ActorGroup(SETUP, LocalPayloadStore(), placement=Placement(0, 0, "gloo"), timeout_s=5.0)


@pytest.fixture
def group_with_critic():
    """A critic with ranks of its own; they come after those of the policy."""
    setup = msgspec.structs.replace(
        SETUP, algorithm=AlgorithmConfig(estimator="gae"), critic=CriticConfig(placement="own")
    )
    return ActorGroup(setup, LocalPayloadStore(), placement=Placement(0, 0, "gloo"), timeout_s=5.0)


def row(name):
    experience = Experience(
        segment_id=name,
        rollout_id=name,
        group_id="g",
        num_tokens=2,
        num_actions=1,
        oldest_version=0,
        newest_version=0,
        mean_version=0.0,
        payload=None,
    )
    return Row(experience=experience, rollout=0, weight=0.5, advantages=np.ones(1, np.float32))


def train_window(*names):
    """One microbatch of one row for each of two ranks."""
    return TrainWindow(
        step=7,
        policy_version=6,
        ranks=tuple((Microbatch(rows=(row(name),)),) for name in names),
        num_action_tokens=2,
        num_rollouts=1,
    )


def report(**metrics):
    return StepReport(
        step=7, loss=0.0, grad_norm=0.0, lr=0.0, logprob_gap_mean=0.0, logprob_gap_max=0.0, metrics=metrics
    )


def numbers(*values):
    return np.array(values, np.float32)


async def test_every_rank_is_told_its_number_and_where_they_meet(group, ranks):
    assert await group.start() == "start on 0"
    assert [(rank.setup.rank, rank.setup.role) for rank in ranks] == [(0, "actor"), (1, "actor")]
    assert [rank.calls for rank in ranks] == [[("start", ("tcp://10.0.0.1:4711",), {})]] * 2


@pytest.mark.parametrize(
    ("supervised", "method", "also"), [(False, "train", {"kl_coef": 0.25}), (True, "train_supervised", {})]
)
async def test_every_rank_gets_its_share_of_every_step_and_the_denominator_of_all(
    group, ranks, supervised, method, also
):
    windows = [train_window("0a", "0b"), train_window("1a", "1b")]
    assert await group.train(windows, kl_coef=0.25, supervised=supervised) == f"{method} on 0"
    for rank, letter in zip(ranks, "ab", strict=True):
        reload, (called, (shares,), options) = rank.calls
        assert reload == ("reload", (shares,), {})
        assert (called, options) == (method, {"step": 7} | also)
        assert [share.microbatches[0].rows[0].experience.segment_id for share in shares] == [f"0{letter}", f"1{letter}"]
        assert [share.num_action_tokens for share in shares] == [2, 2]


async def test_scores_come_rank_by_rank(group, ranks):
    first, second, third = (Scores(reference=numbers(i)) for i in range(3))
    ranks[0].answers["score"], ranks[1].answers["score"] = [first], [second, third]
    assert await group.score(train_window("a", "b")) == [first, second, third]
    for rank, name in zip(ranks, "ab", strict=True):
        reload, (_, (share,), _) = rank.calls
        assert reload == ("reload", ([share],), {})
        assert share.microbatches[0].rows[0].experience.segment_id == name


async def test_a_critic_of_its_own_is_a_second_process_group(group_with_critic, ranks):
    assert await group_with_critic.start() == "start on 0"
    assert [(rank.setup.rank, rank.setup.role) for rank in ranks] == [
        (0, "actor"),
        (1, "actor"),
        (0, "critic"),
        (1, "critic"),
    ]
    assert all(rank.calls[0][0] == "start" for rank in ranks)


def test_a_colocated_critic_and_an_algorithm_without_one_have_no_second_group(ranks):
    for estimator, placement in (("gae", "colocated"), ("grpo", "own")):
        ranks.clear()
        setup = msgspec.structs.replace(
            SETUP, algorithm=AlgorithmConfig(estimator=estimator), critic=CriticConfig(placement=placement)
        )
        ActorGroup(setup, LocalPayloadStore(), placement=Placement(0, 0, "gloo"), timeout_s=5.0)
        assert len(ranks) == 2


async def test_values_of_a_critic_of_its_own_join_what_the_actor_scored(group_with_critic, ranks):
    for rank, old in zip(ranks[:2], (1.0, 2.0), strict=True):
        rank.answers["score"] = [Scores(old=numbers(old))]
    for rank, value in zip(ranks[2:], (10.0, 20.0), strict=True):
        rank.answers["score"] = [Scores(values=numbers(value))]
    scores = await group_with_critic.score(train_window("a", "b"))
    assert [(score.old.item(), score.values.item()) for score in scores] == [(1.0, 10.0), (2.0, 20.0)]


async def test_a_critic_of_its_own_trains_on_the_same_window_and_its_metrics_join_the_report(group_with_critic, ranks):
    ranks[0].answers["train"], ranks[2].answers["train"] = report(ratio_mean=1.0), {"value_loss": 0.5}
    done = await group_with_critic.train([train_window("a", "b")], kl_coef=0.5)
    assert done.metrics == {"ratio_mean": 1.0, "value_loss": 0.5}
    assert [[call[0] for call in rank.calls] for rank in ranks] == [["reload", "train"]] * 4
    assert [rank.calls[1][2] for rank in ranks] == [{"step": 7, "kl_coef": 0.5}] * 2 + [{"step": 7}] * 2
    names = [rank.calls[1][1][0][0].microbatches[0].rows[0].experience.segment_id for rank in ranks]
    assert names == ["a", "b", "a", "b"]


async def test_checkpoints_and_exports_are_made_by_all_ranks_together(group, ranks, tmp_path):
    ranks[0].answers["load"] = 3, {"kl_coef": 0.5}
    await group.save(tmp_path, step=3, progress={"kl_coef": 0.5})
    await group.export(tmp_path)
    assert await group.load(tmp_path) == (3, {"kl_coef": 0.5})
    assert [rank.calls for rank in ranks] == [
        [
            ("save", (str(tmp_path),), {"step": 3, "progress": {"kl_coef": 0.5}}),
            ("export", (str(tmp_path),), {}),
            ("load", (str(tmp_path),), {}),
        ]
    ] * 2


async def test_a_critic_of_its_own_saves_and_loads_its_part_and_is_not_exported(group_with_critic, ranks, tmp_path):
    ranks[0].answers["load"] = 3, {}
    await group_with_critic.save(tmp_path, step=3, progress={})
    await group_with_critic.export(tmp_path)
    assert await group_with_critic.load(tmp_path) == (3, {})
    assert [[method for method, _, _ in rank.calls] for rank in ranks] == [
        ["save", "export", "load"],
        ["save", "export", "load"],
        ["save", "load"],
        ["save", "load"],
    ]
    assert ranks[2].calls[0] == ("save", (str(tmp_path),), {"step": 3})


async def test_the_peak_is_that_of_the_fullest_rank_of_the_policy(group_with_critic, ranks):
    for rank, peak in zip(ranks, (3, 5, 9, 9), strict=True):
        rank.answers["peak_bytes"] = peak
    assert await group_with_critic.peak_bytes() == 5


async def test_the_transfer_group_is_the_sender_and_every_worker_of_every_engine(group, ranks):
    await group.connect(["e0", "e1", "e2"], workers_per_engine=2)
    await group.refit(5)
    (method, (init, _client), _), refit = ranks[0].calls
    assert method == "connect"
    assert init == {"host": "10.0.0.1", "port": 4711, "world_size": 7, "timeout_s": TRANSFER_TIMEOUT_S}
    assert refit == ("refit", (5,), {})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (RayTaskError("m", "traceback", ValueError("no such file")).as_instanceof_cause(), "failed in 'save': no such"),
        (RayActorError(), "a rank of the actor died in 'save'"),
    ],
)
async def test_a_rank_that_fails_or_dies_is_an_actor_error_that_names_the_call(group, ranks, tmp_path, fault, message):
    ranks[1].fault = fault
    with pytest.raises(ActorError, match=message):
        await group.save(tmp_path, step=1, progress={})


@pytest.mark.parametrize("call", ["score", "train"])
async def test_a_lost_payload_is_told_before_any_rank_begins(group, ranks, call):
    ranks[1].fault = RayTaskError("m", "traceback", PayloadLostError("gone")).as_instanceof_cause()
    window = train_window("a", "b")
    with pytest.raises(PayloadLostError, match="gone"):
        await (group.score(window) if call == "score" else group.train([window]))
    assert [[method for method, _, _ in rank.calls] for rank in ranks] == [["reload"]] * 2


async def test_a_fault_of_the_critic_names_the_critic(group_with_critic, ranks, tmp_path):
    ranks[3].fault = RayActorError()
    with pytest.raises(ActorError, match="a rank of the critic died in 'load'"):
        await group_with_critic.load(tmp_path)


async def test_ranks_that_never_answer_count_as_dead_under_the_name_of_the_call(ranks):
    group = ActorGroup(SETUP, LocalPayloadStore(), placement=Placement(0, 0, "gloo"), timeout_s=0.01)
    ranks[0].fault = False
    with pytest.raises(ActorDeadError, match="did not finish 'refit' within 0 s"):
        await group.refit(1)


def test_all_ranks_end_with_the_run(group_with_critic, ranks):
    group_with_critic.kill()
    assert len(ranks) == 4
    assert all(rank.is_killed for rank in ranks)


# Deaths.


BROKEN = RayTaskError("m", "traceback", RuntimeError("connection closed by peer")).as_instanceof_cause()
"""What a collective says of a member that died."""


@pytest.fixture
def events():
    return []


@pytest.fixture
def watched(events):
    """A group whose changes are kept; it survives one death."""
    setup = msgspec.structs.replace(SETUP, actor=ActorConfig(max_restarts=1))
    tell = lambda kind, detail: events.append((kind, detail))  # noqa: E731
    return ActorGroup(setup, LocalPayloadStore(), placement=Placement(0, 0, "gloo"), timeout_s=5.0, on_change=tell)


async def test_a_rank_that_dies_is_dead_and_one_that_refuses_is_not(group, ranks, tmp_path):
    ranks[0].fault = RayActorError()
    with pytest.raises(ActorDeadError):
        await group.export(tmp_path)
    ranks[0].fault = BROKEN
    with pytest.raises(ActorError, match="connection closed") as refused:
        await group.export(tmp_path)
    assert not isinstance(refused.value, ActorDeadError)


async def test_an_error_of_an_engine_that_died_is_no_death_of_the_rank_that_met_it(group, ranks):
    ranks[0].fault = RayTaskError("m", "traceback", RayActorError()).as_instanceof_cause()
    with pytest.raises(ActorError) as met:
        await group.refit(1)
    assert not isinstance(met.value, ActorDeadError)


async def test_a_collective_that_fails_since_another_rank_died_is_a_death(group, ranks, tmp_path):
    dies = asyncio.Event()
    ranks[0].fault = BROKEN

    async def die(method, *args, **kwargs):
        await dies.wait()
        raise RayActorError

    ranks[1].call = SimpleNamespace(remote=die)
    export = asyncio.create_task(group.export(tmp_path))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not export.done(), "the other's death may still show"
    dies.set()
    with pytest.raises(ActorDeadError):
        await export


async def test_a_refusal_does_not_wait_for_ever_for_a_death(group, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DEATH_GRACE_S", 0.01)
    ranks[0].fault, ranks[1].fault = BROKEN, False
    with pytest.raises(ActorError, match="connection closed"):
        await group.export(tmp_path)


async def test_every_call_is_a_wait_with_a_name_and_a_limit(group, ranks):
    waits = Waits(lambda: 0.0)
    group = ActorGroup(SETUP, LocalPayloadStore(), placement=Placement(0, 0, "gloo"), timeout_s=5.0, waits=waits)
    ranks[-1].fault = False
    refit = asyncio.create_task(group.refit(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert [(wait.name, wait.limit_s) for wait in waits.now()] == [("the actor ranks to refit", 5.0)]
    refit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refit
    assert waits.now() == []


async def test_new_ranks_take_the_place_of_dead_ones(watched, ranks, events):
    await watched.start()
    await watched.restart(ActorDeadError("a rank died in 'train'"))
    assert [rank.is_killed for rank in ranks] == [True, True, False, False]
    assert [rank.setup.rank for rank in ranks[2:]] == [0, 1]
    assert [rank.calls for rank in ranks[2:]] == [[("start", ("tcp://10.0.0.1:4711",), {})]] * 2
    await watched.check_health()
    assert await watched.refit(1) == "refit on 0"
    assert events == [
        ("actor_started", {"pids": [100, 101]}),
        ("actor_died", {"error": "a rank died in 'train'", "restarts_left": 1}),
        ("actor_restarted", {"pids": [100, 101]}),
    ]


async def test_the_last_death_but_one_is_survived(watched, ranks):
    await watched.restart(ActorDeadError("first"))
    with pytest.raises(RunError, match=r"second \(actor.max_restarts = 1 is spent\)"):
        await watched.restart(ActorDeadError("second"))


async def test_a_rank_that_is_gone_is_found_without_being_asked_for_anything(group, ranks):
    await group.check_health()
    ranks[1].is_killed = True
    with pytest.raises(ActorDeadError, match="a rank of the actor died in 'pid'"):
        await group.check_health()


async def test_a_rank_at_work_that_answers_nothing_else_is_not_dead(group, ranks, monkeypatch):
    monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 0.01)
    for rank in ranks:
        rank.fault = False
        rank.pid.remote = asyncio.Event().wait
    refit = asyncio.create_task(group.refit(1))
    await asyncio.sleep(0)
    await group.check_health()
    refit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refit
    with pytest.raises(ActorDeadError, match="actor ranks did not finish 'pid' within 0 s"):
        await group.check_health()
