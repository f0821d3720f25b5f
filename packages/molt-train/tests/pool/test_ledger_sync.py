"""What survives a loss of power: the disk as it may have been left is put together from what was synced and when.

`Disk` notes how much of each payload file, and of the write-ahead log, was forced to disk. Of the rest any part may be
there: the tests take the worst, in which the system wrote the one file early and the other not at all.
"""

import os
import shutil

import pytest

from molt.train.config import PoolConfig
from molt.train.pool.ledger import Ledger
from molt.train.pool.payloads import payload_file
from molt.train.pool.reader import LedgerReader
from molt.train.records.rollout import Outcome


class Disk:
    """How long the synced part of each file is, by inode."""

    def __init__(self, monkeypatch):
        self.synced, self.num_syncs = {}, 0
        monkeypatch.setattr(os, "fdatasync", self.sync)

    def sync(self, file):
        stat = os.fstat(file)
        self.synced[stat.st_ino] = stat.st_size
        self.num_syncs += 1

    def length(self, path):
        return self.synced.get(path.stat().st_ino, 0)


@pytest.fixture
def disk(monkeypatch):
    # No thread: the test says when.
    monkeypatch.setattr("molt.train.pool.disk.SyncThread.written", lambda _: None)
    return Disk(monkeypatch)


def lose_power(folder, into, disk, *, keep_log, keep_payloads):
    """The ledger's files as a machine finds them that lost its power; what is not kept is as long as it was synced."""
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    for path, keep in ((folder / "ledger.sqlite-wal", keep_log), (payload_file(folder / "payloads", 1), keep_payloads)):
        if not keep:
            os.truncate(into / path.relative_to(folder), disk.length(path))


def run_group(pool, task, report, *, size=2):
    group_id = pool.open_group(task(), kind="train", size=size, position=pool.next_position)
    for assignment in pool.acquire("w", size):
        assert report(pool, assignment).accepted
    return group_id


@pytest.mark.parametrize("keep_log", [True, False])
@pytest.mark.parametrize("keep_payloads", [True, False])
def test_a_recorded_window_survives_with_all_that_came_before(
    tmp_path, disk, pool, task, report, keep_log, keep_payloads
):
    ids = [run_group(pool, task, report) for _ in range(3)]
    pool.take(3)
    pool.ledger.record_window(1, 0, ids)
    before = [pool.ledger.rollouts(group_id) for group_id in ids]
    run_group(pool, task, report)
    lose_power(tmp_path, tmp_path / "after", disk, keep_log=keep_log, keep_payloads=keep_payloads)
    ledger = Ledger(tmp_path / "after" / "ledger.sqlite")
    ledger.recover()
    assert [window.group_ids for window in ledger.windows()] == [tuple(ids)]
    assert [ledger.rollouts(group_id) for group_id in ids] == before
    assert list(ledger.damaged()) == []
    ledger.close()


def test_results_whose_payloads_were_lost_are_made_again_and_no_others(
    tmp_path, disk, clock, open_pool, pool, task, report
):
    synced = run_group(pool, task, report)
    pool.ledger.sync()
    opened = pool.open_group(task(), kind="train", size=2, position=1)
    first, second = pool.acquire("w", 2)
    report(pool, first)
    pool.ledger.sync()
    report(pool, second)
    lost = run_group(pool, task, report, size=1)
    assert pool.num_ready == 3
    lose_power(tmp_path, tmp_path / "after", disk, keep_log=True, keep_payloads=False)
    after = open_pool(tmp_path / "after" / "ledger.sqlite", clock)
    assert [(g.group_id, g.state) for g in after.ledger.live_groups()] == [
        (opened, "open"),
        (lost, "open"),
        (synced, "complete"),
    ]
    assert after.num_ready == 1
    again = after.acquire("w", 8)
    assert [(a.rollout_id, a.attempt) for a in again] == [(second.rollout_id, 2), (f"{lost}.0", 2)]
    for assignment in again:
        assert report(after, assignment).accepted
    assert after.num_ready == 3
    assert list(after.ledger.damaged()) == []
    uncounted = [result for result in after.ledger.results() if not result.counted]
    assert [result.rollout_id for result in uncounted] == [second.rollout_id, f"{lost}.0"]
    assert all(result.reason.startswith("its recording was lost: payload file") for result in uncounted)
    assert [event.kind for event in after.ledger.events()] == ["recording_lost"] * 2
    after.ledger.close()


