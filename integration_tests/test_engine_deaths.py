"""Engines are killed and stopped for as long as the run trains; it goes on, and its books balance."""

import os
import signal
import time
from pathlib import Path

import pytest

from integration_tests.conftest import descendants, rows, wait_for_updates, wait_until_serving
from integration_tests.test_crashes import assert_trained_exactly_once, engine_core, events, wait_until_gone
from molt.train.cluster.engines import HEALTH_TIMEOUT_S
from molt.train.cluster.weight_sync import TRANSFER_TIMEOUT_S

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

DURATION_S = 120.0
INTERVAL_S = 20.0


@pytest.fixture
def training(start, run_arguments, tmp_path):
    """A run on two engines, and its folder."""
    folder = tmp_path / "run"
    process = start(
        *run_arguments,
        f"run.dir={folder}",
        "train.num_updates=100000",
        "train.checkpoint_every=0",
        "train.max_staleness=4",
        "actor.optimizer.lr=1e-4",
        "engine.num_engines=2",
        "engine.max_restarts=1000",
    )
    wait_until_serving(process)
    wait_for_updates(process, folder, 2)
    return process, folder


def running_engines(folder):
    """The engines' actors by number: their process ids, in the order in which they were started."""
    started = [*events(folder, "engine_started"), *events(folder, "engine_restarted")]
    newest = {detail["engine"]: detail["pid"] for detail in started}
    return [detail["pid"] for detail in started if newest[detail["engine"]] == detail["pid"]]


def is_alive(pid):
    return Path(f"/proc/{pid}/exe").exists()


def kill_an_engine(folder, *, by_core):
    """Kill -9 the engine that has run longest, by vLLM's process or by the actor above it. False: none is alive."""
    for pid in running_engines(folder):
        if is_alive(pid):
            os.kill(engine_core(pid) if by_core else pid, signal.SIGKILL)
            return True
    return False


def test_training_goes_on_while_engines_are_killed_and_finds_out_one_that_hangs(training):
    process, folder = training
    seen, num_killed, num_due = set(descendants(process.popen.pid)), 0, 0
    before = len(rows(folder / "metrics.jsonl"))
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < DURATION_S:
        if elapsed >= num_due * INTERVAL_S:  # where both are being started by then, there is none to kill
            num_killed += kill_an_engine(folder, by_core=num_killed % 2 == 0)
            num_due += 1
        assert process.popen.poll() is None, process.stderr[-3000:]
        seen.update(descendants(process.popen.pid))
        time.sleep(0.5)
    assert num_killed >= 2
    assert len(events(folder, "engine_died")) >= num_killed
    assert len(rows(folder / "metrics.jsonl")) > before, "training did not go on"

    while len(alive := [pid for pid in running_engines(folder) if is_alive(pid)]) < 2:
        assert process.popen.poll() is None, process.stderr[-3000:]
        time.sleep(0.5)
    seen.update(descendants(process.popen.pid))
    num_died, stopped = len(events(folder, "engine_died")), time.monotonic()
    os.kill(engine_core(alive[0]), signal.SIGSTOP)
    while len(events(folder, "engine_died")) == num_died:
        assert process.popen.poll() is None, process.stderr[-3000:]
        time.sleep(0.5)
    # Found by its health, or, stopped in the middle of a refit, by the limit of the transfer.
    assert time.monotonic() - stopped < max(HEALTH_TIMEOUT_S, TRANSFER_TIMEOUT_S) + 30.0
    wait_for_updates(process, folder, len(rows(folder / "metrics.jsonl")) + 2)
    seen.update(descendants(process.popen.pid))

    process.popen.terminate()
    assert process.wait(60) == 1
    wait_until_gone(seen)
    assert events(folder, "actor_died") == [], "an engine's fault costs no rank"
    metrics = rows(folder / "metrics.jsonl")
    assert max(row["staleness_max"] for row in metrics) <= 4
    assert_trained_exactly_once(folder, len(metrics))
