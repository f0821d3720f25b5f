"""The seed of a lease's session: of run, task, place in the group and attempt, whoever is given the lease."""

import pytest

from molt.agents.protocol import LeaseRequest, ReleaseRequest, SessionRequest
from molt.train.config import Config, DataConfig, RolloutConfig, RunConfig, TrainConfig
from molt.train.controller.admission import Admission
from molt.train.controller.desk import DeskSettings, RolloutDesk
from molt.train.controller.results import experiences_into
from molt.train.experience import LocalPayloadStore
from molt.train.gateway.seeds import seed_of
from molt.train.gateway.sessions import Sessions
from molt.train.pool.tasks import Dataset


class Run:
    """A server of a run, as far as leases go."""

    def __init__(self, pool, tasks, *, seed=7, seeded=True, group_size=2):
        config = Config(
            run=RunConfig(seed=seed),
            train=TrainConfig(groups_per_update=2, max_staleness=9),
            rollout=RolloutConfig(group_size=group_size, seeded=seeded),
            data=DataConfig(shuffle=False),
        )
        self.sessions = Sessions()
        admission = Admission(config, pool, [Dataset(tasks=tasks)])
        admission.paused = False
        self.desk = RolloutDesk(
            pool,
            self.sessions,
            settings=DeskSettings.of(config, "http://trainer:1"),
            experiences_of=experiences_into(LocalPayloadStore()),
            admit=admission,
            progress=dict,
        )

    async def lease(self, capacity):
        return (await self.desk.lease(LeaseRequest(worker_id="w", capacity=capacity, wait_s=0.0))).leases

    def seed(self, credentials):
        return self.sessions.get(credentials.session_id).tree.seed

    async def seeds(self, capacity):
        return [self.seed(lease.session) for lease in await self.lease(capacity)]


@pytest.fixture
def make_run(restart_pool, tasks):
    return lambda **changes: Run(restart_pool(), tasks, **changes)


async def test_a_seed_is_of_run_task_member_and_attempt(make_run):
    assert await make_run().seeds(4) == [
        seed_of(7, "train", position, member, 1) for position, member in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]


async def test_no_two_leases_share_one_though_tasks_come_again_in_later_epochs(make_run, tasks):
    seeds = await make_run().seeds(20)
    assert len(seeds) > 2 * 2 * len(tasks)  # more than two epochs
    assert len(set(seeds)) == len(seeds)


async def test_the_order_in_which_workers_ask_does_not_matter(restart_pool, tasks):
    run = Run(restart_pool(), tasks)
    one_by_one = [seed for _ in range(4) for seed in await run.seeds(1)]
    assert one_by_one == [seed_of(7, "train", position, member, 1) for position in (0, 1) for member in (0, 1)]


async def test_another_run_seed_draws_something_else(make_run):
    assert await make_run(seed=8).seeds(1) == [seed_of(8, "train", 0, 0, 1)]


async def test_the_next_attempt_draws_anew(make_run):
    run = make_run()
    (lease,) = await run.lease(1)
    await run.desk.release(lease.lease_id, ReleaseRequest(worker_id="w", attempt=lease.attempt))
    (again,) = await run.lease(1)
    assert (again.rollout_id, again.attempt) == (lease.rollout_id, 2)
    assert run.seed(again.session) == seed_of(7, "train", 0, 0, 2)


async def test_every_evaluation_draws_the_same(restart_pool, tasks):
    pool = restart_pool()
    run = Run(pool, tasks)
    for _ in range(2):
        pool.open_group(tasks[2], kind="eval", size=1, position=None)
    seeds = await run.seeds(2)
    assert seeds == [seed_of(7, "eval", "t2", 0, 1)] * 2


async def test_an_unseeded_run_and_a_session_that_no_worker_drives_have_none(make_run):
    assert await make_run(seeded=False).seeds(2) == [None, None]
    run = make_run()
    assert run.seed(run.desk.open_session(SessionRequest(group="g"))) is None
