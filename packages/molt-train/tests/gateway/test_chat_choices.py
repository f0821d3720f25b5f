"""Several choices of one request, log-probs and usage on Chat Completions."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import math

import pytest

from molt.train.engine.protocol import EngineChunk
from molt.train.trajectory import build_trajectory

from .replies import CALCULATOR, call, events, fold_chat, whole_chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "1 + 2?"}]
PATH = "/v1/chat/completions"
TWO = ({"text": f"one {call('{}')}{call('{}')}", "chunks": [2, 2]}, {"text": "two ünï", "chunks": [1, 3]})


async def test_choices_are_siblings_that_share_one_prompt(bench):
    bench.serve({"text": "one"}, {"text": "two"}, {"text": "three"}, {"text": "four"})
    caller = bench.open()
    completion = await caller.openai.chat.completions.create(model="m", messages=USER, n=3)
    texts = [choice.message.content for choice in completion.choices]
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert sorted(texts) == ["one", "three", "two"]
    turns = caller.turns
    assert {turn.response_id for turn in turns} == {completion.id}
    assert completion.usage.prompt_tokens == turns[0].prompt_length
    assert completion.usage.completion_tokens == sum(len(turn.token_ids) for turn in turns)
    assert all(turn.parent_turn_id is None and turn.context_ids == turns[0].context_ids for turn in turns)
    chosen = completion.choices[1].message
    messages = [*USER, chosen.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    await caller.openai.chat.completions.create(model="m", messages=messages)
    last = caller.turns[-1]
    (parent,) = [turn for turn in turns if turn.turn_id == last.parent_turn_id]
    assert bench.decode(parent.token_ids).startswith(chosen.content)
    trajectory = build_trajectory("s", caller.turns)
    assert [segment.trained for segment in trajectory.segments].count(True) == 1
    assert len(trajectory.segments) == 3
    bench.check_exact(caller)


async def test_siblings_behind_a_turn_train_what_they_share_once(bench):
    bench.serve({"text": "base"}, {"text": "left"}, {"text": "right"})
    caller = bench.open()
    first = await caller.openai.chat.completions.create(model="m", messages=USER)
    messages = [*USER, first.choices[0].message.model_dump(exclude_none=True), *USER]
    await caller.openai.chat.completions.create(model="m", messages=messages, n=2)
    base, *siblings = caller.turns
    assert [turn.parent_turn_id for turn in siblings] == [base.turn_id] * 2
    segments = build_trajectory("s", caller.turns).segments
    assert [segment.turn_ids for segment in segments] == [[base.turn_id, turn.turn_id] for turn in siblings]
    start = len(base.context_ids)
    base_masks = [sum(segment.action_mask[start : start + len(base.token_ids)]) for segment in segments]
    assert sorted(base_masks) == [0, len(base.token_ids)]
    bench.check_exact(caller)


async def test_streamed_choices_interleave_and_fold_to_the_whole_ones(bench):
    bench.serve(*TWO)
    whole = await bench.open().openai.chat.completions.create(model="m", messages=USER, tools=[CALCULATOR], n=2)
    bench.serve(*TWO)
    caller = bench.open()
    stream = await caller.openai.chat.completions.create(
        model="m", messages=USER, tools=[CALCULATOR], n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    order = [chunk.choices[0].index for chunk in chunks if chunk.choices]
    assert order[:2] == [0, 1]
    assert order != sorted(order), "neither choice waits for the other"
    for index, choice in enumerate(whole.choices):
        own = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert fold_chat(own) == whole_chat(whole.model_copy(update={"choices": [choice]}))
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage == whole.usage
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_the_sdks_own_accumulator_folds_every_choice(bench):
    strict = [{**CALCULATOR, "function": {**CALCULATOR["function"], "strict": True}}]
    bench.serve(*TWO)
    whole = await bench.open().openai.chat.completions.create(model="m", messages=USER, tools=strict, n=2)
    bench.serve(*TWO)
    caller = bench.open()
    async with caller.openai.chat.completions.stream(model="m", messages=USER, tools=strict, n=2) as manager:
        final = await manager.get_final_completion()
    for folded, choice in zip(final.choices, whole.choices, strict=True):
        assert folded.finish_reason == choice.finish_reason
        assert folded.message.content == choice.message.content
        made = [
            [(part.function.name, part.function.arguments) for part in m.tool_calls or []]
            for m in (folded.message, choice.message)
        ]
        assert made[0] == made[1]


async def test_every_frame_of_a_stream_is_in_its_place(bench):
    bench.serve({"text": f"<think>\nhm\n</think>\n\nLet me. {call('{}')}{call('{}')}"})
    caller = bench.open()
    body = {
        "model": "any",
        "messages": USER,
        "tools": [CALCULATOR],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    frames = [data for _, data in events((await caller.post(PATH, body)).content)]
    assert frames[-1] == "[DONE]"
    *chunks, usage = frames[:-1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(caller.turns[0].token_ids)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert {tuple(chunk) for chunk in chunks} == {("id", "object", "created", "model", "choices", "usage")}
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in frames[:-1]} == {
        (caller.turns[0].response_id, "chat.completion.chunk", "any")
    }
    assert {tuple(chunk["choices"][0]) for chunk in chunks} == {("index", "delta", "finish_reason")}, "no extras leak"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    kinds = [next(iter(delta)) for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, key=["reasoning", "content", "tool_calls"].index)
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas if "reasoning" in delta)
    parts = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    heads = [part for part in parts if "id" in part]
    assert [head["index"] for head in heads] == [0, 1]
    assert all(
        head["type"] == "function" and head["function"] == {"name": "calculator", "arguments": ""} for head in heads
    )
    assert all(
        set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
        for part in parts
        if part not in heads
    )
    assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)


async def test_arguments_that_come_in_the_first_chunk_are_shown(bench):
    """vllm#34053: a chunk that brings a whole call brings its arguments too."""
    bench.serve({"text": call('{"a": 1}'), "chunks": [1000]})
    caller = bench.open()
    chunks = await caller.openai.chat.completions.create(model="m", messages=USER, tools=[CALCULATOR], stream=True)
    assert fold_chat([chunk async for chunk in chunks])["calls"] == [["calculator", '{"a": 1}']]


