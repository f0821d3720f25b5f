import sqlite3

import pytest

from molt.train.errors import ConfigError
from molt.train.pool.ledger import Ledger
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import SessionRow, WindowRow
from molt.train.records.rollout import Outcome, Task


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "own" / "ledger.db")
    yield ledger
    ledger.close()


def test_a_group_keeps_its_whole_task(make_pool):
    task = Task(task_id="t", data={"question": 1}, dataset="maths", labels={"gpu": "h200"})
    make_pool().open_group(task, kind="train", size=1, position=0)
    [group] = make_pool().ledger.live_groups()
    assert group.task == task


def test_a_group_is_closed_from_the_state_it_is_in_and_from_no_other(pool, complete, task):
    opened = pool.open_group(task(), kind="train", size=1, position=0)
    with pytest.raises(ValueError, match=f"group '{opened}' is open, not complete, so it cannot become dropped"):
        pool.ledger.close_group(opened, "dropped", reason="stale", old="complete")
    pool.ledger.close_group(opened, "dropped", reason="stale")
    group = pool.ledger.group(opened)
    assert (group.state, group.reason) == ("dropped", "stale")


def test_sessions_that_no_worker_drives_are_found_again(ledger):
    rows = [
        SessionRow(session_id="b", group="k", task=Task(task_id="t", data={}), metadata={"user": 1}, opened=1.0),
        SessionRow(session_id="a", group=None, task=None, metadata={}, opened=2.0),
        SessionRow(session_id="c", group=None, task=None, metadata={}, opened=3.0),
    ]
    for row in rows:
        ledger.add_session(row)
    assert ledger.open_sessions() == rows
    ledger.move_session("b", "idle")
    ledger.move_session("c", "closed")
    assert [(row.session_id, row.state) for row in ledger.open_sessions()] == [("b", "idle"), ("a", "open")]
    ledger.move_session("b", "expired")
    assert ledger.session("b").state == "expired"
    assert ledger.session("other") is None
    with pytest.raises(ValueError, match="session 'other' is unknown"):
        ledger.move_session("other", "idle")


def test_a_quarantined_task_is_kept_with_its_errors(ledger):
    assert ledger.quarantined() == {}
    ledger.add_quarantine("t2", ["a", "b"])
    ledger.add_quarantine("t1", ["c"])
    ledger.add_quarantine("t2", ["d"])
    assert ledger.quarantined() == {"t1": ["c"], "t2": ["d"]}


def test_gradings_are_kept_by_name_and_the_last_word_counts(ledger):
    ledger.add_grade("strict", "g1.0", Outcome(kind="completed", reward=0.0, info={"tests": [1, 2]}))
    ledger.add_grade("strict", "g1.1", Outcome(kind="failed", error="no answer"))
    ledger.add_grade("strict", "g1.0", Outcome(kind="completed", reward=1.0))
    ledger.add_grade("lenient", "g1.0", Outcome(kind="completed", reward=0.5))
    assert ledger.grade_names() == ["lenient", "strict"]
    assert ledger.grades("strict") == {
        "g1.0": Outcome(kind="completed", reward=1.0),
        "g1.1": Outcome(kind="failed", error="no answer"),
    }
    assert ledger.grades("unknown") == {}


def test_outcomes_are_read_without_recordings(pool, complete):
    group_id = complete()
    read = pool.ledger.outcomes(group_id)
    assert [row.recording for row in read] == [None, None]
    assert [row.outcome for row in read] == [row.outcome for row in pool.ledger.rollouts(group_id)]


@pytest.mark.parametrize("statement", ["next_seq", "next_position", "live_groups", "open_sessions"])
def test_what_a_start_asks_for_is_found_without_looking_through_a_table(ledger, statement):
    asked = []
    ledger._db.set_trace_callback(asked.append)
    getattr(ledger, statement)()
    ledger._db.set_trace_callback(None)
    plan = [row[3] for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {asked[0]}")]
    assert all("SEARCH" in step or "INDEX" in step or "B-TREE" in step for step in plan), plan


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
        with pytest.raises(ConfigError, match="has schema version 999, not 2"):
            open_it(path)


def test_the_data_position_goes_on_after_a_restart(make_pool, task):
    pool = make_pool()
    assert pool.next_position == 0
    pool.open_group(task(), kind="train", size=1, position=0)
    pool.open_group(task(), kind="eval", size=1, position=None)
    pool.open_group(task(), kind="train", size=1, position=1)
    assert pool.next_position == 2
    assert make_pool().next_position == 2