def test_a_live_group_whose_payload_was_damaged_later_is_made_whole_again(tmp_path, make_pool, task, report):
    pool = make_pool()
    group_id = run_group(pool, task, report)
    pool.ledger.close()
    path = payload_file(tmp_path / "payloads", 1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    pool = make_pool()
    assert pool.num_ready == 0
    [assignment] = pool.acquire("w", 2)
    assert (assignment.rollout_id, assignment.attempt) == (f"{group_id}.1", 2)
    assert report(pool, assignment).group is not None


def test_a_collected_group_that_lost_a_session_fails_since_nobody_would_run_it_again(
    tmp_path, disk, task, recording, pool
):
    for name in ("a", "b"):
        outcome = Outcome(kind="completed", reward=1.0)
        pool.collect("key", task=task(), size=3, outcome=outcome, recording=recording(name))
    lose_power(tmp_path, tmp_path / "after", disk, keep_log=True, keep_payloads=False)
    ledger = Ledger(tmp_path / "after" / "ledger.sqlite")
    ledger.recover()
    [group] = ledger.groups()
    assert (group.state, group.reason) == ("failed", "a recording was lost")
    ledger.close()


def test_the_main_file_never_names_what_is_not_on_disk(tmp_path, disk, pool, task, report, monkeypatch):
    monkeypatch.setattr("molt.train.pool.store.CHECKPOINT_BYTES", 0)
    monkeypatch.setattr("molt.train.pool.store.CHECKPOINT_S", 0.0)
    for number in range(3):
        run_group(pool, task, report)
        # As if the log had never been: only the main file, and of the payloads what was synced.
        into = tmp_path.parent / f"{tmp_path.name}-main-{number}"
        lose_power(tmp_path, into, disk, keep_log=True, keep_payloads=False)
        os.truncate(into / "ledger.sqlite-wal", 0)
        reader = LedgerReader.open(into / "ledger.sqlite")
        assert len(list(reader.recordings())) == 2 * (number + 1)
        reader.close()


@pytest.mark.parametrize("sync", ["window", "always"])
def test_always_means_before_it_returns(tmp_path, disk, recording, sync):
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite", PoolConfig(sync=sync))
    for number in range(3):
        ledger.add_recording(recording(f"s{number}"))
        lose_power(tmp_path / "run", tmp_path / f"after{number}", disk, keep_log=False, keep_payloads=False)
        after = Ledger(tmp_path / f"after{number}" / "ledger.sqlite")
        assert len(list(after.recordings())) == (number + 1 if sync == "always" else 0)
        after.close()
    ledger.close()


def test_a_transaction_that_was_written_is_handed_to_the_thread(tmp_path, recording, monkeypatch):
    written = []
    monkeypatch.setattr("molt.train.pool.disk.SyncThread.written", lambda _: written.append(None))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_recording(recording("s"))
    assert len(written) == 1
    ledger.close()


def test_an_interrupt_right_after_the_commit_takes_no_payload_away(tmp_path, pool, recording, monkeypatch):
    """The interrupt comes before the transaction knows that it is committed."""
    ledger, db = pool.ledger, pool.ledger._db

    class Interrupted:
        in_transaction = property(lambda _: db.in_transaction)

        def execute(self, statement, *values):
            done = db.execute(statement, *values)
            if statement == "COMMIT":
                raise KeyboardInterrupt
            return done

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_db", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            ledger.add_recording(recording("s"))
    assert ledger.recording("s") == recording("s")


def test_a_block_that_raises_has_changed_nothing(tmp_path, pool, recording):
    def fail():
        with pool.ledger.transaction():
            pool.ledger.add_recording(recording("s"))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert list(pool.ledger.recordings()) == []
    assert payload_file(tmp_path / "payloads", 1).stat().st_size == 0
