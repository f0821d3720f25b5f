"""Checkpoints are whole or absent, and no more of them stay than were asked for."""

import pytest

from molt.train.controller.checkpoints import Checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def write(checkpoints, step, content="x"):
    folder = checkpoints.begin(step)
    folder.mkdir()
    (folder / "state").write_text(content)
    return folder


def test_there_is_none_at_first(checkpoints):
    assert (checkpoints.steps(), checkpoints.latest()) == ([], None)


def test_a_checkpoint_that_was_not_committed_is_never_listed(checkpoints):
    write(checkpoints, 1)
    checkpoints.commit(1)
    write(checkpoints, 2)
    assert checkpoints.steps() == [1]
    step, folder = checkpoints.latest()
    assert (step, folder.name, (folder / "state").read_text()) == (1, "step-000001", "x")


def test_what_a_killed_process_left_half_written_is_not_mixed_into_the_next_try(checkpoints):
    (write(checkpoints, 1) / "torn").write_text("")
    write(checkpoints, 1)
    assert [entry.name for entry in checkpoints.commit(1).iterdir()] == ["state"]


def test_only_the_newest_stay(checkpoints):
    for step in (2, 4, 10):
        write(checkpoints, step)
        checkpoints.commit(step)
    assert checkpoints.steps() == [4, 10]
    assert checkpoints.latest()[0] == 10


def test_a_checkpoint_of_the_same_step_is_replaced(checkpoints):
    for content in ("old", "new"):
        write(checkpoints, 3, content)
        checkpoints.commit(3)
    assert (checkpoints.latest()[1] / "state").read_text() == "new"


def test_steps_are_ordered_as_numbers_and_what_is_no_checkpoint_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=5)
    for name in ("step-000009", "step-1000000", "step-000010", "step-7", "notes", "step-000011.partial"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert checkpoints.steps() == [9, 10, 1000000]
    assert checkpoints.latest()[1].name == "step-1000000"


def test_the_names_are_found_again_by_another_process(tmp_path):
    first = Checkpoints(tmp_path, keep=2)
    write(first, 1234567)
    first.commit(1234567)
    assert Checkpoints(tmp_path, keep=2).latest() == (1234567, tmp_path / "step-1234567")
