"""The agents of the documentation, as they stand, on the real OpenAI SDK."""

import json

from openai import AsyncOpenAI, OpenAI

from molt.agents import AgentRunner as BaseRunner
from molt.agents import ChatAgent, ChatAgentRunner, Result
from molt.agents.protocol import ResultReport
from molt.agents.rollout import run_lease
from molt.agents.testing import ScriptedModel, ScriptedReply, ToolCall


def grade(text, label):
    return float(text == label)


class MyAgent(ChatAgent):
    async def run(self, ctx):
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        response = await client.chat.completions.create(
            model=ctx.model_name,
            messages=list(ctx.messages),
            max_tokens=ctx.sampling_params.max_tokens,
            temperature=ctx.sampling_params.temperature,
        )
        return Result(reward=grade(response.choices[0].message.content, ctx.label))


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(MyAgent)


async def report_of(runner: BaseRunner, model: ScriptedModel) -> ResultReport:
    return await run_lease(runner, model.lease({"prompt": "2 + 2 =", "label": "4"}), worker_id="w1")


async def test_the_documented_agent(model: ScriptedModel):
    report = await report_of(AgentRunner(), model)
    assert (report.outcome, report.reward) == ("completed", 1.0)
    (request,) = model.requests
    assert request.body["messages"] == [{"role": "user", "content": "2 + 2 ="}]
    assert (request.body["model"], request.body["max_tokens"], request.body["temperature"]) == ("scripted", 1024, 1.0)
    assert request.headers["authorization"] == f"Bearer {model.session().api_key}"


class BlockingAgent(ChatAgent):
    def run(self, ctx):
        with OpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            stream = client.chat.completions.create(model=ctx.model_name, messages=list(ctx.messages), stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        return Result(reward=grade(text, ctx.label))


async def test_a_plain_agent_on_the_blocking_sdk(model: ScriptedModel):
    report = await report_of(ChatAgentRunner(BlockingAgent), model)
    assert (report.outcome, report.reward) == ("completed", 1.0)


class ToolAgent(ChatAgent):
    async def run(self, ctx):
        messages = list(ctx.messages)
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            while True:
                response = await client.chat.completions.create(model=ctx.model_name, messages=messages)
                message = response.choices[0].message
                if not message.tool_calls:
                    return Result(reward=grade(message.content, ctx.label), info={"turns": len(messages)})
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    total = sum(json.loads(call.function.arguments)["terms"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})


async def test_a_tool_loop():
    async with ScriptedModel([ScriptedReply(tool_calls=(ToolCall("add", {"terms": [2, 2]}),)), "4"]) as model:
        report = await report_of(ChatAgentRunner(ToolAgent), model)
    assert (report.outcome, report.reward, report.info) == ("completed", 1.0, {"turns": 3})
    assert model.requests[1].body["messages"][-1] == {"role": "tool", "tool_call_id": "call_0", "content": "4"}
