"""The list of models, in the shape of either vendor, and what a call's model name is for."""

import anthropic
import openai
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]


async def test_the_openai_sdk_lists_and_finds_the_policy(bench):
    bench.serve({"text": "hello"}, max_model_len=1234)
    caller = bench.open()
    (listed,) = [model async for model in caller.openai.models.list()]
    found = await caller.openai.models.retrieve("policy")
    assert listed == found
    assert (found.id, found.object, found.owned_by, found.model_extra) == (
        "policy",
        "model",
        "molt",
        {"max_model_len": 1234},
    )


async def test_the_anthropic_sdk_lists_and_finds_the_policy(bench):
    bench.serve({"text": "hello"}, max_model_len=1234)
    caller = bench.open()
    (listed,) = [model async for model in caller.anthropic.models.list()]
    found = await caller.anthropic.models.retrieve("policy")
    assert listed == found
    assert (found.id, found.type, found.display_name, found.lifecycle) == ("policy", "model", "policy", "active")
    assert (found.max_input_tokens, found.max_tokens) == (1234, 1234)
    assert found.created_at.tzinfo is not None


async def test_a_model_that_is_not_served_is_not_found(bench):
    caller = bench.open()
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served: 'policy' is"):
        await caller.openai.models.retrieve("gpt-9")
    with pytest.raises(anthropic.NotFoundError):
        await caller.anthropic.models.retrieve("claude-9")


async def test_a_call_may_name_any_model_and_is_answered_by_that_name(bench):
    caller = bench.open()
    for name in ("gpt-5.5", "claude-opus-5", "org/model:tag"):
        chat = await caller.openai.chat.completions.create(model=name, messages=USER)
        text = await caller.openai.completions.create(model=name, prompt="hi")
        message = await caller.anthropic.messages.create(model=name, messages=USER, max_tokens=9)
        assert (chat.model, text.model, message.model) == (name, name, name)
