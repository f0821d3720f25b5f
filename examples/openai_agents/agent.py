"""An agent of the OpenAI Agents SDK, on the Responses API of the session.

Each rollout gets a folder with the files of its task row and two tools for it; what the agent left in `answer.txt` is
graded against the row's label.
"""
# pyright: reportMissingImports=false

import tempfile
from pathlib import Path

from agents import Agent, MaxTurnsExceeded, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from molt.agents import ChatAgent, ChatAgentRunner, Result

MAX_TURNS = 10


def file_tools(folder):
    """The agent's tools, on the files of one rollout."""

    @function_tool
    def read_file(name: str) -> str:
        """Read a file of the working folder."""
        return (folder / Path(name).name).read_text()

    @function_tool
    def write_file(name: str, text: str) -> str:
        """Write a file of the working folder."""
        (folder / Path(name).name).write_text(text)
        return f"wrote {name}"

    return [read_file, write_file]


def put_files(folder, task):
    """Write the files of the task row."""
    for name, text in task.get("files", {}).items():
        (folder / name).write_text(text)


def grade(folder, label):
    """1.0 when `answer.txt` holds the label."""
    answer = folder / "answer.txt"
    return float(answer.is_file() and answer.read_text().strip() == label)


class Clerk(ChatAgent):
    """Works with files; the reward is 1 when `answer.txt` holds the label."""

    async def run(self, ctx):
        """Run the agent, with a client of its own for each rollout."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            put_files(folder, ctx.data)
            truncated = False
            async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
                agent = Agent(
                    name="clerk",
                    instructions="Use the tools.",
                    tools=file_tools(folder),
                    model=OpenAIResponsesModel(model=ctx.model_name, openai_client=client),
                )
                try:
                    # Traces would be sent to the vendor.
                    config = RunConfig(tracing_disabled=True)
                    await Runner.run(agent, ctx.prompt, max_turns=MAX_TURNS, run_config=config)
                except MaxTurnsExceeded:
                    truncated = True
            reward = grade(folder, ctx.label)
        return Result(reward=reward, truncated=truncated)


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(Clerk)
