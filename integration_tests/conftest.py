"""Fixtures of the slow tests. An engine takes half a minute to start, so what starts one is shared by the session."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from calculator import policy, tasks
from calculator.demo import HERE, write_rows
from calculator.demonstrations import demonstrate
from molt.train.launch.environment import set_ray_variables

set_ray_variables(is_local=True)  # before a test module imports Ray

COMMAND = [sys.executable, "-m", "molt.train.cli"]


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.slow)


@dataclass
class Process:
    """A long-running command: its first line says where it serves; stderr is kept."""

    popen: subprocess.Popen
    url: str = ""
    errors: list[str] = field(default_factory=list)

    def wait(self, timeout: float) -> int:
        return self.popen.wait(timeout)

    @property
    def stderr(self) -> str:
        return "".join(self.errors)


def launch(*arguments: str) -> Process:
    """Start `molt-train` with `arguments`; whoever does so ends it."""
    popen = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process = Process(popen)
    # Read all the time: a full pipe would hold the command up.
    threading.Thread(target=process.errors.extend, args=(popen.stderr,), daemon=True).start()
    return process


def wait_until_serving(process: Process) -> str:
    """The URL that the command prints when it serves. The test's own time limit bounds the wait."""
    line = process.popen.stdout.readline()
    if not line:
        process.wait(60)
        pytest.fail(f"the command ended before it served: {process.stderr[-3000:]}")
    process.url = json.loads(line)["url"]
    return process.url


def rows(path: Path) -> list[dict]:
    """The whole rows of a JSONL file that may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_updates(process: Process, folder: Path, number: int) -> None:
    """Until `number` updates are journaled. The test's own time limit bounds the wait."""
    while len(rows(folder / "metrics.jsonl")) < number:
        assert process.popen.poll() is None, process.stderr[-3000:]
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in listing.splitlines()}
    found, grew = {pid}, True
    while grew:
        children = {child for child, parent in parents.items() if parent in found} - found
        grew = bool(children)
        found |= children
    return sorted(found - {pid})


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts `molt-train` commands; those that a failed test leaves behind are ended."""
    processes: list[Process] = []

    def start_one(*arguments: str) -> Process:
        processes.append(launch(*arguments))
        return processes[-1]

    yield start_one
    for process in processes:
        process.popen.kill()
        process.wait(10)


@pytest.fixture(scope="session")
def calculator_policy(tmp_path_factory) -> Path:
    """The calculator's tokenizer, template and a model with random weights: it knows nothing, and need not."""
    import random

    folder = tmp_path_factory.mktemp("policy")
    training, _ = tasks.expressions(0)
    rng = random.Random(0)
    conversations = [demonstrate(rng.choice(training), rng) for _ in range(2000)]
    policy.build_tokenizer(policy.render(conversations), folder)
    policy.build_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def calculator_tasks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    training, _ = tasks.expressions(0)
    write_rows(path, [tasks.row(expression) for expression in training])
    return path


@pytest.fixture(scope="session")
def run_arguments(calculator_policy, calculator_tasks) -> list[str]:
    """`run` with small windows and an agent whose rewards vary; the run folder and what a test varies come after."""
    return [
        "run",
        str(HERE / "config.toml"),
        f"model.path={calculator_policy}",
        f"data.path={calculator_tasks}",
        f"agent.path={Path(__file__).parent / 'agents' / 'talker.py'}",
        "train.groups_per_update=4",
        "rollout.group_size=4",
        "agent.concurrency=8",
        "actor.optimizer.schedule=constant",
        "run.stall_timeout=120",
    ]


@pytest.fixture(scope="session")
def gateway(calculator_policy, tmp_path_factory) -> Iterator[Process]:
    """The stand-alone gateway on a real engine."""
    folder = tmp_path_factory.mktemp("gateway")
    process = launch(
        *("gateway", "--model", str(calculator_policy), "--token", "gateway-token"),
        *("engine.max_model_len=512", f"run.dir={folder}"),
    )
    wait_until_serving(process)
    yield process
    process.popen.terminate()
    assert process.wait(60) == 0, process.stderr[-3000:]
