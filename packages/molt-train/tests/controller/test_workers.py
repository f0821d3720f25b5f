"""Local workers: real `molt-agent work` processes against a scripted trainer."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from molt.agents.protocol import SessionCredentials
from molt.agents.testing import ScriptedLeases
from molt.train.config import AgentConfig
from molt.train.controller import workers as workers_module
from molt.train.controller.workers import LocalWorkers
from molt.train.errors import RunError

AGENT = str(Path(__file__).parent / "agents" / "echo_agent.py")
NO_MODEL = SessionCredentials(
    session_id="s",
    session_url="http://127.0.0.1:9/s/s",
    base_url="http://127.0.0.1:9/s/s/v1",
    api_key="k",
    model_name="m",
)


class Events(list):
    """What the workers told of themselves, to be waited for."""

    def __init__(self):
        super().__init__()
        self._changed = asyncio.Event()

    def __call__(self, kind, detail):
        self.append((kind, detail))
        self._changed.set()

    def of(self, kind):
        return [detail for name, detail in self if name == kind]

    async def until(self, kind, times=1):
        async with asyncio.timeout(30):
            while len(self.of(kind)) < times:
                self._changed.clear()
                await self._changed.wait()
        return self.of(kind)


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def gate(tmp_path):
    """A named pipe: the last rollout goes on when the test opens it."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


@pytest.fixture
async def leases(gate):
    tasks = [{"prompt": "?", "label": str(i)} for i in range(3)]
    tasks.append({"prompt": "?", "label": "3", "gate": str(gate)})
    async with ScriptedLeases(tasks, session=NO_MODEL) as scripted:
        yield scripted


@pytest.fixture
async def start(tmp_path, events, leases, monkeypatch):
    """Start workers; at the end nothing of them is left, whatever the test did."""
    monkeypatch.setattr(workers_module, "DRAIN_S", 0.5)
    started = []

    def begin(*, url=None, path=AGENT, num_workers=1, token=None):
        workers = LocalWorkers(
            AgentConfig(path=path, num_workers=num_workers, concurrency=2),
            url=url or leases.url,
            environment={**os.environ, "MOLT_TOKEN": token or leases.token},
            logs=tmp_path / "logs",
            on_event=events,
        )
        supervision = asyncio.create_task(workers.supervise())
        started.append((workers, supervision))
        return workers, supervision

    yield begin
    for workers, supervision in started:
        workers.ending = True
        leases.finish()
        await workers.stop()
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_running(pid):
    return Path(f"/proc/{pid}/exe").exists()


async def test_workers_run_the_leases_and_end_when_the_run_is_over(start, leases, events, gate):
    workers, supervision = start(num_workers=2)
    await leases.wait_until(lambda: len(leases.results) == 3)
    workers.ending = True
    await asyncio.to_thread(gate.write_bytes, b"")
    await leases.wait_until(lambda: len(leases.results) == 4)
    await workers.stop()
    await supervision
    assert sorted(result.report.reward for result in leases.results) == [0.0, 1.0, 2.0, 3.0]
    assert sorted(detail["worker"] for detail in events.of("worker_started")) == [0, 1]
    assert events.of("worker_died") == []


async def test_a_workers_output_is_in_the_logs_and_its_token_is_not(start, leases, tmp_path):
    start()
    await leases.wait_until(lambda: len(leases.results) == 3)
    log = (tmp_path / "logs" / "worker-0.log").read_text()
    assert f"serves {leases.url}, 2 rollouts at once" in log
    assert leases.token not in log


async def test_the_token_does_not_stand_in_the_command_line(start, leases, events):
    leases.fail("leases", times=1000)
    start()
    (worker,) = await events.until("worker_started")
    await leases.wait_until(lambda: leases.num_requests["leases"] > 0)
    command = command_line(worker["pid"])
    assert AGENT in command
    assert not any(leases.token in part for part in command)


async def test_a_worker_that_dies_is_started_anew_and_the_death_is_an_event(start, leases, events):
    leases.fail("leases", times=1000)
    start()
    (first,) = await events.until("worker_started")
    await leases.wait_until(lambda: leases.num_requests["leases"] > 0)
    os.kill(first["pid"], signal.SIGKILL)
    (death,) = await events.until("worker_died")
    assert (death["worker"], death["exit_code"]) == (0, -signal.SIGKILL)
    _, second = await events.until("worker_started", times=2)
    assert (second["worker"], second["pid"] != first["pid"]) == (0, True)


async def test_workers_that_keep_dying_end_the_run(start, leases, events, monkeypatch):
    monkeypatch.setattr(workers_module, "MAX_RESTARTS", 0)
    leases.fail("leases", times=1000)
    _, supervision = start()
    (worker,) = await events.until("worker_started")
    os.kill(worker["pid"], signal.SIGKILL)
    with pytest.raises(RunError, match=r"worker 0 ended with exit code -9; see .*worker-0\.log"):
        await supervision


async def test_bad_input_of_a_worker_ends_the_run_at_once(start, events, tmp_path):
    _, supervision = start(path=str(tmp_path / "none.py"))
    with pytest.raises(RunError, match="worker 0 ended with exit code 2"):
        await supervision
    assert len(events.of("worker_started")) == 1
    assert "none.py" in (tmp_path / "logs" / "worker-0.log").read_text()


async def test_a_wrong_token_ends_the_run_at_once(start):
    _, supervision = start(token="stolen")
    with pytest.raises(RunError, match="worker 0 ended with exit code 2"):
        await supervision


async def test_workers_that_reach_no_server_are_ended_with_the_run(start, events):
    with socket.socket() as taken:  # bound and never listened on: every connection is refused
        taken.bind(("127.0.0.1", 0))
        workers, supervision = start(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        (worker,) = await events.until("worker_started")
        workers.ending = True
        await workers.stop()
        await supervision
    assert not is_running(worker["pid"])
    assert events.of("worker_died") == []


async def test_a_worker_that_ignores_its_end_is_killed(start, leases, events):
    leases.fail("leases", times=1000)
    workers, supervision = start()
    (worker,) = await events.until("worker_started")
    await leases.wait_until(lambda: leases.num_requests["leases"] > 0)
    os.kill(worker["pid"], signal.SIGSTOP)  # deaf to SIGTERM
    workers.ending = True
    await workers.stop()
    await supervision
    assert not is_running(worker["pid"])
