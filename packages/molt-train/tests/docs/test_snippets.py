"""What the documents show, run or at least read: the agent, the configuration, the commands, the answers, the links."""

import json
import re
import shlex
from pathlib import Path

import pytest

from molt.agents import cli as agents_cli
from molt.agents.load import load_runner
from molt.agents.rollout import run_lease
from molt.agents.testing import ScriptedModel
from molt.train import cli as train_cli
from molt.train.config import Config, check, load_config
from molt.train.engine.fake import read_script
from molt.train.pool.tasks import load_tasks

ROOT = Path(__file__).parents[4]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")])
README = ROOT / "README.md"
PROGRAMS = {"molt-train", "molt-agent", "python", "pytest"}
TRAIN_README = ROOT / "packages" / "molt-train" / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every command line of the console blocks, once, without its comment."""
    text = "\n".join(block for page in PAGES for block in blocks(page, "console")).replace("\\\n", " ")
    return sorted({line.split("  #")[0].strip() for line in text.splitlines() if line.strip()})


@pytest.mark.parametrize(("reply", "reward"), [("20", 1.0), (" 20\n", 1.0), ("21", 0.0)])
async def test_the_agent_of_the_readme(tmp_path, reply, reward):
    (agent,) = blocks(README, "python")
    (tmp_path / "agent.py").write_text(agent)
    async with ScriptedModel([reply]) as model:
        lease = model.lease({"prompt": "What is (2 + 3) * 4?", "label": "20"})
        report = await run_lease(load_runner(str(tmp_path / "agent.py")), lease, worker_id="docs")
    assert (report.outcome, report.reward, report.error) == ("completed", reward, None)
    assert model.requests[0].body["messages"] == [{"role": "user", "content": "What is (2 + 3) * 4?"}]


def test_the_configuration_of_the_readme(tmp_path):
    (tmp_path / "config.toml").write_text("\n".join(blocks(README, "toml")))
    config = load_config(tmp_path / "config.toml", [], Config)
    check(config)
    assert all([config.model.path, config.run.dir, config.data.path, config.agent.path, config.server.token])


def test_the_task_rows_of_the_readme(tmp_path):
    (tmp_path / "tasks.jsonl").write_text(blocks(README, "json")[0])
    assert [task.data["label"] for task in load_tasks(tmp_path / "tasks.jsonl")] == ["20", "5"]


def test_the_script_of_the_scripted_engine(tmp_path):
    (tmp_path / "script.jsonl").write_text(blocks(TRAIN_README, "json")[0])
    assert [line.match for line in read_script(tmp_path / "script.jsonl")] == ["weather", None]


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("curl ")])
def test_every_command_is_one(command):
    words = shlex.split(command)
    if words[:2] == ["uv", "run"]:
        words = words[next(index for index, word in enumerate(words) if word in PROGRAMS) :]
    match words:
        case ["molt-train", *arguments]:
            args = train_cli._parse(arguments)
            load_config(None, getattr(args, "overrides", []), Config)
        case ["molt-agent", *arguments]:
            agents_cli._parser().parse_args(arguments)
        case ["make", target]:
            assert target in re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
        case ["pip", "install", path] | ["python", path]:
            assert (ROOT / path).exists()
        case ["python", "-m", module]:
            assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()
        case _:
            pytest.fail(f"what is {command!r}?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_answer_shown_is_json_and_every_link_leads_somewhere(page):
    for block in blocks(page, "json"):
        try:
            json.loads(block)
        except ValueError:
            assert all(json.loads(line) for line in block.splitlines())
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
