"""How many groups are on offer: never more than can be trained within the staleness bound, nor than are needed."""

import msgspec
import pytest

from molt.train.config import Config, RolloutConfig, TrainConfig
from molt.train.controller.admission import Admission

PER_UPDATE = 3


@pytest.fixture
def pool(restart_pool):
    return restart_pool()


@pytest.fixture
def admission(pool, tasks):
    def make(*, num_updates=10, max_staleness=1, tasks=tasks):
        config = Config(
            train=TrainConfig(num_updates=num_updates, groups_per_update=PER_UPDATE, max_staleness=max_staleness),
            rollout=RolloutConfig(group_size=2),
        )
        made = Admission(config, pool, tasks)
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
    admission(tasks=[])()
    assert pool.num_open == 0


def test_groups_take_the_tasks_in_their_order_with_the_group_size_of_the_run(admission, pool, tasks):
    admission(max_staleness=0)()
    groups = list(pool.ledger.groups())
    assert [group.position for group in groups] == [0, 1, 2]
    assert {group.task.task_id for group in groups} == {task.task_id for task in tasks}
    assert {group.size for group in groups} == {2}


def test_admission_goes_on_where_an_earlier_process_stopped(restart_pool, tasks):
    config = msgspec.structs.replace(Config(), train=TrainConfig(groups_per_update=1, max_staleness=0))
    first = Admission(config, restart_pool(), tasks)
    first.paused = False
    first()
    pool = restart_pool()
    second = Admission(config, pool, tasks)
    second.paused = False
    second()
    assert [group.position for group in pool.ledger.groups()] == [0]  # the open one counts; no second is opened
