import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


async def test_smoke(bench):
    bench.serve(
        {
            "text": '<think>\nlet me see\n</think>\n\nOk.\n<tool_call>\n{"name": "calculator", "arguments": {"a":1,  "b": 2}}\n</tool_call>'
        },
        {"text": "the answer is 3"},
    )
    caller = bench.open()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 2?"}]
    r = await caller.openai.chat.completions.create(model="m", messages=messages, tools=[CALCULATOR])
    print(r)
    messages.append(r.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": r.choices[0].message.tool_calls[0].id, "content": "3"})
    stream = await caller.openai.chat.completions.create(model="m", messages=messages, tools=[CALCULATOR], stream=True)
    async for c in stream:
        print(c)
    bench.check_exact(caller)
    for t in caller.turns:
        print(t)
        print(bench.decode(t.context_ids), "|", bench.decode(t.token_ids))
    m = await caller.anthropic.messages.create(model="m", max_tokens=100, messages=[{"role": "user", "content": "hi"}])
    print(m)
    async with caller.anthropic.messages.stream(
        model="m", max_tokens=100, messages=[{"role": "user", "content": "hi"}]
    ) as s:
        print(await s.get_final_message())
