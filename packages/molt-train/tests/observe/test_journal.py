"""The journal survives kills, resumes at a checkpoint, and can be read while it is written."""

import json
import math

import pytest

from molt.train.observe.journal import Journal, read_journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def steps(path):
    return [row["step"] for row in read_journal(path)]


def write(path, *rows):
    with Journal(path) as journal:
        for row in rows:
            journal.append(row)


def test_one_object_an_update_readable_at_once(path):
    with Journal(path) as journal:
        journal.append({"step": 1, "reward_mean": 0.25, "timing": {"total": 1.5}})
        assert read_journal(path) == [{"step": 1, "reward_mean": 0.25, "timing": {"total": 1.5}}]
        journal.append({"step": 2})
        assert [json.loads(line) for line in path.read_text().splitlines()] == read_journal(path)


def test_opening_again_goes_on_where_it_stopped(path):
    write(path, {"step": 1}, {"step": 2})
    write(path, {"step": 3})
    assert steps(path) == [1, 2, 3]


def test_updates_after_the_checkpoint_are_made_again(path):
    write(path, *({"step": step} for step in range(1, 6)))
    with Journal(path) as journal:
        journal.truncate_after(3)
        assert steps(path) == [1, 2, 3]
        journal.append({"step": 4, "again": True})
    assert read_journal(path)[-1] == {"step": 4, "again": True}
    with Journal(path) as journal:
        journal.truncate_after(0)
    assert steps(path) == []


def test_a_line_torn_by_a_kill_is_neither_read_nor_kept(path):
    write(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert steps(path) == [1]
    write(path, {"step": 2})
    assert steps(path) == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_a_damaged_line_is_named_with_its_file_and_number(path):
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a JSON object"):
        read_journal(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1 is not a JSON object"):
        Journal(path)


def test_what_is_not_finite_becomes_null_and_the_file_stays_json(path):
    write(path, {"step": 1, "loss": math.nan, "grad_norm": math.inf})
    assert read_journal(path) == [{"step": 1, "loss": None, "grad_norm": None}]


def test_no_second_file_is_left_behind(path):
    write(path, {"step": 1})
    assert list(path.parent.iterdir()) == [path]
