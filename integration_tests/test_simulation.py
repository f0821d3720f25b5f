"""A short simulation: every kind of fault within seconds, and books that balance; `make simulation` is the long one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.conftest import descendants

pytestmark = pytest.mark.timeout(300)


def test_the_books_of_a_short_run_balance_whatever_goes_wrong(tmp_path):
    command = [sys.executable, "-m", "integration_tests.simulation", "--rollouts", "300", "--seed", "1"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--limit-s", "240"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert figures["violations"] == 0
    assert figures["results_counted"] >= 240
    assert set(figures["faults"]) == {"kill_server", "kill_worker", "stop_worker", "step_clock", "cut_off"}
    assert figures["servers"] == 1 + figures["faults"]["kill_server"]
    assert figures["connections_cut"] > 0
    assert figures["leases"]["late"] > 0, "no result came late, so none was refused"
    assert not [pid for pid in descendants(os.getpid()) if "simulation" in _command_of(pid)]


def _command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
