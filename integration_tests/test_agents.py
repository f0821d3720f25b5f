"""The documented agents, verbatim, against a real engine; and streams of the real SDKs, equal to what was recorded."""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from calculator import tasks
from calculator.demo import HERE, write_rows
from molt.agents.load import load_runner
from molt.agents.protocol import Lease, SamplingParams, SessionCredentials
from molt.agents.rollout import run_lease

AGENTS = Path(__file__).parent / "agents"
SAMPLING = SamplingParams(max_tokens=16, temperature=1.0)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
async def control(gateway):
    headers = {"authorization": "Bearer gateway-token"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/api/v1", headers=headers) as client:
        yield client


async def open_session(control) -> SessionCredentials:
    reply = await control.post("/sessions", json={"sampling_params": {"max_tokens": 16, "temperature": 1.0}})
    assert reply.status_code == 201
    return SessionCredentials(**reply.json())


async def recording(control, session_id):
    reply = await control.get(f"/sessions/{session_id}")
    assert reply.status_code == 200
    return reply.json()


def lease(session: SessionCredentials) -> Lease:
    return Lease(
        lease_id="l",
        rollout_id="r",
        group_id="g",
        attempt=1,
        task={"prompt": "What is (1 + 2) * 3?", "label": "9"},
        session=session,
        sampling_params=SAMPLING,
        timeout_s=60.0,
    )


@pytest.mark.parametrize("name", ["chat_openai", "chat_anthropic", "step_env"])
async def test_the_documented_agent_runs_verbatim(control, name):
    session = await open_session(control)
    report = await run_lease(load_runner(str(AGENTS / f"{name}.py")), lease(session), worker_id="w")
    assert (report.outcome, report.error) == ("completed", None)
    assert 0.0 <= report.reward <= 1.0
    record = await recording(control, session.session_id)
    (turn,) = record["turns"]
    assert turn["wire"] == ("messages" if name == "chat_anthropic" else "chat")
    assert turn["status"] == "delivered"
    assert 1 <= len(turn["token_ids"]) <= 16
    assert len(turn["token_ids"]) == len(turn["logprobs"]) == len(turn["versions"])
    assert all(logprob <= 0 for logprob in turn["logprobs"])
    (segment,) = record["segments"]
    assert segment["token_ids"] == turn["context_ids"] + turn["token_ids"]
    assert segment["action_mask"] == [0] * turn["prompt_length"] + [1] * len(turn["token_ids"])


async def test_an_openai_stream_is_what_was_recorded(control):
    session = await open_session(control)
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    text, usage = "", None
    stream = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "What is (1 + 2) * 3?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    (turn,) = (await recording(control, session.session_id))["turns"]
    assert usage.completion_tokens == len(turn["token_ids"]) == len(turn["versions"])
    assert usage.prompt_tokens == turn["prompt_length"]
    assert text
    await client.close()


async def test_an_anthropic_stream_is_what_was_recorded(control):
    session = await open_session(control)
    client = AsyncAnthropic(base_url=session.session_url, api_key=session.api_key)
    messages = [{"role": "user", "content": "What is (1 + 2) * 3?"}]
    async with client.messages.stream(model="policy", messages=messages, max_tokens=16) as stream:
        final = await stream.get_final_message()
    (turn,) = (await recording(control, session.session_id))["turns"]
    assert final.usage.output_tokens == len(turn["token_ids"]) == len(turn["versions"])
    assert final.stop_reason in {"end_turn", "max_tokens"}
    await client.close()


async def test_a_second_turn_extends_the_first_ones_row(control):
    session = await open_session(control)
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    messages = [{"role": "user", "content": "What is (1 + 2) * 3?"}]
    for follow_up in ("Are you sure?", None):
        response = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(response.choices[0].message.model_dump(exclude_none=True))
        if follow_up:
            messages.append({"role": "user", "content": follow_up})
    record = await recording(control, session.session_id)
    first, second = record["turns"]
    assert second["parent_turn_id"] == first["turn_id"]
    assert second["prompt_length"] == first["prompt_length"] + len(first["token_ids"]) + len(second["context_ids"])
    (segment,) = record["segments"]
    assert sum(segment["action_mask"]) == len(first["token_ids"]) + len(second["token_ids"])
    await client.close()


async def test_the_calculator_runs_unchanged_under_try(control, tmp_path):
    session = await open_session(control)
    write_rows(tmp_path / "tasks.jsonl", [tasks.row((1, "+", 2, "*", 3)), tasks.row((7, "-", 3, "+", 1))])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "molt.agents", "try", str(HERE / "agent.py"), "--tasks", str(tmp_path / "tasks.jsonl")),
        *("--base-url", session.base_url, "--api-key", session.api_key, "--model", "policy", "--max-tokens", "16"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    *lines, last = [json.loads(line) for line in output.splitlines()]
    assert process.returncode == 0
    assert sorted(line["task"] for line in lines) == [0, 1]
    assert {line["outcome"] for line in lines} == {"completed"}
    assert last["summary"]["num_tasks"] == 2
    assert len((await recording(control, session.session_id))["turns"]) >= 2
