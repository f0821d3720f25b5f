import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WRITER = Path(__file__).with_name("crash_writer.py")


def run_until_killed(path, num_lines):
    """Start the writer, kill -9 it in full flight after `num_lines` answers; returns all that it said."""
    with subprocess.Popen([sys.executable, WRITER, path], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(num_lines)]
        process.kill()
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL, "the writer died of something else"
    return [line.split() for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_was_acknowledged_survives_kill_9_whole_and_once(tmp_path, clock, open_pool, seed):
    rng = random.Random(seed)
    path = tmp_path / "ledger.sqlite"
    accepted, windows = {}, {}
    for _ in range(3):
        for word, name, *rest in run_until_killed(path, rng.randint(1, 60)):
            if word == "accepted":
                assert name not in accepted, "a finished rollout ran again"
                accepted[name] = (float(rest[0]), int(rest[1]))
            else:
                windows[int(name)] = tuple(rest)

        pool = open_pool(path, clock)
        finished = {}
        for group in pool.ledger.groups():
            rows = pool.ledger.rollouts(group.group_id)
            assert len(rows) == group.size, "a group was opened by half"
            done = {r.rollout_id: (r.outcome.reward, len(r.recording.segments[0].token_ids)) for r in rows if r.outcome}
            finished |= done
            assert (len(done) == group.size) == (group.state != "open")
        assert accepted.items() <= finished.items()
        assert len(finished) <= len(accepted) + 3, "at most the one under way at each kill"
        recorded = {window.step: window.group_ids for window in pool.ledger.windows()}
        assert windows.items() <= recorded.items()
        consumed = [group_id for ids in recorded.values() for group_id in ids]
        assert len(consumed) == len(set(consumed))
        pool.ledger.close()
        accepted, windows = finished, recorded
