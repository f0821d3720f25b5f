"""`molt-train status`: what a run folder says, with a process at work in it, without one, and after one has died."""

import json
import os
import subprocess
import sys

import pytest

from molt.train.config import Config, ModelConfig, RunConfig, TrainConfig, to_toml
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.server_file import read_server_file, server_file
from molt.train.errors import ConfigError
from molt.train.launch import status as module
from molt.train.launch.status import NO_TOKEN, run_status
from molt.train.observe.journal import Journal
from molt.train.pool.leases import Assignment
from molt.train.pool.ledger import Ledger
from molt.train.pool.rows import GroupRow, RolloutRow
from molt.train.records.rollout import Task


@pytest.fixture
def folder(tmp_path):
    """A run that made two updates, with groups in three states, a live lease and a task in quarantine."""
    folder = RunFolder(tmp_path)
    config = Config(
        run=RunConfig(dir=str(tmp_path)), train=TrainConfig(num_updates=5), model=ModelConfig(path="somewhere")
    )
    folder.config.write_text(to_toml(config))
    with Journal(folder.metrics) as journal:
        journal.append({"step": 1, "reward_mean": 0.25, "dropped": {"groups_stale": 1}})
        journal.append({"step": 2, "reward_mean": 0.5, "dropped": {"groups_stale": 1, "rollouts_failed": 2}})
    for name in ("step-000001", "step-000002", "step-000003.partial"):
        (folder.checkpoints / name).mkdir(parents=True)
    (folder.checkpoints / "best").symlink_to("step-000001")
    return folder


@pytest.fixture
def ledger(folder):
    ledger = Ledger(folder.ledger)
    task = Task(task_id="t", data={})
    for seq in (1, 2, 3):
        ledger.add_group(GroupRow(seq=seq, group_id=f"g{seq}", kind="train", task=task, size=1, position=seq))
    ledger.close_group("g1", "dropped", reason="stale", ready_order=None)
    ledger.close_group("g2", "failed", reason="rollout g2.0 was lost", ready_order=None)
    row = RolloutRow(rollout_id="g3.0", group_id="g3", member=0, state="leased", attempt=1, failures=0)
    ledger.put_rollouts([row])
    lease = Assignment(
        lease_id="l", rollout_id="g3.0", group_id="g3", attempt=1, task=task, kind="train", member=0, position=3
    )
    ledger.add_leases([lease], "worker-7")
    ledger.add_quarantine("bad", ["the sandbox burst", "again"])
    ledger.record_event("run_started", {"pid": 1, "host": "h"})
    ledger.record_event("engine_died", {"engine": 0, "restarts_left": 3})
    yield ledger
    ledger.close()


def status_of(folder):
    return json.loads(run_status(folder.path, as_json=True))


def test_a_running_run_says_how_far_it_is(folder, ledger, monkeypatch):
    monkeypatch.delenv("MOLT_TOKEN", raising=False)
    with server_file(folder.server) as serve_at:
        assert status_of(folder)["state"] == "running", "it has not come to serve yet"
        serve_at("http://127.0.0.1:9")
        status = status_of(folder)
    expected = {
        "state": "running",
        "url": "http://127.0.0.1:9",
        "updates": 2,
        "num_updates": 5,
        "rewards": {"1": 0.25, "2": 0.5},
        "checkpoints": [1, 2],
        "best": 1,
        "groups": {"dropped": 1, "failed": 1, "open": 1},
        "leases": {"worker-7": 1},
        "quarantined": {"bad": ["the sandbox burst", "again"]},
        "dropped": {"stale": 1},
        "left_out": {"groups_stale": 2, "rollouts_failed": 2},
        "counts": {"engine_died": 1},
        "live": {"error": NO_TOKEN},
    }
    assert {name: status[name] for name in expected} == expected
    assert [event["kind"] for event in status["events"]] == ["run_started", "engine_died"]


def test_as_text_every_thing_has_a_line(folder, ledger):
    text = run_status(folder.path, as_json=False)
    for line in (
        "update 2 of 5, policy version 2",
        "reward: 0.250 (update 1), 0.500 (update 2)",
        "checkpoints: 1, 2; best: 1",
        "groups: 1 dropped, 1 failed, 1 open",
        "groups dropped: 1 stale",
        "left out of windows: 2 groups_stale, 2 rollouts_failed",
        "deaths and restarts: 1 engine_died",
        "task bad is in quarantine: the sandbox burst; again",
    ):
        assert line in text.splitlines()
    assert "engine_died engine 0, restarts_left 3" in text


