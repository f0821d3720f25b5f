"""Loading agent modules."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from molt.agents import AgentLoadError, ChatAgentRunner
from molt.agents.load import load_runner

AGENT = """
from molt.agents import ChatAgent, ChatAgentRunner, Result
from {neighbour} import REWARD

class MyAgent(ChatAgent):
    async def run(self, ctx):
        return Result(REWARD)

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(MyAgent)
"""


@pytest.fixture(autouse=True)
def restored_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return str(path)


def test_a_file_may_import_its_neighbours(tmp_path: Path):
    write(tmp_path / "rewards_of_file.py", "REWARD = 0.5")
    runner = load_runner(write(tmp_path / "agent.py", AGENT.format(neighbour="rewards_of_file")))
    assert isinstance(runner, ChatAgentRunner)


def test_a_dotted_name_is_looked_up_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "somepackage" / "rewards.py", "REWARD = 0.5")
    write(tmp_path / "somepackage" / "agent.py", AGENT.format(neighbour="somepackage.rewards"))
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_runner("somepackage.agent"), ChatAgentRunner)


def test_a_file_does_not_hide_an_installed_package(tmp_path: Path):
    write(tmp_path / "neighbour_x.py", "REWARD = 0.5")
    load_runner(write(tmp_path / "httpx.py", AGENT.format(neighbour="neighbour_x")))
    assert "molt_agent_file_httpx" in sys.modules


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import json\nimport no_such_library\n", "line 2: ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1\n\ny = 1 / 0\n", "line 3: ZeroDivisionError"),
        ("def f(:\n    pass\n", r"agent.py, line 1: SyntaxError"),
        ("import sys\nsys.exit(4)\n", "line 2: SystemExit: 4"),
        ("class Agent: pass\n", "exports no AgentRunner: define"),
        ("from molt.agents import AgentRunner\n", "exports no AgentRunner: define"),
        ("class AgentRunner: pass\n", "derive it from ChatAgentRunner or StepEnvRunner"),
        ("class AgentRunner:\n    def __init__(self):\n        self.x = [][0]\n", "line 3: IndexError"),
        (
            "from molt.agents import *\nclass AgentRunner(ChatAgentRunner):\n"
            "    def __init__(self):\n        super().__init__(ChatAgent)\n",
            "line 4: TypeError: ChatAgent lacks run",
        ),
    ],
)
def test_a_module_that_cannot_be_used_says_why_and_where(tmp_path: Path, text: str, reason: str):
    with pytest.raises(AgentLoadError, match=reason) as caught:
        load_runner(write(tmp_path / "agent.py", text))
    assert "\n" not in str(caught.value)
    assert "agent.py" in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentLoadError, match=r"nothere.py: no such file"):
        load_runner("nothere.py")
    with pytest.raises(AgentLoadError, match=r"no_such_package.agent: no such module: give its dotted name, or a path"):
        load_runner("no_such_package.agent")
    write(tmp_path / "half_package" / "agent.py", "import json\n\nimport no_such_library\n")
    with pytest.raises(AgentLoadError, match=r"half_package.agent: cannot be imported: line 3: ModuleNotFoundError"):
        load_runner("half_package.agent")
