"""Processes are killed without warning; every finished group is trained exactly once all the same."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from integration_tests.conftest import COMMAND, descendants, rows, wait_for_updates, wait_until_serving
from molt.train.pool.reader import LedgerReader

pytestmark = pytest.mark.timeout(420)


def events(folder, kind):
    reader = LedgerReader.open(folder / "ledger.db")
    try:
        return [event.detail for event in reader.events() if event.kind == kind]
    finally:
        reader.close()


def assert_trained_exactly_once(folder, num_updates):
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, num_updates + 1))
    reader = LedgerReader.open(folder / "ledger.db")
    windows = reader.windows()
    states = Counter(group.state for group in reader.groups() if group.kind == "train")
    reader.close()
    consumed = Counter(group_id for window in windows for group_id in window.group_ids)
    # A run that was stopped may have recorded a window that it did not come to train.
    assert [window.step for window in windows][:num_updates] == list(range(1, num_updates + 1))
    assert len(windows) - num_updates in {0, 1}
    assert set(consumed.values()) == {1}
    assert states["consumed"] == len(consumed)
    audit = subprocess.run([*COMMAND, "audit", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert audit.returncode == 0, audit.stdout


def test_a_killed_worker_and_a_killed_engine_cost_nothing(start, run_arguments, tmp_path):
    folder = tmp_path / "run"
    process = start(
        *run_arguments,
        f"run.dir={folder}",
        "train.num_updates=100000",
        "train.checkpoint_every=0",
        "train.max_staleness=0",  # no group can be too old by the time that what it lost was run again
        "pool.lease_ttl_s=3",
        "actor.optimizer.lr=1e-4",
    )
    wait_until_serving(process)
    wait_for_updates(process, folder, 2)

    kill_worker_mid_rollout(folder, events(folder, "worker_started")[0]["pid"])
    wait_for_updates(process, folder, len(rows(folder / "metrics.jsonl")) + 2)

    (engine,) = events(folder, "engine_started")
    os.kill(engine_core(engine["pid"]), signal.SIGKILL)
    while not events(folder, "engine_restarted"):
        assert process.popen.poll() is None, process.stderr[-3000:]
        time.sleep(0.2)
    wait_for_updates(process, folder, len(rows(folder / "metrics.jsonl")) + 2)

    left = descendants(process.popen.pid)
    process.popen.terminate()
    assert process.wait(60) == 1
    assert "stopped by SIGTERM; the same command goes on" in process.stderr
    wait_until_gone(left)
    assert events(folder, "worker_died")
    assert len(events(folder, "engine_died")) == len(events(folder, "engine_restarted")) == 1
    assert "engine_died" in process.stderr, "the death of an engine must be in the log, too"
    assert "worker_died" in process.stderr
    assert max(row["staleness_max"] for row in rows(folder / "metrics.jsonl")) == 0
    assert_trained_exactly_once(folder, len(rows(folder / "metrics.jsonl")))
    reader = LedgerReader.open(folder / "ledger.db")
    leases = list(reader.leases())
    reader.close()
    again = {lease.rollout_id for lease in leases if lease.state == "expired"}
    finished = {lease.rollout_id for lease in leases if lease.state == "reported" and lease.attempt > 1}
    assert again, "what the killed worker held did not expire"
    assert again <= finished


def test_a_killed_server_resumes(start, run_arguments, tmp_path):
    folder = tmp_path / "run"
    arguments = [
        *run_arguments,
        f"run.dir={folder}",
        "train.num_updates=14",
        "train.max_staleness=0",
        "train.checkpoint_every=4",
        "actor.optimizer.lr=1e-3",
    ]
    process = start(*arguments)
    wait_until_serving(process)
    wait_for_updates(process, folder, 6)
    before = rows(folder / "metrics.jsonl")
    left = descendants(process.popen.pid)
    process.popen.kill()
    process.wait(10)
    wait_until_gone(left)

    process = start(*arguments)
    wait_until_serving(process)
    assert process.wait(300) == 0, process.stderr[-3000:]
    assert "resumed from the checkpoint of update 4" in process.stderr
    assert_trained_exactly_once(folder, 14)
    after = rows(folder / "metrics.jsonl")
    # Updates 5 and 6 were trained again on the windows recorded for them, from the same weights.
    for old, new in zip(before[4:6], after[4:6], strict=True):
        assert new["loss"] == pytest.approx(old["loss"], abs=1e-6)
        assert new["num_action_tokens"] == old["num_action_tokens"]
    assert all(row["grad_norm"] > 1e-3 for row in after), "nothing was learned from; the test compares nothing"
    # Strictly on-policy while the weights move: each token's log-prob is that of the weights it trains.
    assert all(row["staleness_max"] == 0 for row in after)
    assert all(row["logprob_gap_max"] <= 1e-4 for row in after)


@pytest.mark.soak
def test_a_killed_actor_rank_is_replaced_while_the_engines_serve_on(start, run_arguments, tmp_path, monkeypatch):
    folder, token = tmp_path / "run", "a-token-of-16-characters"
    monkeypatch.setenv("MOLT_TOKEN", token)
    process = start(
        *run_arguments,
        f"run.dir={folder}",
        f"server.token={token}",
        "train.num_updates=100000",
        "train.max_staleness=2",
        "train.checkpoint_every=3",
        "actor.optimizer.lr=1e-4",
    )
    wait_until_serving(process)
    wait_for_updates(process, folder, 5)
    status = status_of(folder)
    assert (status["state"], status["url"]) == ("running", process.url)
    assert status["live"]["pool"]["groups"]["consumed"] >= 5

    (started,) = events(folder, "actor_started")
    os.kill(started["pids"][0], signal.SIGKILL)
    while not events(folder, "actor_restarted"):
        assert process.popen.poll() is None, process.stderr[-3000:]
        time.sleep(0.2)
    wait_for_updates(process, folder, status["updates"] + 4)
    left = descendants(process.popen.pid)
    process.popen.terminate()
    assert process.wait(60) == 1, process.stderr[-3000:]
    wait_until_gone(left)

    (died,), (again,) = events(folder, "actor_died"), events(folder, "actor_restarted")
    assert "a rank of the actor died" in died["error"]
    assert again["pids"] != started["pids"]
    if not events(folder, "refit_failed"):  # the rank may have died in one
        assert not events(folder, "engine_died"), "the death of the actor cost an engine"
    assert_trained_exactly_once(folder, len(rows(folder / "metrics.jsonl")))
    assert max(row["staleness_max"] for row in rows(folder / "metrics.jsonl")) <= 2
    assert_versions_never_go_back(folder)
    status = status_of(folder)
    assert status["state"] == "stopped"
    assert "stopped by SIGTERM" in status["reason"]
    assert (status["counts"]["actor_died"], status["counts"]["actor_restarted"]) == (1, 1)


@pytest.mark.soak
def test_with_all_engines_gone_and_no_restart_left_the_run_ends_and_says_so(start, run_arguments, tmp_path):
    folder = tmp_path / "run"
    limit_s = 60
    process = start(
        *run_arguments,
        f"run.dir={folder}",
        "train.num_updates=100000",
        "engine.num_engines=2",
        "engine.max_restarts=0",
        f"run.stall_timeout={limit_s}",
    )
    wait_until_serving(process)
    wait_for_updates(process, folder, 1)
    left = descendants(process.popen.pid)
    for engine in events(folder, "engine_started"):
        os.kill(engine["pid"], signal.SIGKILL)
    killed = time.monotonic()
    assert process.wait(limit_s) == 1, process.stderr[-3000:]
    assert time.monotonic() - killed < limit_s
    last = error_of(process)
    assert re.fullmatch(r"molt-train: error: engine \d died.* engine.max_restarts = 0 is spent.*", last), last
    wait_until_gone(left)
    (ended,) = events(folder, "run_ended")
    assert ended["state"] == "failed"
    assert not (folder / "server.json").exists()


@pytest.mark.soak
def test_a_run_in_which_nothing_happens_says_where_everyone_is_and_ends(start, run_arguments, tmp_path):
    folder = tmp_path / "run"
    process = start(
        *run_arguments,
        f"run.dir={folder}",
        "train.num_updates=100000",
        "agent.num_workers=1",
        "run.stall_timeout=30",
        "pool.lease_ttl_s=120",
    )
    wait_until_serving(process)
    wait_for_updates(process, folder, 1)
    (worker,) = events(folder, "worker_started")
    os.kill(worker["pid"], signal.SIGSTOP)  # whatever it was doing, it neither goes on nor says so
    assert process.wait(120) == 1, process.stderr[-3000:]
    last = error_of(process)
    assert "nothing happened for" in last
    (report,) = (folder / "logs").glob("stall-*.txt")
    assert str(report) in last
    text = report.read_text()
    for told in ("the window of update", "stacks of the server", "stacks of actor-0@", "stacks of engine@"):
        assert told in text
    assert "did not answer" not in text
    assert len(events(folder, "stalled")) == 1


def error_of(process):
    """The one line that the command ended with."""
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("molt-train: error: ")]
    return line


def status_of(folder):
    return json.loads(subprocess.check_output([*COMMAND, "status", str(folder), "--json"], text=True, timeout=120))


def assert_versions_never_go_back(folder):
    """Each session was sampled from one policy or a newer one, turn by turn."""
    reader = LedgerReader.open(folder / "ledger.db")
    try:
        for recording in reader.recordings():
            versions = [version for turn in recording.turns for version in turn.versions]
            assert versions == sorted(versions)
    finally:
        reader.close()


def kill_worker_mid_rollout(folder, pid):
    """Kill -9, at a moment at which the worker holds a lease: it is stopped until that is seen."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        reader = LedgerReader.open(folder / "ledger.db")
        held = [lease for lease in reader.leases() if lease.state == "granted" and f"-{pid}-" in lease.worker_id]
        reader.close()
        if held:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


def engine_core(actor_pid):
    """vLLM's own process below an engine's actor."""
    for pid in descendants(actor_pid):
        if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    pytest.fail("the engine's core process is not below its actor")


def wait_until_gone(pids):
    """Until none of the processes lives. The test's own time limit bounds the wait."""
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        time.sleep(0.1)
    assert not alive