@pytest.mark.parametrize(
    ("ending", "state", "reason"),
    [
        (None, "crashed", "process 1 on h is gone without a word"),
        ({"state": "finished", "reason": ""}, "finished", ""),
        ({"state": "stopped", "reason": "stopped by SIGTERM"}, "stopped", "stopped by SIGTERM"),
        ({"state": "failed", "reason": "engine 0 died"}, "failed", "engine 0 died"),
    ],
)
def test_without_a_process_the_last_word_of_the_last_one_counts(folder, ledger, ending, state, reason):
    if ending:
        ledger.record_event("run_ended", ending)
    status = status_of(folder)
    assert (status["state"], status["reason"]) == (state, reason)
    assert (status["leases"], status["url"], status["live"]) == ({}, "", None)


def test_a_process_that_was_killed_leaves_a_file_that_is_not_believed(folder, ledger):
    program = """
import os, signal, sys
from pathlib import Path
from molt.train.controller.server_file import server_file
with server_file(Path(sys.argv[1])) as serve_at:
    serve_at("http://127.0.0.1:9")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, str(folder.server)], check=False, timeout=60)
    assert read_server_file(folder.server).is_alive() is False
    assert status_of(folder)["state"] == "crashed"


def test_another_process_of_the_same_number_is_not_taken_for_it(folder, ledger):
    with server_file(folder.server):
        told = json.loads(folder.server.read_text())
        assert told["pid"] == os.getpid()
        folder.server.write_text(json.dumps(told | {"started": "1"}))
        assert status_of(folder)["state"] == "crashed"
        folder.server.write_text(json.dumps(told | {"host": "elsewhere"}))
        assert status_of(folder)["state"] == "running"
    assert not folder.server.exists()


def test_nothing_secret_stands_in_the_file(folder):
    with server_file(folder.server) as serve_at:
        serve_at("http://127.0.0.1:9")
        assert json.loads(folder.server.read_text()).keys() == {"host", "pid", "started", "url"}


def test_a_live_server_is_asked_with_the_token(folder, ledger, monkeypatch):
    asked = []

    def get(url, *, headers, **options):
        asked.append((url, headers))
        live = {
            "policy_version": 3,
            "waits": ["the window of update 3: for 4.0 s"],
            "engines": {"0": 5},
            "pool": {
                "num_open": 1,
                "num_ready": 0,
                "num_waiting": 2,
                "workers": [{"worker_id": "w", "leases": 4, "seen_s": 1.5}],
                "unmatched": [{"labels": {"gpu": "yes"}, "num_waiting": 2}],
            },
        }
        return module.httpx.Response(200, json=live, request=module.httpx.Request("GET", url))

    monkeypatch.setattr(module.httpx, "get", get)
    monkeypatch.setenv("MOLT_TOKEN", "t0ken")
    with server_file(folder.server) as serve_at:
        serve_at("http://127.0.0.1:9")
        text = run_status(folder.path, as_json=False)
    assert asked == [("http://127.0.0.1:9/api/v1/status", {"authorization": "Bearer t0ken"})]
    for line in (
        "waits: the window of update 3: for 4.0 s",
        "serving version 3; 1 groups open, 0 ready; 2 rollouts wait for a worker",
        "engine 0: 5 requests",
        "worker w: 4 leases, heard of 2 s ago",
        "2 rollouts wait for a worker with labels {'gpu': 'yes'}",
    ):
        assert line in text.splitlines()


def test_a_server_that_does_not_answer_costs_only_the_live_figures(folder, ledger, monkeypatch):
    monkeypatch.setenv("MOLT_TOKEN", "t0ken")
    with server_file(folder.server) as serve_at:
        serve_at("http://127.0.0.1:1")
        text = run_status(folder.path, as_json=False)
    assert "http://127.0.0.1:1 does not answer" in text
    assert "update 2 of 5" in text


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        run_status(tmp_path, as_json=False)
