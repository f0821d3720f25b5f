"""The code of the README, run as it stands."""

import re
import ssl
from pathlib import Path

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from molt.agents.load import load_runner
from molt.agents.rollout import run_lease
from molt.agents.testing import ScriptedModel

README = (Path(__file__).parents[1] / "README.md").read_text()
AGENT, GRADED, ENVIRONMENT, TEST = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


async def test_the_agent_and_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(TEST, names)
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    await names["test_my_agent"]()
    agent.write_text(AGENT.replace(" == ctx.label", " == 'never said'"))
    with pytest.raises(AssertionError):  # so it was the agent that satisfied the test
        await names["test_my_agent"]()


async def test_the_agent_that_grades(tmp_path: Path):
    (tmp_path / "graded.py").write_text(GRADED)
    async with ScriptedModel([" 4"]) as model:
        lease = model.lease({"prompt": "2 + 2 =", "label": "4"})
        report = await run_lease(load_runner(str(tmp_path / "graded.py")), lease, worker_id="test")
    assert (report.reward, report.answer) == (1.0, " 4")


async def test_the_environment(tmp_path: Path):
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    async with ScriptedModel(["3", "7"]) as model:
        lease = model.lease({"limit": 9, "label": 7})
        report = await run_lease(load_runner(str(tmp_path / "environment.py")), lease, worker_id="test")
    assert report.reward == 1.0
    assert [m["content"] for m in model.requests[1].body["messages"]] == [
        "Guess a number from 1 to 9.",
        "3",
        "No. Guess again.",
    ]


async def test_sharing_the_certificate_store_works():
    context = ssl.create_default_context()
    async with ScriptedModel(["4"]) as model:
        for _ in range(2):
            http_client = DefaultAsyncHttpxClient(verify=context)
            async with AsyncOpenAI(base_url=model.base_url, api_key="any", http_client=http_client) as client:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "2 + 2 ="}])
    assert len(model.requests) == 2
