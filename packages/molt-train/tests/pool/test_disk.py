"""What counts as a full disk, how room is measured, and that written data is forced to disk in time."""

import errno
import sqlite3
import threading

import pytest

from molt.train.errors import LedgerFullError, RunError
from molt.train.pool.disk import DiskRoom, SyncThread, free_bytes


class Disk:
    def __init__(self, free):
        self.free, self.num_asked = free, 0

    def __call__(self, folder):
        self.num_asked += 1
        return self.free


@pytest.fixture
def disk():
    return Disk(100)


@pytest.fixture
def room(tmp_path, clock, disk):
    return DiskRoom(tmp_path, min_free=100, measure=disk, clock=clock)


def test_there_is_room_while_the_least_that_must_be_free_is(room, disk, clock):
    assert room.has_room()
    disk.free = 99
    assert room.has_room(), "as it was less than a second ago"
    clock.now += 1
    assert not room.has_room()
    disk.free = 100
    clock.now += 1
    assert room.has_room()
    assert disk.num_asked == 3


def test_the_free_space_of_a_folder_is_that_of_its_disk(tmp_path):
    assert free_bytes(tmp_path) > 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_found_no_room_closes_it_for_a_second_however_much_is_free(room, clock, code):
    assert room.has_room()
    with pytest.raises(LedgerFullError, match=r"no room for the ledger in .*; free some disk"), room.needed():
        raise OSError(code, "full")
    assert not room.has_room()
    clock.now += 1
    assert room.has_room()


def test_other_errors_are_not_the_disks(room):
    for error in (OSError(errno.EIO, "broken"), sqlite3.OperationalError("no such table"), ValueError("x")):
        with pytest.raises(type(error)), room.needed():
            raise error
    assert room.has_room()


def test_what_is_written_is_synced_soon_once_for_many_writes():
    synced = threading.Event()
    thread = SyncThread(synced.set, interval_s=0.0)
    for _ in range(3):
        synced.clear()
        thread.written()
        assert synced.wait(10)
    thread.close()


def test_a_write_during_a_sync_is_followed_by_another():
    started, go_on, done = threading.Semaphore(0), threading.Semaphore(0), []

    def sync():
        started.release()
        go_on.acquire()
        done.append(None)

    thread = SyncThread(sync, interval_s=0.0)
    thread.written()
    assert started.acquire(timeout=10)
    thread.written()
    go_on.release()
    assert started.acquire(timeout=10), "the second write was covered by no sync"
    go_on.release()
    thread.close()
    assert len(done) == 2


@pytest.mark.parametrize("is_threaded", [False, True])
def test_a_disk_that_failed_to_take_what_was_written_is_not_trusted_again(is_threaded):
    called, failures = threading.Event(), [OSError(errno.EIO, "Input/output error")]

    def sync():
        called.set()
        if failures:
            raise failures.pop()

    thread = SyncThread(sync, interval_s=0.0)
    thread.check()
    if is_threaded:
        thread.written()
        assert called.wait(10)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            thread.now()
    thread.close()
    with pytest.raises(RunError, match=r"the ledger cannot be forced to disk: .*Input/output error"):
        thread.check()
