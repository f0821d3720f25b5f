"""`molt-agent work` as a process of its own: signals, exit codes, and what it says."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from molt.agents.testing import ScriptedLeases, ScriptedModel, ScriptedReply

AGENT = str(Path(__file__).parent / "agents" / "plain_agent.py")
STUCK_AGENT = str(Path(__file__).parent / "agents" / "stuck_agent.py")
QUICK_EXIT = "import sys, molt.agents.cli as cli; cli.EXIT_LIMIT_S = 0.2; sys.exit(cli.main())"
LAUNCHER = """
import os, subprocess, sys
subprocess.Popen([*sys.argv[1:], "--exit-with-parent", str(os.getpid())])
sys.stdin.read()
"""


@asynccontextmanager
async def worker_process(
    leases: ScriptedLeases, *options: str, agent: str = AGENT, launch: tuple[str, ...] = ("-m", "molt.agents")
) -> AsyncIterator[Process]:
    command = [sys.executable, *launch, "work", agent, "--server", leases.url, "--token", leases.token, *options]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: Process, text: str) -> None:
    """Read the process' log up to the line that contains `text`."""
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if text in line:
            return
    raise AssertionError(f"the process never said {text!r}")


async def end_of(process: Process) -> tuple[int, str]:
    _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


class HeldModel(ScriptedModel):
    """Answers "4" once it is let go."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.let_go = asyncio.Event()
        super().__init__(self._reply)

    def _reply(self, body: object) -> ScriptedReply:
        self.asked.set()
        return ScriptedReply(text="4", wait_for=self.let_go)


@pytest.fixture
async def held_model() -> AsyncIterator[HeldModel]:
    async with HeldModel() as model:
        yield model


@pytest.fixture
async def leases(held_model: HeldModel) -> AsyncIterator[ScriptedLeases]:
    async with ScriptedLeases([{"prompt": "2 + 2 =", "label": "4"}], session=held_model.session()) as scripted:
        yield scripted


async def test_a_run_from_start_to_finish(leases: ScriptedLeases, held_model: HeldModel):
    held_model.let_go.set()
    async with worker_process(leases) as process:
        code, stderr = await end_of(process)
    assert code == 0, stderr
    assert [(r.report.outcome, r.report.reward) for r in leases.results] == [("completed", 1.0)]
    assert "the server is finished" in stderr
    assert "results: {'completed': 1}" in stderr


async def test_sigterm_finishes_the_leases(leases: ScriptedLeases, held_model: HeldModel):
    async with worker_process(leases) as process:
        await held_model.asked.wait()
        process.send_signal(signal.SIGTERM)
        await said(process, "finishing 1 leases")
        held_model.let_go.set()
        code, stderr = await end_of(process)
    assert code == 0, stderr
    assert [(r.report.outcome, r.accepted) for r in leases.results] == [("completed", True)]
    assert leases.released == []


async def test_sigterm_gives_back_what_does_not_finish_within_the_drain(leases: ScriptedLeases, held_model: HeldModel):
    async with worker_process(leases, "--drain-s", "0") as process:
        await held_model.asked.wait()
        process.send_signal(signal.SIGTERM)
        code, stderr = await end_of(process)
    assert code == 0, stderr
    assert [lease.lease_id for lease in leases.released] == ["rollout-0.1"]
    assert leases.results == []


async def test_a_second_signal_gives_the_leases_back_at_once(leases: ScriptedLeases, held_model: HeldModel):
    async with worker_process(leases, "--drain-s", "3600") as process:
        await held_model.asked.wait()
        process.send_signal(signal.SIGTERM)
        await said(process, "finishing 1 leases")
        process.send_signal(signal.SIGINT)
        code, stderr = await end_of(process)
    assert code == 0, stderr
    assert [lease.lease_id for lease in leases.released] == ["rollout-0.1"]


async def test_a_killed_worker_leaves_its_lease_to_another(leases: ScriptedLeases, held_model: HeldModel):
    async with worker_process(leases) as process:
        await held_model.asked.wait()
        process.kill()
        await process.wait()
    leases.lose("rollout-0.1")  # as a trainer does when heartbeats stop
    held_model.let_go.set()
    async with worker_process(leases) as process:
        code, stderr = await end_of(process)
    assert code == 0, stderr
    assert [(r.report.attempt, r.report.outcome) for r in leases.results] == [(2, "completed")]


async def test_a_server_that_is_gone_ends_it_with_one_line(held_model: HeldModel):
    async with ScriptedLeases([{}], session=held_model.session()) as leases:
        process_context = worker_process(leases, "--server-timeout", "0.1")
        process = await process_context.__aenter__()
        await held_model.asked.wait()
    code, stderr = await end_of(process)
    await process_context.__aexit__(None, None, None)
    assert code == 1
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("molt-agent: error: no usable answer for 0.1 s: http://127.0.0.1:")


async def test_a_wrong_token_is_bad_input(leases: ScriptedLeases):
    async with worker_process(leases, "--token", "wrong") as process:
        code, stderr = await end_of(process)
    assert code == 2
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == (
        f"molt-agent: error: {leases.url}/api/v1/leases: HTTP 401: wrong token: "
        "pass the trainer's worker token with --token or MOLT_TOKEN"
    )


async def test_a_worker_ends_with_its_parent(leases: ScriptedLeases, held_model: HeldModel):
    launch = ("-c", LAUNCHER, sys.executable, "-m", "molt.agents")
    async with worker_process(leases, launch=launch) as launcher:
        await held_model.asked.wait()
        launcher.kill()
        code, stderr = await end_of(launcher)  # its stderr ends only with the worker, which inherited it
    assert code == -signal.SIGKILL
    assert "the parent process" in stderr
    assert [lease.lease_id for lease in leases.released] == ["rollout-0.1"]


async def test_threads_that_an_agent_leaves_behind_do_not_keep_the_process(held_model: HeldModel):
    async with (
        ScriptedLeases([{}], session=held_model.session()) as leases,
        worker_process(leases, "--drain-s", "0", agent=STUCK_AGENT, launch=("-c", QUICK_EXIT)) as process,
    ):
        await leases.wait_until(lambda: bool(leases.heartbeats))
        process.send_signal(signal.SIGTERM)
        code, stderr = await end_of(process)
    assert code == 0
    assert stderr.splitlines()[-1] == "molt-agent: leaving threads of the agent that do not end"
    assert len(leases.released) == 1
