"""Codex as it is, on the Responses API of the session.

Each rollout gets a folder with the files of its task row, `codex exec` works in it, and what it left in `answer.txt` is
graded against the row's label.
"""

import tempfile
from pathlib import Path

from molt.agents import ChatAgent, ChatAgentRunner, Result
from molt.agents.programs import run_program

CONFIG = """\
model = "{model}"
model_provider = "molt"
check_for_update_on_startup = false

[model_providers.molt]
name = "Molt"
base_url = "{base_url}"
wire_api = "responses"
env_key = "SESSION_KEY"

[analytics]
enabled = false
"""


def set_up(scratch, task):
    """The folder to work in, with the files of the task row, and a home without anybody's settings."""
    folder, home = Path(scratch, "work"), Path(scratch, "home")
    folder.mkdir()
    home.mkdir()
    for name, text in task.get("files", {}).items():
        (folder / name).write_text(text)
    return folder, home


def write_config(home, ctx):
    """The session as Codex's only provider."""
    (home / "config.toml").write_text(CONFIG.format(model=ctx.model_name, base_url=ctx.base_url))


def grade(folder, label):
    """1.0 when `answer.txt` holds the label."""
    answer = folder / "answer.txt"
    return float(answer.is_file() and answer.read_text().strip() == label)


class Codex(ChatAgent):
    """One run of `codex exec`; the reward is 1 when `answer.txt` holds the label."""

    async def run(self, ctx):
        """Start it in a folder of its own, with a home of its own, and grade what it did."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            folder, home = set_up(scratch, ctx.data)
            write_config(home, ctx)
            ended = await run_program(
                # The scratch folder is the sandbox: Codex's own needs kernel features that a container rarely has.
                ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ctx.prompt],
                folder=folder,
                env={"HOME": str(home), "CODEX_HOME": str(home), "SESSION_KEY": ctx.api_key},
            )
            reward = grade(folder, ctx.label)
        if ended.returncode:
            raise RuntimeError(f"codex ended with {ended.returncode}: {ended.stderr[-500:]}")
        return Result(reward=reward)


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(Codex)
