"""Claude Code as it is, on the Messages API of the session.

Each rollout gets a folder with the files of its task row, `claude` works in it, and what it left in `answer.txt` is
graded against the row's label.
"""

import tempfile
from pathlib import Path

import msgspec

from molt.agents import ChatAgent, ChatAgentRunner, Result
from molt.agents.programs import run_program

OPTIONS = ["--output-format", "json", "--dangerously-skip-permissions", "--max-turns", "30"]


def set_up(scratch, task):
    """The folder to work in, with the files of the task row, and a home without anybody's settings."""
    folder, home = Path(scratch, "work"), Path(scratch, "home")
    folder.mkdir()
    home.mkdir()
    for name, text in task.get("files", {}).items():
        (folder / name).write_text(text)
    return folder, home


def grade(folder, label):
    """1.0 when `answer.txt` holds the label."""
    answer = folder / "answer.txt"
    return float(answer.is_file() and answer.read_text().strip() == label)


class ClaudeCode(ChatAgent):
    """One run of `claude -p`; the reward is 1 when `answer.txt` holds the label."""

    async def run(self, ctx):
        """Start it in a folder of its own, with a home of its own, and grade what it did."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            folder, home = set_up(scratch, ctx.data)
            ended = await run_program(
                ["claude", "-p", ctx.prompt, "--model", ctx.model_name, *OPTIONS],
                folder=folder,
                env={
                    "HOME": str(home),
                    "ANTHROPIC_BASE_URL": ctx.session_url,
                    "ANTHROPIC_API_KEY": ctx.api_key,
                    "ANTHROPIC_SMALL_FAST_MODEL": ctx.model_name,
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # no titles, no telemetry
                    "DISABLE_AUTOUPDATER": "1",
                    "IS_SANDBOX": "1",  # root may skip permissions
                },
            )
            reward = grade(folder, ctx.label)
        return self.judge(ended, reward=reward)

    def judge(self, ended, *, reward):
        """A run that spent its turns is cut, not wrong; one that broke has no reward."""
        try:
            report = msgspec.json.decode(ended.stdout.strip().rpartition("\n")[2] or b"{}", type=dict)
        except msgspec.DecodeError:
            report = {}
        truncated = report.get("subtype") == "error_max_turns"
        if ended.returncode and not truncated:
            said = report.get("result") or ended.stderr or ended.stdout
            raise RuntimeError(f"claude ended with {ended.returncode}: {said[-500:]}")
        return Result(reward=reward, truncated=truncated, info={"turns": report.get("num_turns")})


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(ClaudeCode)
