"""What a configuration has to name: a model, and an agent."""

import pytest

from molt.train.engine.scripted_tokenizer import scripted_tokenizer

AGENT = """
from molt.agents import ChatAgent, ChatAgentRunner, Result

class Agent(ChatAgent):
    async def run(self, ctx):
        return Result(reward=1.0)

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Agent)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return scripted_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def agent(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return path
