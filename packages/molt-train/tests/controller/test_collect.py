"""Windows: what complete groups make one, what is left out under which name, and how the order of tasks survives."""

import asyncio
import random
from collections import Counter

import pytest

from molt.train.config import Config, DataConfig, RolloutConfig, TrainConfig
from molt.train.controller import collect
from molt.train.controller.admission import Admission
from molt.train.controller.collect import Collector
from molt.train.controller.learning import Learning
from molt.train.errors import DataExhausted, RunError, StallError
from molt.train.pool.tasks import Dataset
from molt.train.records.rollout import Task
from molt.train.window import plan_of

PER_UPDATE = 2


async def settle():
    """Let everything that can go on do so: nothing here waits for time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(collect, "POLL_S", 0.05)


class Stall:
    """Waits for ever, or loses its patience at once."""

    def __init__(self, *, patient=True):
        self._patient = patient

    def check(self, waiting_for):
        if not self._patient:
            raise StallError(f"waiting for {waiting_for}")


class Run:
    """A collector on a pool of its own, and the workers of it."""

    def __init__(self, pool, workers, config, *, num_tasks, patient):
        self.pool, self.workers = pool, workers
        tasks = [Task(task_id=f"t{i}", data={}) for i in range(num_tasks)]
        self.admission = Admission(config, pool, [Dataset(tasks=tasks)])
        self.admission.paused = False
        learning = Learning(config, actor=None, plan=plan_of(config, hidden_size=8))
        self.collector = Collector(config, pool, self.admission, learning, Stall(patient=patient))

    async def window(self, step):
        """Collect the window of update `step` + 1, and record it as the loop would."""
        groups = await self.collector.collect(step)
        ids = [group.group_id for group in groups]
        self.pool.ledger.record_window(step + 1, step, ids)
        return ids

    def trained(self):
        """The update is made."""
        self.admission.held = 0
        self.admission()

    def finish(self, *group_ids, rewards=(0.0, 1.0), **outcome):
        """Report the rollouts of these groups that wait for a worker, the members in turn with these rewards."""
        for assignment in self.pool.acquire("w", 10_000):
            if not group_ids or assignment.group_id in group_ids:
                self.workers.report(assignment, reward=rewards[assignment.member % len(rewards)], **outcome)
            else:
                assert self.pool.release(assignment.lease_id, assignment.attempt) is None

    def state(self, group_id):
        row = self.pool.ledger.group(group_id)
        return row.state, row.reason


@pytest.fixture
def make_run(restart_pool, make_workers):
    def make(*, num_tasks=6, epochs=0, pool=None, patient=True, **train):
        train = {"groups_per_update": PER_UPDATE, "max_staleness": 1, **train}
        config = Config(
            train=TrainConfig(**train),
            rollout=RolloutConfig(group_size=2),
            data=DataConfig(epochs=epochs, shuffle=False),
        )
        made = pool or restart_pool()
        return Run(made, make_workers(made), config, num_tasks=num_tasks, patient=patient)

    return make


async def test_a_strict_window_is_of_exactly_the_groups_opened_for_it_in_their_order(make_run):
    run = make_run(max_staleness=0)
    run.admission()
    run.finish("g2")
    run.finish("g1")
    assert await run.window(0) == ["g1", "g2"]
    run.trained()
    assert run.pool.num_open == PER_UPDATE
    run.finish("g4", version=1)
    run.finish("g3", version=1)
    assert await run.window(1) == ["g3", "g4"]
    assert run.collector.dropped == {}


async def test_of_groups_of_one_age_a_window_takes_what_completed_first_and_sorts_it_by_age(make_run):
    run = make_run(max_staleness=1)
    run.admission()
    for group_id in ("g4", "g2", "g1", "g3"):
        run.finish(group_id)
    assert await run.window(0) == ["g2", "g4"]
    assert run.admission.held == PER_UPDATE


@pytest.mark.parametrize("seed", range(4))
async def test_strict_windows_do_not_depend_on_what_completes_when(make_run, seed):
    run, rng = make_run(max_staleness=0, drop_degenerate=True), random.Random(seed)
    run.admission()
    windows = []
    for step in range(4):
        collecting = asyncio.create_task(run.window(step))
        await settle()
        while not collecting.done():
            live = [row for row in run.pool.ledger.groups() if row.state == "open"]
            row = rng.choice(live)
            run.finish(row.group_id, rewards=(1.0, 1.0) if row.position % 5 == 1 else (0.0, 1.0), version=step)
            await settle()
        positions = [run.pool.ledger.group(group_id).position for group_id in await collecting]
        windows.append(positions)
        run.trained()
    assert windows == [[0, 2], [3, 4], [5, 7], [8, 9]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("on_stale", ["drop", "release"])
async def test_whatever_happens_no_window_has_a_token_beyond_the_bound_and_no_queue_grows(make_run, seed, on_stale):
    staleness = seed % 3
    run = make_run(max_staleness=staleness, drop_degenerate=True, max_refill=100.0, on_stale=on_stale)
    rng, bound, step = random.Random(seed), (staleness + 1) * PER_UPDATE, 0
    run.admission()
    leases, sampled_at = [], {}
    collecting = asyncio.create_task(run.collector.collect(step))
    while step < 12:
        for lease in run.pool.acquire("w", rng.randint(0, 3)):
            leases.append(lease)
            sampled_at[lease.lease_id] = step
        if leases:
            lease = leases.pop(rng.randrange(len(leases)))
            if run.pool.check(lease.lease_id, lease.attempt) is None:
                kind = rng.choice(["completed"] * 5 + ["failed"])
                run.workers.report(
                    lease, kind=kind, reward=float(rng.random() < 0.6), version=sampled_at[lease.lease_id]
                )
        await settle()
        assert run.pool.num_open + run.pool.num_ready + run.admission.held <= bound
        if collecting.done():
            groups = collecting.result()
            assert all(step - group.oldest_version <= staleness for group in groups)
            run.pool.ledger.record_window(step + 1, step, [group.group_id for group in groups])
            step += 1
            run.trained()
            collecting = asyncio.create_task(run.collector.collect(step))
    collecting.cancel()
    states = Counter((row.state, row.reason) for row in run.pool.ledger.groups())
    dropped = run.collector.dropped
    assert states["consumed", None] == 12 * PER_UPDATE
    assert states["dropped", "stale"] == dropped["groups_stale"] + dropped["groups_stale_released"]
    assert states["dropped", "degenerate"] == dropped["groups_degenerate"] > 0
    assert states["dropped", "no_usable_rollouts"] == dropped["groups_no_usable_rollouts"]
    assert bool(dropped["groups_stale_released"]) == (on_stale == "release" and bool(states["dropped", "stale"]))


async def test_what_took_long_is_trained_before_it_gets_too_old_to_be(make_run):
    run = make_run(max_staleness=1)
    run.admission()
    run.finish("g1", "g2", version=0)
    await run.window(0)
    run.trained()
    run.finish("g4", "g5", "g6", version=1)
    run.finish("g3", version=0)
    assert await run.window(1) == ["g3", "g4"]
    assert run.collector.dropped == {}


async def test_no_more_is_ever_under_way_than_the_bound(make_run):
    run = make_run(max_staleness=1)
    run.admission()
    bound = 2 * PER_UPDATE
    for step in range(4):
        run.finish(version=step)
        await run.window(step)
        assert run.pool.num_open + run.pool.num_ready + run.admission.held == bound
        run.trained()
        assert run.pool.num_open + run.pool.num_ready == bound


async def test_a_complete_group_that_is_too_old_is_dropped_before_anybody_waits_for_it(make_run):
    run = make_run(max_staleness=1)
    run.admission()
    run.finish("g1", "g2", "g3", version=0)
    assert await run.window(0) == ["g1", "g2"]
    run.trained()
    run.finish("g4", "g5", "g6", version=2)
    assert await run.window(2) == ["g4", "g5"]
    assert run.state("g3") == ("dropped", "stale")
    assert run.collector.dropped == {"groups_stale": 1}


async def test_a_group_as_old_as_the_bound_is_trained(make_run):
    run = make_run(max_staleness=1)
    run.admission()
    run.finish(version=0)
    await run.window(0)
    run.trained()
    assert await run.window(1) == ["g3", "g4"]
    assert run.collector.dropped == {}


async def test_an_open_group_with_an_old_rollout_is_cut_when_the_version_advances(make_run):
    run = make_run(max_staleness=0)
    run.admission()
    first, second, *_ = run.pool.acquire("w", 4)
    assert first.group_id == second.group_id == "g1"
    run.workers.report(first, version=0)
    collecting = asyncio.create_task(run.collector.collect(1))
    await settle()
    assert run.state("g1") == ("dropped", "stale")
    assert run.pool.heartbeat("w", [second.lease_id]) == [second.lease_id]
    assert run.collector.dropped == {"groups_stale": 1}
    assert run.pool.num_open == PER_UPDATE
    collecting.cancel()


@pytest.mark.parametrize("when", ["open", "complete", "reported afterwards"])
async def test_or_its_task_is_offered_anew_at_its_position(make_run, when):
    run = make_run(max_staleness=0, on_stale="release")
    run.admission()
    leases = [lease for lease in run.pool.acquire("w", 4) if lease.group_id == "g1"]
    old = run.pool.ledger.group("g1")
    early = {"open": leases[:1], "complete": leases, "reported afterwards": []}[when]
    for lease in early:
        run.workers.report(lease, version=0)
    collecting = asyncio.create_task(run.collector.collect(1))
    await settle()
    if when == "reported afterwards":
        for lease in leases:
            run.workers.report(lease, version=0)
        await settle()
    assert run.state("g1") == ("dropped", "stale")
    assert run.collector.dropped == {"groups_stale_released": 1}
    again = run.pool.ledger.group("g3")
    assert (again.task, again.position, again.state) == (old.task, old.position, "open")
    assert run.pool.num_open == PER_UPDATE
    assert run.pool.next_position == PER_UPDATE, "the data position stays where it was"
    collecting.cancel()


async def test_a_group_without_anything_usable_is_replaced(make_run):
    run = make_run(max_staleness=0)
    run.admission()
    run.finish("g1", kind="failed")
    run.finish("g2")
    collecting = asyncio.create_task(run.window(0))
    await settle()
    run.finish("g3")
    assert await collecting == ["g2", "g3"]
    assert run.state("g1") == ("dropped", "no_usable_rollouts")
    assert run.collector.dropped == {"groups_no_usable_rollouts": 1}


@pytest.mark.parametrize(
    ("drop", "window", "dropped"),
    [
        (True, ["g2", "g4"], {"groups_degenerate": 2}),
        (False, ["g1", "g2"], {}),
    ],
)
async def test_groups_of_one_reward_are_replaced_where_the_run_says_so(make_run, drop, window, dropped):
    run = make_run(max_staleness=0, drop_degenerate=drop)
    run.admission()
    run.finish("g1", rewards=(0.25, 0.25))
    run.finish("g2")
    collecting = asyncio.create_task(run.window(0))
    await settle()
    run.finish("g3", rewards=(0.0, 0.0))
    await settle()
    run.finish("g4")
    assert await collecting == window
    assert run.collector.dropped == dropped
    if drop:
        assert run.state("g1") == ("dropped", "degenerate")
    assert run.pool.num_open + run.pool.num_ready == 0


async def test_a_group_left_with_one_rollout_is_no_group_of_one_reward(make_run):
    run = make_run(max_staleness=0, drop_degenerate=True, patient=False)
    run.admission()
    for assignment in run.pool.acquire("w", 10):
        kind = "failed" if assignment.group_id == "g1" and assignment.member == 0 else "completed"
        run.workers.report(assignment, kind=kind, reward=float(assignment.member))
    with pytest.raises(StallError):
        await run.window(0)
    assert run.collector.dropped == {"groups_no_usable_rollouts": 1}


async def test_rewards_that_are_never_different_end_the_run_and_are_named(make_run):
    run = make_run(max_staleness=0, drop_degenerate=True, max_refill=1.5)
    run.admission()
    collecting = asyncio.create_task(run.window(0))
    for rewards in ((0.0, 0.0), (0.0, 0.0), (1.0, 1.0)):
        run.finish(rewards=rewards)
        await settle()
    with pytest.raises(RunError) as caught:
        await collecting
    message = str(caught.value)
    assert message.startswith(
        "4 groups were dropped for one update because all their rollouts had one reward: 0 (4 groups); that is more "
        "than train.max_refill 1.5 times train.groups_per_update 2"
    )
    assert "\n" not in message


async def test_the_refill_is_counted_anew_for_every_update(make_run):
    run = make_run(max_staleness=0, drop_degenerate=True, max_refill=0.5)
    run.admission()
    for step in range(3):
        collecting = asyncio.create_task(run.window(step))
        await settle()
        first = min((g.group_id for g in run.pool.ledger.groups() if g.state == "open"), key=lambda name: int(name[1:]))
        run.finish(first, rewards=(1.0, 1.0), version=step)
        await settle()
        run.finish(version=step)
        assert len(await collecting) == PER_UPDATE
        run.trained()
    assert run.collector.dropped == {"groups_degenerate": 3}


async def test_the_data_end_with_a_window_that_cannot_be_filled(make_run):
    run = make_run(num_tasks=3, epochs=1, max_staleness=1)
    run.admission()
    run.finish()
    assert await run.window(0) == ["g1", "g2"]
    run.trained()
    with pytest.raises(DataExhausted, match=r"data\.epochs 1 are used up; 1 groups are left, less than a window"):
        await run.collector.collect(1)
    assert run.state("g3") == ("dropped", "end_of_data")
    assert run.collector.dropped == {"groups_end_of_data": 1}
    assert (run.pool.num_open, run.pool.num_ready, run.admission.held) == (0, 0, 0)


async def test_the_data_have_not_ended_while_a_group_is_under_way(make_run):
    run = make_run(num_tasks=2, epochs=1, max_staleness=1)
    run.admission()
    run.finish("g2")
    collecting = asyncio.create_task(run.window(0))
    await settle()
    assert not collecting.done()
    run.finish("g1")
    assert await collecting == ["g1", "g2"]
    run.trained()
    with pytest.raises(DataExhausted, match="0 groups are left"):
        await run.collector.collect(1)
    assert run.collector.dropped == {}


async def test_a_run_whose_tasks_are_all_in_quarantine_ends(make_run, restart_pool):
    pool = restart_pool()
    for i in range(2):
        pool.ledger.add_quarantine(f"t{i}", ["the sandbox died"])
    run = make_run(num_tasks=2, pool=restart_pool())
    with pytest.raises(RunError, match="every task is in quarantine"):
        await run.collector.collect(0)


async def test_tasks_passed_over_are_counted_with_what_was_dropped(make_run, restart_pool):
    pool = restart_pool()
    pool.ledger.add_quarantine("t0", ["the sandbox died"])
    run = make_run(num_tasks=3, max_staleness=0, pool=restart_pool())
    run.admission()
    run.finish()
    await run.window(0)
    assert run.collector.dropped == {"tasks_quarantined": 1}
    assert [group.position for group in run.pool.ledger.groups()] == [1, 2]


async def test_the_wait_is_bounded_and_says_what_is_missing(make_run):
    run = make_run(patient=False)
    run.admission()
    run.finish("g1")
    with pytest.raises(StallError, match="waiting for 1 more complete groups"):
        await run.window(0)


async def test_a_restart_keeps_what_was_finished_and_goes_on_at_the_data_position(make_run, restart_pool):
    run = make_run(max_staleness=1)
    run.admission()
    run.finish("g1", "g2", "g3")
    assert await run.window(0) == ["g1", "g2"]
    run.trained()
    resumed = make_run(max_staleness=1)
    resumed.admission()
    assert (resumed.pool.num_ready, resumed.pool.num_open) == (1, 3)
    assert resumed.pool.next_position == 6
    resumed.finish("g5", version=1)
    assert await resumed.window(1) == ["g3", "g5"]
    resumed.trained()
    assert [group.position for group in resumed.pool.ledger.groups()] == list(range(8))
