"""Programs that agents start: what they are given, and that nothing of them is left."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from molt.agents import ChatAgent, ChatAgentRunner, InfrastructureError, Result, programs
from molt.agents.programs import run_program
from molt.agents.protocol import Lease, SamplingParams, SessionCredentials
from molt.agents.rollout import run_lease

LEAVES_A_CHILD = "sleep 300 & echo > ready; "


def processes_in(folder):
    """Ids of the processes whose working directory it is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # gone, or not ours
            found += [link.parent.name] if link.readlink() == folder else []
    return found


async def until_none_is_left(folder):
    while processes_in(folder):  # noqa: ASYNC110 - the kernel sends no event; the test's time limit ends the wait
        await asyncio.sleep(0.005)


async def until_ready(folder):
    while not (folder / "ready").exists():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.005)


async def test_it_runs_in_its_folder_and_says_how_it_ended(tmp_path):
    ended = await run_program(["sh", "-c", "pwd; echo no >&2; exit 3"], folder=tmp_path, env={})
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, f"{tmp_path}\n", "no\n")


async def test_nothing_of_the_workers_environment_reaches_it_but_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the worker's own")
    ended = await run_program(["env"], folder=tmp_path, env={"HOME": "/nowhere"})
    names = {line.partition("=")[0] for line in ended.stdout.splitlines()}
    assert names - {"PWD", "SHLVL", "_"} == {"PATH", "HOME", "MOLT_PROGRAM"}


async def test_a_program_beside_the_workers_python_is_found_without_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    ended = await run_program([Path(sys.executable).name, "-c", "print(1)"], folder=tmp_path, env={})
    assert ended.stdout == "1\n"


async def test_a_missing_program_is_infrastructure(tmp_path):
    with pytest.raises(InfrastructureError, match="'no-such-harness' is not installed: neither beside"):
        await run_program(["no-such-harness"], folder=tmp_path, env={})


async def test_it_has_no_input_to_wait_for(tmp_path):
    assert (await run_program(["cat"], folder=tmp_path, env={})).stdout == ""


async def test_only_the_end_of_a_long_output_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MAX_OUTPUT_BYTES", 4)
    assert (await run_program(["echo", "123456"], folder=tmp_path, env={})).stdout == "456\n"


async def test_what_it_left_in_the_background_is_ended_and_not_waited_for(tmp_path):
    ended = await run_program(["sh", "-c", LEAVES_A_CHILD], folder=tmp_path, env={})
    assert ended.returncode == 0
    await until_none_is_left(tmp_path)


@pytest.mark.parametrize("script", [LEAVES_A_CHILD, f"trap '' TERM; {LEAVES_A_CHILD}", f"setsid {LEAVES_A_CHILD}"])
async def test_cancelling_ends_all_that_it_started(tmp_path, monkeypatch, script):
    monkeypatch.setattr(programs, "TERM_GRACE_S", 0.05)
    command = ["sh", "-c", f"{script} wait; sleep 300"]
    task = asyncio.create_task(run_program(command, folder=tmp_path, env={}))
    await until_ready(tmp_path)
    assert len(processes_in(tmp_path)) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_none_is_left(tmp_path)


async def test_past_the_deadline_the_rollout_is_a_timeout_and_the_program_is_gone(tmp_path):
    class Sleeper(ChatAgent):
        async def run(self, ctx):
            await run_program(["sh", "-c", "sleep 300; true"], folder=tmp_path, env={})
            return Result(reward=1.0)

    session = SessionCredentials(session_id="s", session_url="u", base_url="u/v1", api_key="k", model_name="m")
    names = {"lease_id": "l", "rollout_id": "r", "group_id": "g", "attempt": 1}
    lease = Lease(**names, task={}, session=session, sampling_params=SamplingParams(), timeout_s=0.3)
    report = await run_lease(ChatAgentRunner(Sleeper), lease, worker_id="w")
    assert report.outcome == "timeout"
    await until_none_is_left(tmp_path)
