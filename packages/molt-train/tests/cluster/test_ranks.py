"""The actor ranks as one, with a stand-in for Ray: every call reaches all of them, and faults have a name."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayTaskError

from molt.train.actor.setup import RankSetup
from molt.train.cluster import ranks as module
from molt.train.cluster.placement import Placement
from molt.train.cluster.ranks import ActorGroup
from molt.train.config import ActorConfig, AlgorithmConfig
from molt.train.errors import ActorError, StallError
from molt.train.experience import LocalPayloadStore
from molt.train.records.experience import Experience
from molt.train.records.window import Microbatch, Row, TrainWindow

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
        self.call = SimpleNamespace(remote=self._call)

    async def _call(self, method, *args, **kwargs):
        self.calls.append((method, args, kwargs))
        if self.fault:
            raise self.fault
        if self.fault is False:
            await asyncio.Event().wait()
        return f"{method} on {self.setup.rank}"


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
    return Row(experience=experience, advantages=np.ones(1, np.float32))


async def test_every_rank_is_told_its_number_and_where_they_meet(group, ranks):
    assert await group.start() == "start on 0"
    assert [rank.setup.rank for rank in ranks] == [0, 1]
    assert [rank.calls for rank in ranks] == [[("start", ("tcp://10.0.0.1:4711",), {})]] * 2


@pytest.mark.parametrize(("supervised", "method"), [(False, "train"), (True, "train_supervised")])
async def test_every_rank_gets_its_share_of_every_step_and_the_denominator_of_all(group, ranks, supervised, method):
    windows = [
        TrainWindow(
            step=7,
            policy_version=6,
            ranks=((Microbatch(rows=(row(f"{i}a"),)),), (Microbatch(rows=(row(f"{i}b"),)),)),
            num_action_tokens=2,
        )
        for i in range(2)
    ]
    assert await group.train(windows, supervised=supervised) == f"{method} on 0"
    for rank, letter in zip(ranks, "ab", strict=True):
        ((called, (shares,), options),) = rank.calls
        assert (called, options) == (method, {"step": 7})
        assert [share.microbatches[0].rows[0].experience.segment_id for share in shares] == [f"0{letter}", f"1{letter}"]
        assert [share.num_action_tokens for share in shares] == [2, 2]


async def test_checkpoints_and_exports_are_made_by_all_ranks_together(group, ranks, tmp_path):
    await group.save(tmp_path, step=3)
    await group.export(tmp_path)
    assert await group.load(tmp_path) == "load on 0"
    assert [rank.calls for rank in ranks] == [
        [("save", (str(tmp_path),), {"step": 3}), ("export", (str(tmp_path),), {}), ("load", (str(tmp_path),), {})]
    ] * 2


async def test_the_transfer_group_is_the_sender_and_every_worker_of_every_engine(group, ranks):
    await group.connect(["e0", "e1", "e2"], workers_per_engine=2)
    await group.refit(5)
    (method, (init, client), _), refit = ranks[0].calls
    assert method == "connect"
    assert init == {"host": "10.0.0.1", "port": 4711, "world_size": 7, "timeout_s": 5.0}
    assert client.version == 0
    assert refit == ("refit", (5,), {})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (RayTaskError("m", "traceback", ValueError("no such file")).as_instanceof_cause(), "failed in 'save': no such"),
        (RayActorError(), "died in 'save'"),
    ],
)
async def test_a_rank_that_fails_or_dies_is_an_actor_error_that_names_the_call(group, ranks, tmp_path, fault, message):
    ranks[1].fault = fault
    with pytest.raises(ActorError, match=message):
        await group.save(tmp_path, step=1)


async def test_ranks_that_never_answer_stall_under_the_name_of_the_call(ranks):
    group = ActorGroup(SETUP, LocalPayloadStore(), placement=Placement(0, 0, "gloo"), timeout_s=0.01)
    ranks[0].fault = False
    with pytest.raises(StallError, match="did not finish 'refit' within 0 s"):
        await group.refit(1)


def test_all_ranks_end_with_the_run(group, ranks):
    group.kill()
    assert all(rank.is_killed for rank in ranks)
