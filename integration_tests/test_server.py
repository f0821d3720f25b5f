"""`molt-train server` and workers that somebody else starts, stops and replaces."""

import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.conftest import rows, wait_for_updates, wait_until_serving

TOKEN = "worker-token"
AGENT = str(Path(__file__).parent / "agents" / "talker.py")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def work():
    """Starts workers; those that a failed test leaves behind are ended."""
    workers = []

    def start_one(url):
        command = [sys.executable, "-m", "molt.agents", "work", AGENT, "--server", url, "--token", TOKEN]
        command += ["--concurrency", "8"]
        workers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return workers[-1]

    yield start_one
    for worker in workers:
        worker.kill()
        worker.wait(10)


def test_workers_come_and_go(start, work, run_arguments, tmp_path):
    folder = tmp_path / "run"
    _, *arguments = run_arguments
    server = start("server", *arguments, f"run.dir={folder}", f"server.token={TOKEN}", "train.num_updates=30")
    url = wait_until_serving(server)

    first = work(url)
    wait_for_updates(server, folder, 3)
    first.terminate()
    assert first.wait(60) == 0, "a worker told to stop finishes or returns its leases, and is done"

    second = work(url)
    assert server.wait(150) == 0, server.stderr[-3000:]
    assert second.wait(60) == 0, "the worker hears that the run is over"
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, 31))
    assert TOKEN not in (folder / "config.toml").read_text() + (folder / "logs" / "server.log").read_text()


def test_a_worker_with_a_wrong_token_is_told_so(gateway):
    command = [sys.executable, "-m", "molt.agents", "work", AGENT, "--server", gateway.url, "--token", "wrong"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("molt-agent: error: ")
