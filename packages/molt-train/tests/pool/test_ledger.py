import sqlite3

import pytest

from molt.train.errors import ConfigError
from molt.train.pool.ledger import Ledger
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import WindowRow


@pytest.fixture
def complete(pool, task, report):
    """Make a complete group, taken from the pool; gives its id."""

    def make():
        group_id = pool.open_group(task(), kind="train", size=2, position=pool.next_position)
        for assignment in pool.acquire("w", 2):
            report(pool, assignment)
        assert [group.group_id for group in pool.take(1)] == [group_id]
        return group_id

    return make


def test_a_window_consumes_its_groups_and_is_read_back(pool, complete):
    first, second, third = complete(), complete(), complete()
    pool.ledger.record_window(1, 0, [second, first])
    pool.ledger.record_window(2, 1, [third])
    assert pool.ledger.windows() == [
        WindowRow(step=1, policy_version=0, group_ids=(second, first)),
        WindowRow(step=2, policy_version=1, group_ids=(third,)),
    ]
    assert [(g.state, g.step) for g in pool.ledger.groups()] == [("consumed", 1), ("consumed", 1), ("consumed", 2)]


def test_no_group_is_consumed_twice_and_a_refused_window_leaves_nothing(pool, complete):
    first, second = complete(), complete()
    pool.ledger.record_window(1, 0, [first])
    with pytest.raises(ValueError, match=f"group '{first}' is consumed, not complete"):
        pool.ledger.record_window(2, 1, [second, first])
    assert pool.ledger.group(second).state == "complete"
    assert len(pool.ledger.windows()) == 1


def test_the_same_window_may_be_recorded_again_but_no_other_under_its_step(pool, complete):
    first, second = complete(), complete()
    pool.ledger.record_window(1, 0, [first])
    pool.ledger.record_window(1, 0, [first])
    assert len(pool.ledger.windows()) == 1
    with pytest.raises(ValueError, match="step 1 has a window already"):
        pool.ledger.record_window(1, 0, [second])


def test_rewind_gives_the_windows_after_a_step_and_their_groups_as_recorded(make_pool, pool, complete):
    ids = [complete() for _ in range(3)]
    before = [pool.ledger.rollouts(group_id) for group_id in ids]
    for step, group_id in enumerate(ids, start=1):
        pool.ledger.record_window(step, step - 1, [group_id])
    pool = make_pool()
    windows = pool.ledger.rewind(1)
    assert [(w.step, w.policy_version, w.group_ids) for w in windows] == [(2, 1, (ids[1],)), (3, 2, (ids[2],))]
    assert pool.num_ready == 0, "groups of lost updates stay with their windows"
    [group] = pool.recorded_groups(windows[0].group_ids)
    assert group.group_id == ids[1]
    assert [r.outcome.reward for r in group.rollouts] == [1.0, 1.0]
    assert [e.payload.token_ids.tolist() for r in group.rollouts for e in r.experiences] == [[7, 8, 9, 10]] * 2
    assert [r.recording for r in before[1]] == [r.recording for r in pool.ledger.rollouts(ids[1])]
    for window in windows:
        pool.ledger.record_window(window.step, window.policy_version, window.group_ids)
    assert [e.detail for e in pool.ledger.events() if e.kind == "rewind"] == [{"to_step": 1, "lost_steps": [2, 3]}]


def test_only_consumed_groups_can_be_trained_again(pool, complete):
    with pytest.raises(ValueError, match="is complete, not consumed"):
        pool.recorded_groups([complete()])


def test_a_reader_sees_what_a_running_writer_committed(tmp_path, pool, complete):
    group_id = complete()
    reader = LedgerReader.open(tmp_path / "ledger.sqlite")
    [group] = reader.groups()
    assert (group.group_id, group.task.data, group.position) == (group_id, {"question": "t"}, 0)
    first = reader.rollouts(group_id)[0]
    assert first.outcome.reward == 1.0
    assert first.recording.delivered_fraction == 0.5
    assert first.recording.counters == {"turns": 1}
    assert first.recording.segments[0].versions == [None, None, 0, 0]
    assert first.recording.turns[0].logprobs == [-0.25, -0.5]
    assert {lease.state for lease in reader.leases()} == {"reported"}
    assert all(result.counted for result in reader.results())
    pool.ledger.record_window(1, 0, [group_id])
    assert len(reader.windows()) == 1
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._db.execute("DELETE FROM groups")
    reader.close()


def test_a_closed_ledger_can_be_read(tmp_path, pool, complete):
    complete()
    pool.ledger.close()
    reader = LedgerReader.open(tmp_path / "ledger.sqlite")
    assert len(list(reader.groups())) == 1
    reader.close()


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    first = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(ConfigError, match="is in use by another process"):
        Ledger(tmp_path / "ledger.sqlite")
    first.close()
    Ledger(tmp_path / "ledger.sqlite").close()


def test_what_is_no_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(ConfigError, match="does not exist"):
        LedgerReader.open(path)
    path.write_bytes(b"not a database, but long enough to have a header" * 100)
    for open_it in (Ledger, LedgerReader.open):
        with pytest.raises(ConfigError, match=r"ledger\.sqlite' cannot be opened"):
            open_it(path)


def test_another_schema_version_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '999'")
    db.close()
    for open_it in (Ledger, LedgerReader.open):
        with pytest.raises(ConfigError, match="has schema version 999, not 1"):
            open_it(path)


def test_the_data_position_goes_on_after_a_restart(make_pool, task):
    pool = make_pool()
    assert pool.next_position == 0
    pool.open_group(task(), kind="train", size=1, position=0)
    pool.open_group(task(), kind="eval", size=1, position=None)
    pool.open_group(task(), kind="train", size=1, position=1)
    assert pool.next_position == 2
    assert make_pool().next_position == 2


@pytest.fixture
def full_disk(pool):
    """Let the ledger's file grow no further, until called again."""

    def switch(*, full):
        pages = pool.ledger._db.execute("PRAGMA page_count").fetchone()[0]
        pool.ledger._db.execute(f"PRAGMA max_page_count = {pages if full else 1 << 30}")

    return switch


def test_on_a_full_disk_a_result_is_refused_whole_and_counts_when_there_is_room(pool, task, report, full_disk):
    pool.open_group(task("x" * 10_000), kind="train", size=1, position=0)
    [assignment] = pool.acquire("w", 1)
    full_disk(full=True)
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            report(pool, assignment, error="e" * 100_000)
    assert pool.num_ready == 0
    assert list(pool.ledger.results()) == []
    assert pool.check(assignment.lease_id, 1) is None
    full_disk(full=False)
    assert report(pool, assignment).accepted
    assert pool.num_ready == 1


def test_on_a_full_disk_no_lease_is_granted_and_none_is_lost(pool, task, full_disk):
    for position in range(50):
        pool.open_group(task("x" * 1000), kind="train", size=8, position=position)
    full_disk(full=True)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        pool.acquire("w" * 10_000, 400)
    assert list(pool.ledger.leases()) == []
    full_disk(full=False)
    assert len(pool.acquire("w", 400)) == 400
