# ruff: noqa: TID252 - the folders of tests are no installed package
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .crash_writer import POINTS, segment_of

WRITER = Path(__file__).with_name("crash_writer.py")


def run_until_killed(path, num_lines, *points):
    """Start the writer, and kill -9 it in full flight after `num_lines` answers, where it does not itself at a point.

    Returns all that it said.
    """
    with subprocess.Popen([sys.executable, WRITER, path, *points], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(num_lines)]
        if not points:
            process.kill()
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL, "the writer died of something else"
    return [line.split() for line in lines if line.endswith("\n")]


@pytest.fixture
def check(tmp_path, clock, open_pool):
    """Look at the ledger after a death: `accepted` and `windows` are what was acknowledged until then.

    Returns what the ledger holds of both.
    """

    def look(accepted, windows, *, num_deaths=1):
        pool = open_pool(tmp_path / "ledger.sqlite", clock)
        finished = {}
        for group in pool.ledger.groups():
            rows = pool.ledger.rollouts(group.group_id)
            assert len(rows) == group.size, "a group was opened by half"
            done = {row.rollout_id: row for row in rows if row.outcome}
            for row in done.values():
                [segment] = row.recording.segments
                assert segment == segment_of(len(segment.token_ids)), "a payload is not what was written"
                finished[row.rollout_id] = (row.outcome.reward, len(segment.token_ids))
            assert (len(done) == group.size) == (group.state != "open")
        assert accepted.items() <= finished.items()
        assert len(finished) <= len(accepted) + num_deaths, "at most the one under way at each death"
        assert list(pool.ledger.damaged()) == []
        recorded = {window.step: window.group_ids for window in pool.ledger.windows()}
        assert windows.items() <= recorded.items()
        consumed = [group_id for ids in recorded.values() for group_id in ids]
        assert len(consumed) == len(set(consumed))
        pool.ledger.close()
        return finished, recorded

    return look


def note(said, accepted, windows):
    """Add what the writer said."""
    for word, name, *rest in said:
        if word == "accepted":
            assert name not in accepted, "a finished rollout ran again"
            accepted[name] = (float(rest[0]), int(rest[1]))
        else:
            windows[int(name)] = tuple(rest)


@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_was_acknowledged_survives_kill_9_whole_and_once(tmp_path, check, seed):
    rng = random.Random(seed)
    accepted, windows = {}, {}
    for _ in range(3):
        note(run_until_killed(tmp_path / "ledger.sqlite", rng.randint(1, 60)), accepted, windows)
        accepted, windows = check(accepted, windows)


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_point_of_a_write_loses_nothing_that_was_acknowledged(tmp_path, check, point):
    accepted, windows = {}, {}
    note(run_until_killed(tmp_path / "ledger.sqlite", 0, point), accepted, windows)
    assert accepted
    accepted, windows = check(accepted, windows)
    note(run_until_killed(tmp_path / "ledger.sqlite", 30), accepted, windows)
    check(accepted, windows)
