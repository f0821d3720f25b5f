"""A LangGraph graph, on the chat completions of the session.

Each rollout gets a folder with the files of its task row and two tools for it; what the graph left in `answer.txt` is
graded against the row's label.
"""
# pyright: reportMissingImports=false

import tempfile
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from molt.agents import ChatAgent, ChatAgentRunner, Result

MAX_STEPS = 20


def file_tools(folder):
    """The agent's tools, on the files of one rollout."""

    @tool
    def read_file(name: str) -> str:
        """Read a file of the working folder."""
        return (folder / Path(name).name).read_text()

    @tool
    def write_file(name: str, text: str) -> str:
        """Write a file of the working folder."""
        (folder / Path(name).name).write_text(text)
        return f"wrote {name}"

    return [read_file, write_file]


def build_graph(model, tools):
    """The usual loop: the model, and its tools until it answers without one."""

    async def call_model(state):
        return {"messages": [await model.bind_tools(tools).ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


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
        """Run the graph on the task's messages."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            put_files(folder, ctx.data)
            model = ChatOpenAI(model=ctx.model_name, base_url=ctx.base_url, api_key=ctx.api_key)
            graph, truncated = build_graph(model, file_tools(folder)), False
            try:
                await graph.ainvoke({"messages": list(ctx.messages)}, {"recursion_limit": MAX_STEPS})
            except GraphRecursionError:
                truncated = True
            reward = grade(folder, ctx.label)
        return Result(reward=reward, truncated=truncated)


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(Clerk)
