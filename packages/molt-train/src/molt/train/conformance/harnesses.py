"""Agents that exist, each started unmodified by its example under `molt-agent try`."""

import json
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from molt.agents.protocol import SessionCredentials
from molt.train.conformance.cell import ANSWER, FINAL_TEXT, NOTES, SUM, Cell, CellError, tool_call
from molt.train.records.turn import Wire

EXAMPLES = "molt.harnesses"
"""Entry points: the agent module of each harness."""
LIMIT_S = 120.0
"""How long an agent may take for the task."""
INTERRUPT_S = 15.0
"""How long `molt-agent try` may take to end the agent once it is interrupted."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """An agent, by the name of its example; how its version is found, and what the scripted model tells it to do."""

    name: str
    wire: Wire
    program: str | None = None
    """Its command, asked for `--version`; or"""
    distribution: str | None = None
    """its Python package."""
    replies: tuple[str, ...]

    def version(self, python: Path) -> str | None:
        """The version that a worker of `python` would start; None where there is none."""
        if self.program is not None:
            found = shutil.which(self.program, path=str(python.parent)) or shutil.which(self.program)
            command = [found, "--version"] if found else None
        else:
            code = f"from importlib.metadata import version; print(version({self.distribution!r}))"
            command = [str(python), "-c", code]
        output = _output_of(command) if command else None
        number = re.search(r"\d+(\.\d+)+", output) if output else None
        return number[0] if number else None

    def cell(self, python: Path, agent: Path) -> Cell:
        """The task, done by a worker of `python`."""
        return Cell(client=self.name, wire=self.wire, replies=self.replies, drive=partial(_try, python, agent))


def _shell(tool: str, argument: str) -> Callable[[str], str]:
    return lambda command: tool_call(tool, **{argument: command})


_FILE_TOOLS = (tool_call("read_file", name=NOTES), tool_call("write_file", name=ANSWER, text=SUM), FINAL_TEXT)
_codex, _mini = _shell("exec_command", "cmd"), _shell("bash", "command")

# A shell's last command prints the notes again, for the script to know whom it answers.
HARNESSES = (
    Harness(
        name="claude_code",
        wire="messages",
        program="claude",
        replies=(
            tool_call("Bash", command=f"cat {NOTES}", description="Read the notes"),
            tool_call("Write", file_path=ANSWER, content=SUM),
            FINAL_TEXT,
        ),
    ),
    Harness(
        name="codex",
        wire="responses",
        program="codex",
        replies=(_codex(f"cat {NOTES}"), _codex(f"echo {SUM} > {ANSWER}; cat {NOTES}"), FINAL_TEXT),
    ),
    Harness(
        name="mini_swe_agent",
        wire="chat",
        distribution="mini-swe-agent",
        replies=(
            _mini(f"cat {NOTES}"),
            _mini(f"echo {SUM} > {ANSWER}; cat {NOTES}"),
            _mini("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
    ),
    Harness(name="openai_agents", wire="responses", distribution="openai-agents", replies=_FILE_TOOLS),
    Harness(name="langgraph", wire="chat", distribution="langgraph", replies=_FILE_TOOLS),
)


def agent_module(name: str) -> Path | None:
    """The file of the example that starts harness `name`; None where the examples are not installed."""
    found = entry_points(group=EXAMPLES, name=name)
    if not found:
        return None
    spec = find_spec(next(iter(found)).module)
    return Path(spec.origin) if spec and spec.origin else None


def can_work(python: Path) -> bool:
    """Whether the environment of `python` has the SDK that starts agents."""
    return _output_of([str(python), "-c", "import molt.agents"]) is not None


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _try(python: Path, agent: Path, cell: Cell, session: SessionCredentials) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tasks = Path(scratch) / "tasks.jsonl"
        tasks.write_text(json.dumps({"prompt": cell.prompt, "files": {NOTES: cell.notes}, "label": SUM}))
        command = [str(python), "-m", "molt.agents", "try", str(agent), "--tasks", str(tasks)]
        command += ["--base-url", session.base_url, "--api-key", session.api_key, "--model", session.model_name]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise CellError(f"the agent did not end within {LIMIT_S:g} s") from None
        finally:
            _interrupt(process)
    lines = [json.loads(line) for line in output.splitlines()]
    if not lines or "task" not in lines[0]:
        raise CellError(errors.strip().rpartition("\n")[2] or "molt-agent try said nothing")
    if lines[0]["outcome"] != "completed":
        raise CellError(f"{lines[0]['outcome']}: {lines[0]['error']}")
    if lines[0]["reward"] != 1.0:
        raise CellError(f"{ANSWER} does not hold {SUM!r}")


def _interrupt(process: "subprocess.Popen[str]") -> None:
    """An interrupted trial ends its agent, which a killed one could not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=INTERRUPT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