@pytest.mark.parametrize("chunks", [[], [1000], [3, 5, 7]])
async def test_no_log_prob_is_lost_to_the_parser_and_no_id_to_the_record(bench, chunks):
    """vllm#27482 and vllm#37737, agent-lightning#262: chunks of which nothing is shown lose nothing."""
    text = f"<think>\nhm\n</think>\n\nLet me. {call('{}')} hidden"
    bench.serve({"text": text, "chunks": chunks})
    caller = bench.open()
    kwargs = {"messages": USER, "tools": [CALCULATOR], "logprobs": True}
    whole = await caller.openai.chat.completions.create(model="m", **kwargs)
    stream = await caller.openai.chat.completions.create(model="m", stream=True, **kwargs)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [item for part in parts if part for item in part.content]
    assert streamed == whole.choices[0].logprobs.content
    for turn in caller.turns:
        assert [item.token for item in streamed] == [bench.decode([token_id]) for token_id in turn.token_ids]
        assert turn.token_ids == [*bench.encode(text), *bench.encode("<|im_end|>")]
    bench.check_exact(caller)


async def test_log_probs_without_a_number_of_alternatives_are_served(bench):
    """NeMo-RL#3390: `logprobs: true, top_logprobs: null` was an error of the server."""
    caller = bench.open()
    response = await caller.post(PATH, {"messages": USER, "logprobs": True, "top_logprobs": None})
    assert response.status_code == 200
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in content] == [[]] * len(caller.turns[0].token_ids)


async def test_alternatives_are_shown_whole_and_streamed(bench):
    bench.serve({"text": "hi", "logprob": -0.5})
    caller = bench.open()
    kwargs = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = await caller.openai.chat.completions.create(model="m", **kwargs)
    tokens = whole.choices[0].logprobs.content
    assert [[other.logprob for other in item.top_logprobs] for item in tokens] == [[-0.5, -1.5]] * len(tokens)
    assert [item.top_logprobs[0].token for item in tokens] == [item.token for item in tokens]
    stream = await caller.openai.chat.completions.create(model="m", stream=True, **kwargs)
    assert [
        item async for chunk in stream if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content
    ] == tokens


async def test_a_log_prob_of_minus_infinity_is_a_number(bench):
    class Engine:
        async def generate(self, request):
            (end,) = bench.encode("<|im_end|>")
            top = [[(end, 0.0), (5, -math.inf)]]
            return EngineChunk(token_ids=[end], logprobs=[0.0], versions=[0], finish_reason="stop", top_logprobs=top)

    bench.serve({"text": "x"}, engine=Engine())
    completion = await bench.open().openai.chat.completions.create(
        model="m", messages=USER, logprobs=True, top_logprobs=2
    )
    assert [other.logprob for other in completion.choices[0].logprobs.content[0].top_logprobs] == [0.0, -9999.0]
