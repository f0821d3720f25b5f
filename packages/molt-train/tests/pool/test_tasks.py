"""Rows become tasks; the order of several sets is even, reproducible, and found from any position at once."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.config import DatasetConfig
from molt.train.errors import ConfigError
from molt.train.pool.tasks import MAX_PERIOD, Dataset, TaskOrder, load_datasets, load_tasks
from molt.train.records.rollout import Task


@pytest.fixture
def load(tmp_path):
    def load_text(text):
        path = tmp_path / "tasks.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_tasks(path)

    return load_text


def test_ids_come_from_the_row_else_from_its_number(load):
    tasks = load('{"task_id": "a", "id": "x"}\n\n{"id": 7}\n{"q": 1}\n{"id": null, "q": 2}\n')
    assert [task.task_id for task in tasks] == ["a", "7", "2", "3"]
    assert tasks[2].data == {"q": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"q": 1}\n{"q": 2\n', r"tasks\.jsonl:2: not JSON"),
        (b'{"q": "\xff"}\n', r"tasks\.jsonl:1: not JSON"),
        ('{"q": 1}\n\n[1, 2]\n', r"tasks\.jsonl:3: a task is a JSON object, but this row is list \[1, 2\]"),
        ('{"id": "a"}\n{"task_id": "a"}\n', r"tasks\.jsonl:2: task id 'a' is already the id of line 1"),
        ('{"id": "1"}\n{"q": 1}\n', r"tasks\.jsonl:2: task id '1' is already the id of line 1"),
        ('{"task_id": true}\n', r"tasks\.jsonl:1: task_id is True; it must be a string or an integer"),
        ("\n \n", r"tasks\.jsonl' has no rows"),
        ("", r"tasks\.jsonl' has no rows"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_the_place(load, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load(text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl' cannot be read: No such file"):
        load_tasks(tmp_path / "gone.jsonl")


def test_without_sets_or_path_there_are_no_tasks(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": 1}\n')
    (alone,) = load_datasets(str(tmp_path / "a.jsonl"), ())
    assert (alone.name, alone.weight, alone.tasks) == ("", 1.0, [Task(task_id="0", data={"q": 1})])
    assert load_datasets("", ()) == []


def test_tasks_of_named_sets_carry_name_and_labels_and_have_ids_of_their_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": 1}\n{"id": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"q": 2}\n')
    gpu = {"gpu": "1"}
    sets = load_datasets(
        "",
        (
            DatasetConfig(name="a", path=str(tmp_path / "a.jsonl"), weight=3.0, labels=gpu),
            DatasetConfig(name="b", path=str(tmp_path / "b.jsonl")),
        ),
    )
    assert [(one.name, one.weight) for one in sets] == [("a", 3.0), ("b", 1.0)]
    assert [[(t.task_id, t.dataset, t.labels, t.data) for t in one.tasks] for one in sets] == [
        [("a/0", "a", gpu, {"q": 1}), ("a/x", "a", gpu, {"id": "x"})],
        [("b/0", "b", {}, {"q": 2})],
    ]


@pytest.fixture
def ten(load):
    return load("".join(f'{{"q": {i}}}\n' for i in range(10)))


def order_of(tasks, count, **settings):
    order = TaskOrder([Dataset(tasks=tasks)], **settings)
    return [order.at(position).task_id for position in range(count)]


def test_without_shuffle_the_order_is_that_of_the_file_again_and_again(ten):
    assert order_of(ten, 20, seed=0, shuffle=False) == [str(i) for i in range(10)] * 2


def test_each_epoch_is_a_new_permutation_fixed_by_the_seed(ten):
    order = order_of(ten, 30, seed=5, shuffle=True)
    epochs = [tuple(order[i : i + 10]) for i in (0, 10, 20)]
    assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
    assert len(set(epochs)) == 3
    assert order_of(ten, 30, seed=5, shuffle=True) == order
    assert order_of(ten, 30, seed=6, shuffle=True) != order


def test_a_position_alone_gives_the_task_in_whatever_order_it_is_asked(ten):
    order = order_of(ten, 40, seed=1, shuffle=True)
    again = TaskOrder([Dataset(tasks=ten)], seed=1, shuffle=True)
    assert [again.at(position).task_id for position in reversed(range(40))] == order[::-1]


def test_the_order_is_pinned_since_a_resumed_run_depends_on_it(ten):
    assert order_of(ten, 5, seed=0, shuffle=True) == ["1", "0", "2", "4", "9"]


def make_sets(*weights, size=7):
    return [
        Dataset(
            name=name, tasks=[Task(task_id=f"{name}/{i}", data={}, dataset=name) for i in range(size)], weight=weight
        )
        for name, weight in zip("abcdefghij", weights, strict=False)
    ]


def names(sets, count, **options):
    order = TaskOrder(sets, seed=0, shuffle=True, **options)
    return [order.at(position).dataset for position in range(count)]


def test_the_turns_of_two_sets_by_hand():
    # Who is half a turn behind may have the next. At the second position both are; the earlier set goes first.
    assert "".join(names(make_sets(3.0, 1.0), 8)) == "aabaaaba"


def test_the_turns_of_three_sets_by_hand():
    order = "".join(names(make_sets(0.7, 0.2, 0.1), 20))
    assert order == order[:10] * 2
    assert Counter(order[:10]) == {"a": 7, "b": 2, "c": 1}


WEIGHTS = st.floats(min_value=1e-3, max_value=1e3, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(WEIGHTS | st.integers(1, 20).map(float), min_size=1, max_size=6))
def test_every_set_has_its_share_of_any_prefix_give_or_take_less_than_one(weights):
    count, total = Counter(), sum(weights)
    sets = make_sets(*weights)
    for number, name in enumerate(names(sets, 1500), start=1):
        count[name] += 1
        for one in sets:
            assert abs(count[one.name] - number * one.weight / total) < 1


def test_each_set_has_epochs_of_its_own_order():
    order = TaskOrder(make_sets(2.0, 1.0, size=4), seed=3, shuffle=True)
    taken = [order.at(position) for position in range(24)]
    a = [task.task_id for task in taken if task.dataset == "a"]
    b = [task.task_id for task in taken if task.dataset == "b"]
    for used in (a[:4], a[4:8], a[8:12], a[12:16]):
        assert sorted(used) == [f"a/{i}" for i in range(4)]
    for used in (b[:4], b[4:8]):
        assert sorted(used) == [f"b/{i}" for i in range(4)]
    assert len({tuple(a[:4]), tuple(a[4:8]), tuple(a[8:12]), tuple(a[12:16])}) > 1
    assert [i.removeprefix("a/") for i in a[:4]] != [i.removeprefix("b/") for i in b[:4]]


def test_the_order_of_several_sets_is_pinned():
    order = TaskOrder(make_sets(2.0, 1.0, size=4), seed=0, shuffle=True)
    assert [order.at(position).task_id for position in range(6)] == ["a/2", "b/0", "a/1", "a/3", "b/3", "a/0"]


def test_a_position_of_several_sets_gives_its_task_however_it_is_asked():
    sets = make_sets(0.5, 0.3, 0.2)
    forward = TaskOrder(sets, seed=1, shuffle=True)
    taken = [forward.at(position).task_id for position in range(500)]
    for position in (499, 3, 250):
        assert TaskOrder(sets, seed=1, shuffle=True).at(position).task_id == taken[position]


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.123456789, 1 / 3, 0.777, 2e-6), (1.0,) * 10, (1.0,)])
def test_a_run_resumes_at_a_far_position_at_once(weights):
    started = time.process_time()
    TaskOrder(make_sets(*weights, size=1000), seed=0, shuffle=True).at(10 * MAX_PERIOD - 1)
    assert time.process_time() - started < 1.0


def test_the_data_end_after_the_epochs_of_the_only_set(ten):
    order = TaskOrder([Dataset(tasks=ten)], seed=0, shuffle=True, epochs=2)
    assert Counter(order.at(position).task_id for position in range(20)) == {str(i): 2 for i in range(10)}
    assert order.at(20) is None


def test_the_data_of_several_sets_end_when_the_first_is_used_up():
    sets = [make_sets(3.0, 1.0, size=6)[0], make_sets(3.0, 1.0, size=50)[1]]
    order = TaskOrder(sets, seed=0, shuffle=False, epochs=1)
    # aabaaaba, then a: the seventh turn of the set of six is that of position 8.
    assert [order.at(position) is None for position in range(9)] == [False] * 8 + [True]
    assert [order.at(position).dataset for position in range(8)].count("a") == 6
    again = TaskOrder(sets, seed=0, shuffle=False, epochs=1)
    assert again.at(8) is None


@pytest.mark.parametrize("sets", [[], [Dataset(tasks=[])]])
def test_an_order_of_nothing_is_refused(sets):
    with pytest.raises(ValueError, match="at least one data set, and each at least one task"):
        TaskOrder(sets, seed=0, shuffle=True)
