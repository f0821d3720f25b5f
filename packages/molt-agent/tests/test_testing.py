"""The scripted model, as the real OpenAI SDK sees it."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from molt.agents.testing import ScriptedModel, ScriptedReply, ToolCall

ASK = [{"role": "user", "content": "What is it?"}]
CALLS = ScriptedReply(text="Let me see.", tool_calls=(ToolCall("look", {"at": "it"}), ToolCall("guess", '{"broken')))


@pytest.fixture
async def client(model: ScriptedModel) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=model.base_url, api_key="any", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def model(request: pytest.FixtureRequest) -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel(request.param) as scripted:
        yield scripted


@pytest.mark.parametrize("model", [["one", "two"]], indirect=True)
async def test_replies_come_in_order_and_the_last_repeats(client: AsyncOpenAI):
    texts = []
    for _ in range(3):
        completion = await client.chat.completions.create(model="m", messages=ASK)
        texts.append(completion.choices[0].message.content)
    assert texts == ["one", "two", "two"]
    assert completion.model == "m"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 1)


@pytest.mark.parametrize("model", [[CALLS]], indirect=True)
async def test_a_stream_accumulates_to_the_whole_reply(client: AsyncOpenAI):
    whole = (await client.chat.completions.create(model="m", messages=ASK)).choices[0]
    stream = await client.chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    text, calls, finish, usage = "", {}, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            text += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                name, arguments = calls.get(delta.index, ("", ""))
                calls[delta.index] = (name + (delta.function.name or ""), arguments + delta.function.arguments)
    assert (text, finish) == (whole.message.content, whole.finish_reason) == ("Let me see.", "tool_calls")
    assert whole.message.tool_calls is not None
    assert list(calls.values()) == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    assert list(calls.values()) == [("look", '{"at":"it"}'), ("guess", '{"broken')]
    assert usage is not None
    assert usage.total_tokens == 8


@pytest.mark.parametrize(
    "model", [[ScriptedReply(status=400, text="too long", code="context_length_exceeded")]], indirect=True
)
async def test_errors_have_the_shape_of_openai(client: AsyncOpenAI):
    with pytest.raises(openai.BadRequestError, match="too long") as caught:
        await client.chat.completions.create(model="m", messages=ASK)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("model", [lambda body: body["messages"][-1]["content"].upper()], indirect=True)
async def test_a_function_answers_concurrent_calls_by_their_body(client: AsyncOpenAI):
    async def ask(text: str) -> str | None:
        completion = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        return completion.choices[0].message.content

    assert await asyncio.gather(*(ask(text) for text in "abc")) == ["A", "B", "C"]


async def test_a_client_that_leaves_ends_its_request():
    handled: asyncio.Queue[asyncio.Task | None] = asyncio.Queue()

    class Watched(ScriptedModel):
        async def handle(self, request):
            handled.put_nowait(asyncio.current_task())
            return await super().handle(request)

    async with (
        Watched([ScriptedReply(wait_for=asyncio.Event())]) as model,
        AsyncOpenAI(base_url=model.base_url, api_key="any") as client,
    ):
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
        handling = await handled.get()
        call.cancel()
        await asyncio.wait({handling}, timeout=5)
        assert handling.cancelled()


def test_a_script_needs_a_reply_and_a_url_needs_a_running_server():
    with pytest.raises(ValueError, match="script has no replies"):
        ScriptedModel([])
    with pytest.raises(RuntimeError, match="not running"):
        _ = ScriptedModel(["4"]).url
