"""Checkpoints are whole or absent, and no more of them stay than were asked for."""

import os
import shutil
from pathlib import Path

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


def test_the_best_one_stays_however_old_it_is(checkpoints):
    for step in (1, 2):
        write(checkpoints, step)
        checkpoints.commit(step)
    assert checkpoints.best is None
    checkpoints.mark_best(1)
    for step in (3, 4, 5):
        write(checkpoints, step)
        checkpoints.commit(step)
    assert (checkpoints.steps(), checkpoints.best) == ([1, 4, 5], 1)
    assert checkpoints.latest()[0] == 5


def test_the_former_best_one_goes_when_it_is_old(checkpoints):
    for step in (1, 2, 3):
        write(checkpoints, step)
        checkpoints.commit(step)
        checkpoints.mark_best(1 if step < 3 else 3)
    assert (checkpoints.steps(), checkpoints.best) == ([2, 3], 3)


def test_the_mark_is_a_link_that_another_process_reads_and_that_moves_with_the_folder(tmp_path):
    first = Checkpoints(tmp_path / "run", keep=1)
    for step in (1, 2):
        write(first, step, str(step))
        first.commit(step)
        first.mark_best(1)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert Checkpoints(tmp_path / "moved", keep=1).best == 1
    assert (tmp_path / "moved" / "best" / "state").read_text() == "1"


def test_only_a_checkpoint_can_be_the_best(checkpoints):
    with pytest.raises(ValueError, match="update 7 has no checkpoint"):
        checkpoints.mark_best(7)


def test_what_a_checkpoint_holds_is_on_the_disk_before_it_gets_its_name(checkpoints, monkeypatch):
    """A loss of power after the rename must not find an empty file under the checkpoint's name."""
    order, rename, fsync = [], Path.rename, os.fsync

    def spy_rename(path, target):
        order.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    def spy_fsync(descriptor):
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    folder = write(checkpoints, 1)
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("w")
    monkeypatch.setattr(Path, "rename", spy_rename)
    monkeypatch.setattr(os, "fsync", spy_fsync)
    checkpoints.commit(1)
    renamed = order.index("step-000001.partial -> step-000001")
    assert {"state", "weights", "model", "step-000001.partial"} <= set(order[:renamed])
    assert order[renamed + 1 :] == ["checkpoints"]


def test_a_checkpoint_that_a_kill_left_half_removed_is_none(checkpoints, monkeypatch):
    for step in (1, 2):
        write(checkpoints, step)
        checkpoints.commit(step)
    write(checkpoints, 3)
    remove = shutil.rmtree

    def die(path, **options):
        if path.name.endswith(".removed") and path.exists():
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.commit(3)
    assert checkpoints.steps() == [2, 3]
