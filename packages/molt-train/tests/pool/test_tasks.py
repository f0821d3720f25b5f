import pytest

from molt.train.errors import ConfigError
from molt.train.pool.tasks import TaskOrder, load_tasks


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


@pytest.fixture
def ten(load):
    return load("".join(f'{{"q": {i}}}\n' for i in range(10)))


def order_of(tasks, count, **settings):
    order = TaskOrder(tasks, **settings)
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
    again = TaskOrder(ten, seed=1, shuffle=True)
    assert [again.at(position).task_id for position in reversed(range(40))] == order[::-1]


def test_the_order_is_pinned_since_a_resumed_run_depends_on_it(ten):
    assert order_of(ten, 5, seed=0, shuffle=True) == ["1", "0", "2", "4", "9"]
