"""mini-SWE-agent as it is: LiteLLM on the chat completions of the session.

Each rollout gets a folder with the files of its task row, `mini` works in it, and what it left in `answer.txt` is
graded against the row's label.
"""

import json
import tempfile
from pathlib import Path

from molt.agents import ChatAgent, ChatAgentRunner, Result
from molt.agents.programs import run_program

OPTIONS = ["--yolo", "--exit-immediately", "--config", "mini.yaml", "--config", "agent.step_limit=30"]


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


def was_cut(trajectory):
    """Whether the run reached its step limit, as mini-SWE-agent's own account of it says."""
    return trajectory.is_file() and json.loads(trajectory.read_text())["info"]["exit_status"] == "LimitsExceeded"


class MiniSweAgent(ChatAgent):
    """One run of `mini`; the reward is 1 when `answer.txt` holds the label."""

    async def run(self, ctx):
        """Start it in a folder of its own, with a home of its own, and grade what it did."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            folder, home = set_up(scratch, ctx.data)
            ended = await run_program(
                [
                    "mini",
                    "--task",
                    ctx.prompt,
                    "--model",
                    f"openai/{ctx.model_name}",
                    *OPTIONS,
                    "--output",
                    str(home / "run.json"),
                ],
                folder=folder,
                env={
                    "HOME": str(home),
                    "OPENAI_API_BASE": ctx.base_url,
                    "OPENAI_API_KEY": ctx.api_key,
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch the prices of models
                    "MSWEA_CONFIGURED": "true",
                    "MSWEA_COST_TRACKING": "ignore_errors",
                },
            )
            reward, truncated = grade(folder, ctx.label), was_cut(home / "run.json")
        if ended.returncode:
            raise RuntimeError(f"mini ended with {ended.returncode}: {(ended.stderr or ended.stdout)[-500:]}")
        return Result(reward=reward, truncated=truncated)


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(MiniSweAgent)
