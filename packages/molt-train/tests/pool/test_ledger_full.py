"""A full disk: what cannot be written is refused whole, in tables and payload files, and may be sent again."""

import errno
import os

import pytest

from molt.train.config import PoolConfig
from molt.train.errors import LedgerFullError
from molt.train.pool.disk import DiskRoom
from molt.train.pool.ledger import Ledger
from molt.train.pool.payloads import payload_file


@pytest.fixture
def full_disk(pool):
    """Let the ledger's main file grow no further, until called again."""

    def switch(*, full):
        pages = pool.ledger._db.execute("PRAGMA page_count").fetchone()[0]
        pool.ledger._db.execute(f"PRAGMA max_page_count = {pages if full else 1 << 30}")

    return switch


@pytest.fixture
def no_space(monkeypatch):
    """Let no payload be written to the end: the disk is full after `written` bytes."""

    def fill(written):
        write = os.pwrite

        def part(file, parts, offset):
            return write(file, b"".join(parts)[:written], offset)

        def nothing(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwritev", part)
        monkeypatch.setattr(os, "pwrite", nothing)

    return fill


def payload_bytes(tmp_path):
    return payload_file(tmp_path / "payloads", 1).stat().st_size


def test_a_result_is_refused_whole_and_counts_when_there_is_room(tmp_path, pool, task, report, full_disk):
    pool.open_group(task("x" * 10_000), kind="train", size=1, position=0)
    [assignment] = pool.acquire("w", 1)
    full_disk(full=True)
    for _ in range(2):
        with pytest.raises(LedgerFullError, match=r"no room for the ledger in .*full; free some disk"):
            report(pool, assignment, error="e" * 100_000)
    assert not pool.ledger.has_room()
    assert pool.num_ready == 0
    assert list(pool.ledger.results()) == []
    assert payload_bytes(tmp_path) == 0, "the payload was written before the table refused"
    assert pool.check(assignment.lease_id, 1) is None
    full_disk(full=False)
    assert report(pool, assignment).accepted
    assert pool.num_ready == 1
    assert len(list(pool.ledger.recordings())) == 1


@pytest.mark.parametrize("written", [0, 10, 100])
def test_a_payload_that_finds_no_room_leaves_nothing_in_the_tables(
    tmp_path, pool, task, report, no_space, monkeypatch, written
):
    pool.open_group(task(), kind="train", size=2, position=0)
    first, second = pool.acquire("w", 2)
    assert report(pool, first).accepted
    size = payload_bytes(tmp_path)
    with monkeypatch.context():
        no_space(written)
        with pytest.raises(LedgerFullError, match="No space left on device"):
            report(pool, second)
        monkeypatch.undo()
    assert payload_bytes(tmp_path) == size
    assert len(list(pool.ledger.results())) == 1
    assert pool.ledger.lease(second.lease_id).state == "granted"
    assert report(pool, second).group is not None
    assert len(list(pool.ledger.recordings())) == 2


def test_no_lease_is_granted_and_none_is_lost(pool, task, full_disk):
    for position in range(50):
        pool.open_group(task("x" * 1000), kind="train", size=8, position=position)
    full_disk(full=True)
    with pytest.raises(LedgerFullError):
        pool.acquire("w" * 10_000, 400)
    assert list(pool.ledger.leases()) == []
    full_disk(full=False)
    assert len(pool.acquire("w", 400)) == 400


def test_every_write_says_so(pool, full_disk):
    full_disk(full=True)
    text = "x" * 100_000
    for write in (
        lambda ledger: ledger.record_event("kind", {"text": text}),
        lambda ledger: ledger.add_quarantine("t", [text]),
    ):
        with pytest.raises(LedgerFullError):
            write(pool.ledger)
    full_disk(full=False)
    assert pool.ledger.quarantined() == {}


def test_a_log_that_cannot_be_moved_into_the_main_file_stays_and_the_write_stands(
    tmp_path, pool, task, report, monkeypatch, caplog
):
    monkeypatch.setattr("molt.train.pool.store.CHECKPOINT_BYTES", 0)
    monkeypatch.setattr(pool.ledger, "_next_checkpoint", 0.0)

    def full():
        raise LedgerFullError("no room")

    monkeypatch.setattr(pool.ledger, "mark_synced", full)
    pool.open_group(task(), kind="train", size=1, position=0)
    assert "the write-ahead log of the ledger stays as it is: no room" in caplog.text
    assert len(pool.acquire("w", 1)) == 1


def test_room_is_what_the_setting_asks_for(tmp_path, clock):
    free = 65 * 1024 * 1024
    for min_free_mb, has_room in ((64, True), (66, False)):
        settings = PoolConfig(min_free_mb=min_free_mb)
        room = DiskRoom(tmp_path, min_free=min_free_mb * 1024 * 1024, measure=lambda _: free, clock=clock)
        ledger = Ledger(tmp_path / "ledger.db", settings, room=room)
        assert ledger.has_room() is has_room
        ledger.close()
    ledger = Ledger(tmp_path / "ledger.db", PoolConfig(min_free_mb=1 << 40))
    assert not ledger.has_room()
    ledger.close()
