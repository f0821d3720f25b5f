"""How many groups are on offer: never more than can be trained within the staleness bound, nor than are needed."""

import msgspec
import pytest

from molt.train.config import Config, DataConfig, RolloutConfig, TrainConfig
from molt.train.controller.admission import Admission
from molt.train.pool.tasks import Dataset
from molt.train.records.rollout import Task

PER_UPDATE = 3


@pytest.fixture
def pool(restart_pool):
    return restart_pool()


@pytest.fixture
def admission(pool, tasks):
    def make(*, num_updates=10, max_staleness=1, sets=None, oversample=0, epochs=0, pool=pool):
        config = Config(
            train=TrainConfig(num_updates=num_updates, groups_per_update=PER_UPDATE, max_staleness=max_staleness),
            rollout=RolloutConfig(group_size=2, oversample=oversample),
            data=DataConfig(epochs=epochs, shuffle=False),
        )
        made = Admission(config, pool, [Dataset(tasks=tasks)] if sets is None else sets)
        made.paused = False
        return made

    return make


@pytest.mark.parametrize(("max_staleness", "bound"), [(0, 3), (1, 6), (2, 9)])
def test_at_most_the_groups_of_the_updates_within_the_bound_are_outstanding(admission, pool, max_staleness, bound):
    admit = admission(max_staleness=max_staleness)
    admit()
    assert (pool.num_open, pool.num_ready) == (bound, 0)
    admit()
    assert pool.num_open == bound


def test_complete_groups_that_wait_count_as_outstanding(admission, pool, make_workers):
    admit = admission()
    admit()
    make_workers(pool).finish_all()
    admit()
    assert (pool.num_open, pool.num_ready) == (0, 6)


def test_groups_held_for_the_window_in_work_count_as_outstanding(admission, pool, make_workers):
    admit = admission()
    admit()
    make_workers(pool).finish_all()
    pool.take(2)
    admit.held = 2
    admit()
    assert (pool.num_open, pool.num_ready) == (0, 4)
    admit.held = 0  # the update is made
    admit()
    assert (pool.num_open, pool.num_ready) == (2, 4)


def test_no_more_is_opened_than_the_updates_left_need(admission, pool):
    admit = admission(num_updates=1, max_staleness=2)
    admit()
    assert pool.num_open == PER_UPDATE
    admit.updates_left = 2
    admit()
    assert pool.num_open == 2 * PER_UPDATE


def test_nothing_is_opened_once_no_update_is_left(admission, pool):
    admit = admission()
    admit.updates_left = 0
    admit()
    assert pool.num_open == 0


def test_nothing_is_opened_while_paused(admission, pool):
    admit = admission()
    admit.paused = True
    admit()
    assert pool.num_open == 0


def test_a_gateway_alone_has_no_tasks_to_open_groups_of(admission, pool):
    admission(sets=[])()
    assert pool.num_open == 0


def test_groups_take_the_tasks_in_their_order_with_the_group_size_of_the_run(admission, pool, tasks):
    admission(max_staleness=0)()
    groups = list(pool.ledger.groups())
    assert [group.position for group in groups] == [0, 1, 2]
    assert {group.task.task_id for group in groups} == {task.task_id for task in tasks}
    assert {group.size for group in groups} == {2}


def test_admission_goes_on_where_an_earlier_process_stopped(restart_pool, tasks):
    config = msgspec.structs.replace(Config(), train=TrainConfig(groups_per_update=1, max_staleness=0))
    first = Admission(config, restart_pool(), [Dataset(tasks=tasks)])
    first.paused = False
    first()
    pool = restart_pool()
    second = Admission(config, pool, [Dataset(tasks=tasks)])
    second.paused = False
    second()
    assert [group.position for group in pool.ledger.groups()] == [0]  # the open one counts; no second is opened


def test_a_group_is_opened_with_the_rollouts_that_may_be_cut(admission, pool):
    admission(max_staleness=0, oversample=2)()
    assert {group.size for group in pool.ledger.groups()} == {2}
    assert {len(pool.ledger.rollouts(group.group_id)) for group in pool.ledger.groups()} == {4}


def positions(pool):
    return [group.position for group in pool.ledger.groups()]


def test_the_tasks_end_with_the_epochs(admission, pool, make_workers):
    admit = admission(max_staleness=3, epochs=2)
    admit()
    assert (positions(pool), admit.is_exhausted) == ([0, 1, 2, 3, 4, 5], True)
    make_workers(pool).finish_all()
    pool.take(6)
    admit()
    assert (pool.num_open, admit.is_exhausted) == (0, True)


def test_before_the_end_is_reached_nothing_is_exhausted(admission, pool):
    admit = admission(max_staleness=1, epochs=2)
    admit()
    assert (positions(pool), admit.is_exhausted) == ([0, 1, 2, 3, 4, 5], False)


@pytest.fixture
def quarantined_pool(restart_pool):
    """A pool in whose ledger these tasks have killed their attempts."""

    def make(*task_ids):
        pool = restart_pool()
        for task_id in task_ids:
            pool.ledger.add_quarantine(task_id, ["the sandbox died"])
        return restart_pool()

    return make


def test_tasks_in_quarantine_are_passed_over_and_counted(admission, quarantined_pool):
    pool = quarantined_pool("t1")
    admit = admission(max_staleness=1, pool=pool)
    admit()
    assert positions(pool) == [0, 2, 3, 5, 6, 8]
    assert {group.task.task_id for group in pool.ledger.groups()} == {"t0", "t2"}
    assert admit.dropped == {"tasks_quarantined": 3}
    assert not admit.is_all_quarantined


def test_with_every_task_in_quarantine_nothing_is_opened(admission, quarantined_pool):
    pool = quarantined_pool("t0", "t1", "t2", "of another set")
    admit = admission(pool=pool)
    admit()
    assert pool.num_open == 0
    assert admit.is_all_quarantined
    assert not admission(sets=[], pool=pool).is_all_quarantined


def test_a_task_is_offered_anew_at_its_position(admission, pool):
    admit = admission(max_staleness=0)
    admit()
    first, *_ = pool.ledger.groups()
    assert admit.reopen(first)
    *_, again = pool.ledger.groups()
    assert (again.task, again.position) == (first.task, first.position)
    assert pool.next_position == 3


def test_a_task_is_not_offered_anew_when_it_is_in_quarantine_or_of_no_position(admission, quarantined_pool):
    pool = quarantined_pool("t0")
    admit = admission(max_staleness=0, pool=pool)
    admit()
    first, *_ = pool.ledger.groups()
    assert first.task.task_id == "t1"
    assert not admit.reopen(msgspec.structs.replace(first, position=None, key="k"))
    assert not admit.reopen(msgspec.structs.replace(first, task=Task(task_id="t0", data={})))
    assert pool.num_open == PER_UPDATE


def test_several_sets_take_turns_and_a_resumed_run_goes_on_with_the_next(restart_pool):
    sets = [
        Dataset(name=name, tasks=[Task(task_id=f"{name}/{i}", data={}, dataset=name) for i in range(5)], weight=weight)
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]
    config = Config(train=TrainConfig(groups_per_update=3, max_staleness=0), data=DataConfig(shuffle=False))
    first = Admission(config, restart_pool(), sets)
    first.paused = False
    first()
    second = Admission(config, pool := restart_pool(), sets)
    second.paused, second.held = False, -3  # as if the three open ones were trained
    second()
    assert [g.task.task_id for g in pool.ledger.groups()] == ["a/0", "a/1", "b/0", "a/2", "a/3", "a/4"]
    assert [g.task.dataset for g in pool.ledger.groups()] == list("aabaaa")
