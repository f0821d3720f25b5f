"""Real agents, installed from their registries, on a real gateway with the scripted engine: nothing leaves loopback.

Each does one task of two tool calls; what it did is graded in its folder, and what was recorded of it audited.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from integration_tests.conftest import COMMAND, launch, rows, wait_until_serving

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".harness" / "bin" / "python"
TOKEN = "a-token-that-is-no-part-of-any-word"
WIRES = {
    "claude_code": "messages",
    "codex": "responses",
    "mini_swe_agent": "chat",
    "openai_agents": "responses",
    "langgraph": "chat",
}
INSTALLED = {
    "claude_code": "bin/claude",
    "codex": "bin/codex",
    "mini_swe_agent": "bin/mini",
    "openai_agents": "lib/python*/site-packages/agents",
    "langgraph": "lib/python*/site-packages/langgraph",
}

pytestmark = pytest.mark.timeout(240)


def call(tool, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


FILE_TOOLS = [call("read_file", name="notes.txt"), call("write_file", name="answer.txt", text="42"), "Done."]
REPLIES = {
    "claude_code": [
        "<think>\nI look first.\n</think>\n\n" + call("Bash", command="cat notes.txt", description="Read the notes"),
        "The numbers are there." + call("Write", file_path="answer.txt", content="42\n"),
        "Done.",
    ],
    "codex": [
        "<think>\nI look first.\n</think>\n\n" + call("exec_command", cmd="cat notes.txt"),
        "The numbers are there." + call("exec_command", cmd="echo 42 > answer.txt; cat notes.txt"),
        "Done.",
    ],
    "mini_swe_agent": [
        "I look first." + call("bash", command="cat notes.txt"),
        "The numbers are there." + call("bash", command="echo 42 > answer.txt; cat notes.txt"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "openai_agents": FILE_TOOLS,
    "langgraph": FILE_TOOLS,
}
WAITS = "touch started; sleep 300"
SLEEPS = {
    "claude_code": call("Bash", command=WAITS, description="Wait"),
    "codex": call("exec_command", cmd=WAITS),
    "mini_swe_agent": call("bash", command=WAITS),
}
LOOPS = {
    "claude_code": call("Bash", command="cat notes.txt", description="Read the notes"),
    "mini_swe_agent": call("bash", command="cat notes.txt"),
    "openai_agents": FILE_TOOLS[0],
    "langgraph": FILE_TOOLS[0],
}
MAX_TURNS = {"claude_code": 30, "mini_swe_agent": 30, "openai_agents": 10, "langgraph": 10}


@pytest.fixture(scope="session")
def harnesses():
    """The names of those that are installed, and why others are not."""
    done = subprocess.run([ROOT / "scripts" / "harnesses"], stderr=subprocess.PIPE, text=True, check=True)
    return {name for name, path in INSTALLED.items() if any((ROOT / ".harness").glob(path))}, done.stderr


@pytest.fixture(params=WIRES)
def harness(request, harnesses):
    installed, why_not = harnesses
    if request.param not in installed:
        pytest.skip(f"{request.param} cannot be installed: {why_not.strip()}")
    return request.param


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """One gateway for all: each prompt, and each text that a tool reads, begins with the name of whom it is for."""
    folder = tmp_path_factory.mktemp("gateway")
    script, log = folder / "script.jsonl", folder / "engine.jsonl"
    lines = [
        *({"match": re.escape(f"[{name}]"), "text": text} for name, texts in REPLIES.items() for text in texts),
        *({"match": re.escape(f"[{name} waits]"), "text": text} for name, text in SLEEPS.items()),
        *({"match": re.escape(f"[{name} loops]"), "text": text} for name, text in LOOPS.items()),
        {"text": "Done."},
    ]
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = launch(
        *("gateway", "--engine", "scripted", "--script", str(script), "--engine-log", str(log), "--token", TOKEN),
        *("engine.max_model_len=200000", f"run.dir={folder / 'run'}"),
    )
    url = wait_until_serving(process)
    with httpx.Client(base_url=f"{url}/api/v1", headers={"authorization": f"Bearer {TOKEN}"}, timeout=30) as control:
        yield Gateway(control, log, folder / "run")
    process.popen.terminate()
    assert process.wait(60) == 0, process.stderr[-3000:]


@dataclass
class Gateway:
    control: httpx.Client
    log: Path
    folder: Path

    def open_session(self):
        return self.control.post("/sessions", json={"sampling_policy": "enforce"}).json()

    def close(self, session):
        return self.control.post(f"/sessions/{session['session_id']}/result", json={"reward": 1.0}).json()

    def recording(self, session):
        return self.control.get(f"/sessions/{session['session_id']}").json()


@pytest.fixture
def start_trial(tmp_path):
    """Starts `molt-agent try` on an example, in the environment of the harness. Scratch folders are under `scratch`."""
    started, scratch = [], tmp_path / "scratch"
    scratch.mkdir()

    def start_one(name, session, *, whom):
        tasks = tmp_path / "tasks.jsonl"
        files = {"notes.txt": f"[{whom}] The numbers are 17 and 25.\n"}
        prompt = f"[{whom}] Read notes.txt, then write their sum to answer.txt."
        tasks.write_text(json.dumps({"prompt": prompt, "files": files, "label": "42"}))
        command = [PYTHON, "-m", "molt.agents", "try", ROOT / "examples" / name / "agent.py", "--tasks", tasks]
        command += [
            "--base-url",
            session["base_url"],
            "--api-key",
            session["api_key"],
            "--model",
            session["model_name"],
        ]
        environment = {**os.environ, "TMPDIR": str(scratch)}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start_one
    for trial in started:
        if trial.poll() is None:  # a failed test's; interrupted, it ends the agent too
            trial.send_signal(signal.SIGINT)
            trial.communicate(timeout=20)


def processes_under(folder):
    """Command lines of the processes that work in `folder`."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # gone meanwhile
            if link.readlink().is_relative_to(folder):
                found.append((link.parent / "cmdline").read_bytes())
    return found


def check_exact(record, calls):
    """Every turn is what the engine was given and gave, behind its parent's row, and all of them make one row."""
    logged, row, num_sampled = {call["request_id"]: call for call in calls}, [], 0
    for turn in record["turns"]:
        line = logged[turn["turn_id"]]
        assert row + turn["context_ids"] == line["prompt_token_ids"]
        assert (turn["token_ids"], turn["logprobs"]) == (line["token_ids"], line["logprobs"])
        row = line["prompt_token_ids"] + turn["token_ids"]
        num_sampled += len(turn["token_ids"])
    (segment,) = record["segments"]
    assert (segment["token_ids"], segment["trained"], sum(segment["action_mask"])) == (row, True, num_sampled)


def test_a_task_of_two_tool_calls_is_done_and_recorded_exactly(harness, gateway, start_trial):
    session, num_calls = gateway.open_session(), len(rows(gateway.log))
    output, errors = start_trial(harness, session, whom=harness).communicate()
    done = {"task": 0, "outcome": "completed", "reward": 1.0, "error": None}
    assert output, errors
    assert json.loads(output.splitlines()[0]) == done, errors
    record = gateway.recording(session)
    assert [turn["wire"] for turn in record["turns"]] == [WIRES[harness]] * 3
    assert {turn["status"] for turn in record["turns"] if turn["adopted"]} == {"delivered"}
    calls = rows(gateway.log)[num_calls:]
    assert len(calls) == 3
    check_exact(record, calls)

    assert gateway.close(session)["accepted"]
    audit = subprocess.run([*COMMAND, "audit", str(gateway.folder)], capture_output=True, text=True, check=False)
    report = json.loads(audit.stdout)
    assert (audit.returncode, report["violations"], report["untrained"]) == (0, [], {})
    assert (report["delivered_fraction"], report["forks"]) == (1.0, {"start": report["num_rollouts"]})


@pytest.mark.parametrize("harness", LOOPS, indirect=True)
def test_a_rollout_that_spends_its_turns_is_truncated(harness, gateway, start_trial):
    session = gateway.open_session()
    output, errors = start_trial(harness, session, whom=f"{harness} loops").communicate()
    cut = {"task": 0, "outcome": "truncated", "reward": 0.0, "error": None}
    assert output, errors
    assert json.loads(output.splitlines()[0]) == cut, errors
    assert len(gateway.recording(session)["turns"]) == MAX_TURNS[harness]


@pytest.mark.parametrize("harness", SLEEPS, indirect=True)
def test_a_rollout_that_is_cut_leaves_no_process_behind(harness, gateway, start_trial, tmp_path):
    trial = start_trial(harness, gateway.open_session(), whom=f"{harness} waits")
    while not list(tmp_path.glob("scratch/*/*/started")):
        assert trial.poll() is None, trial.communicate()
        time.sleep(0.02)
    assert any(b"sleep" in command for command in processes_under(tmp_path / "scratch"))
    trial.send_signal(signal.SIGINT)
    trial.communicate()
    while processes_under(tmp_path / "scratch"):
        time.sleep(0.02)
    assert not list((tmp_path / "scratch").iterdir()), "its folders are removed"


def test_a_harness_that_is_not_installed_is_infrastructure(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "p"}))
    command = [sys.executable, "-m", "molt.agents", "try", ROOT / "examples" / "codex" / "agent.py", "--tasks", tasks]
    command += ["--base-url", "http://127.0.0.1:9/v1", "--api-key", "k", "--model", "m"]
    done = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False)
    line = json.loads(done.stdout.splitlines()[0])
    assert (done.returncode, line["outcome"]) == (1, "infrastructure")
    assert "'codex' is not installed" in line["error"]


def test_the_matrix_passes(harnesses):
    done = subprocess.run([*COMMAND, "conformance", "--python", PYTHON, "--json"], capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["client"] for row in found if row["result"] == "not installed"} == set(WIRES) - harnesses[0]
    assert [(row["client"], row["note"]) for row in found if row["result"] == "fail"] == [], done.stderr
    assert done.returncode == 0
    assert {row["client"] for row in found} == {"openai-python", "anthropic-python", *WIRES}
    assert all(row["version"] and row["forks"] == 0 for row in found if row["result"] == "pass")
