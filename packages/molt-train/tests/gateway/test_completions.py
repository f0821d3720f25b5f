"""Completions through the real openai SDK: raw prompts as text and as token ids, whole and streamed."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import itertools
import shutil

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from molt.train.gateway.render import ChatRenderer
from molt.train.trajectory import build_trajectory

from .replies import call, events

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATH = "/v1/completions"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def frames_of(caller, **fields):
    response = await caller.post(PATH, {"model": "m", "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = [data for _, data in events(response.content)]
    assert frames[-1] == "[DONE]"
    assert len({(frame["id"], frame["object"], frame["created"], frame["model"]) for frame in frames[:-1]}) == 1
    return frames[:-1]


def folded(frames):
    """Text and finish reason of every choice; each ends once, and nothing of it comes later."""
    choices = {}
    for frame in frames:
        for choice in frame["choices"]:
            text, finish = choices.get(choice["index"], ("", None))
            assert finish is None
            choices[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return dict(sorted(choices.items()))


def shown(completion):
    return {choice.index: (choice.text, choice.finish_reason) for choice in completion.choices}


async def test_a_text_prompt_goes_to_the_engine_as_it_is(bench):
    bench.serve({"text": "hello ünï"})
    caller = bench.open()
    completion = await caller.openai.completions.create(model="any", prompt=PROMPT, max_tokens=50)
    (turn,) = caller.turns
    assert shown(completion) == {0: ("hello ünï", "stop")}
    assert (completion.object, completion.model, completion.id) == ("text_completion", "any", turn.response_id)
    assert completion.id.startswith("cmpl-")
    assert turn.context_ids == bench.encode(PROMPT), "control tokens of a raw prompt count as such"
    assert bench.encode("<|im_start|>")[0] == turn.context_ids[0]
    assert (turn.wire, turn.opened_by, turn.status, turn.adopted) == ("completions", "start", "delivered", True)
    assert completion.usage.prompt_tokens == turn.prompt_length
    assert completion.usage.completion_tokens == len(turn.token_ids)
    bench.check_exact(caller)


async def test_a_tokenizer_that_marks_the_beginning_of_every_text_marks_that_of_a_text_prompt(
    bench, model_path, tmp_path
):
    folder = shutil.copytree(model_path, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    mark = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", mark)])
    tokenizer.save(str(folder / "tokenizer.json"))
    bench.serve({"text": "hello"}, renderer=ChatRenderer(folder))
    caller = bench.open()
    await caller.openai.completions.create(model="m", prompt="one")
    await caller.openai.completions.create(model="m", prompt=bench.encode("one"))
    assert [turn.context_ids for turn in caller.turns] == [[mark, *bench.encode("one")], bench.encode("one")]


async def test_token_ids_go_to_the_engine_as_they_are(bench):
    bench.serve({"text": "hello"})
    caller = bench.open()
    ids = [*bench.encode("th"), *bench.encode("e"), *bench.encode(" th")]
    assert bench.encode(bench.decode(ids)) != ids, "what re-encoding would not give again"
    completion = await caller.openai.completions.create(model="m", prompt=ids)
    assert shown(completion) == {0: ("hello", "stop")}
    assert caller.turns[0].context_ids == ids
    bench.check_exact(caller)


async def test_the_reply_is_text_whatever_it_spells(bench):
    text = f" <think>\nhm\n</think>\n\n {call('{}')} more \n"
    bench.serve({"text": text, "chunks": [3, 1, 4]})
    caller = bench.open()
    whole = await caller.openai.completions.create(model="m", prompt=PROMPT)
    assert shown(whole) == {0: (text, "stop")}
    assert folded(await frames_of(caller, prompt=PROMPT)) == shown(whole)
    assert not {name for name in caller.session.counters if name.startswith("tool_call")}


async def test_prompts_times_choices_are_numbered_prompt_by_prompt(bench):
    script = [{"match": name, "text": f"to {name} {i}"} for name in ("aaa", "bbb") for i in range(2)]
    bench.serve(*script)
    caller = bench.open()
    kwargs = {"prompt": ["say aaa", "say bbb"], "n": 2}
    whole = await caller.openai.completions.create(model="m", **kwargs)
    assert shown(whole) == {
        0: ("to aaa 0", "stop"),
        1: ("to aaa 1", "stop"),
        2: ("to bbb 0", "stop"),
        3: ("to bbb 1", "stop"),
    }
    assert whole.usage.prompt_tokens == len(bench.encode("say aaa")) + len(bench.encode("say bbb"))
    assert whole.usage.completion_tokens == sum(len(turn.token_ids) for turn in caller.turns)
    assert {turn.response_id for turn in caller.turns} == {whole.id}
    bench.check_exact(caller)
    bench.serve(*script)
    caller = bench.open()
    frames = await frames_of(caller, **kwargs, stream_options={"include_usage": True})
    assert folded(frames) == shown(whole)
    assert (frames[-1]["choices"], frames[-1]["usage"]) == ([], whole.usage.model_dump(exclude_unset=True))
    assert [frame["usage"] for frame in frames[:-1]] == [None] * (len(frames) - 1)


async def test_siblings_and_prompts_are_leaves_of_one_rollout(bench):
    bench.serve({"text": "a"}, {"text": "b"}, {"text": "c"})
    caller = bench.open()
    ids = bench.encode("one two")
    await caller.openai.completions.create(model="m", prompt=[ids, bench.encode("three")])
    first = caller.turns[0]
    row = first.context_ids + first.token_ids
    await caller.openai.completions.create(model="m", prompt=[*row, *bench.encode("next")], n=2)
    siblings = caller.turns[2:]
    assert [turn.parent_turn_id for turn in siblings] == [first.turn_id] * 2
    assert siblings[0].context_ids == bench.encode("next")
    segments = build_trajectory("s", caller.turns).segments
    masks = [sum(segment.action_mask[len(ids) : len(row)]) for segment in segments if first.turn_id in segment.turn_ids]
    assert sorted(masks) == [0, len(first.token_ids)]
    bench.check_exact(caller)


async def test_a_prompt_that_begins_with_a_recorded_row_continues_it(bench):
    bench.serve({"text": "one"}, {"text": "two", "finish_reason": "length"}, {"text": "three"}, {"text": "four"})
    caller = bench.open()
    row = bench.encode(PROMPT)
    for new in ("", "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", ""):
        row = row + bench.encode(new)
        await caller.openai.completions.create(model="m", prompt=row)
        row = row + caller.turns[-1].token_ids
    one, two, three = caller.turns
    assert (one.opened_by, two.parent_turn_id, three.parent_turn_id) == ("start", one.turn_id, two.turn_id)
    assert three.context_ids == [], "a reply that was cut goes on where it ended"
    assert all(turn.adopted for turn in caller.turns)
    other = bench.encode(PROMPT + "one<|im_end|>\n<|im_start|>user\nelse<|im_end|>\n<|im_start|>assistant\n")
    await caller.openai.completions.create(model="m", prompt=other)
    assert caller.turns[-1].parent_turn_id == one.turn_id
    assert len(build_trajectory("s", caller.turns).segments) == 2
    bench.check_exact(caller)


async def test_a_prompt_that_begins_with_no_row_opens_one_with_a_reason(bench):
    bench.serve({"text": "hello"})
    caller = bench.open()
    ids = bench.encode(PROMPT)
    await caller.openai.completions.create(model="m", prompt=ids)
    await caller.openai.completions.create(model="m", prompt=ids)
    await caller.openai.completions.create(model="m", prompt=[*ids, *caller.turns[0].token_ids[:-1], 7])
    assert [turn.opened_by for turn in caller.turns] == ["start", "resampled", "new_conversation"]
    bench.check_exact(caller)


async def test_a_chat_turn_is_continued_by_its_token_ids(bench):
    bench.serve({"text": "from chat"}, {"text": "from ids"})
    caller = bench.open()
    await caller.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    (chat,) = caller.turns
    prompt = chat.context_ids + chat.token_ids + bench.encode("\n<|im_start|>assistant\n")
    await caller.openai.completions.create(model="m", prompt=prompt)
    assert caller.turns[1].parent_turn_id == chat.turn_id
    bench.check_exact(caller)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.lists(st.integers(5, 99), max_size=3)), max_size=8))
async def test_any_tree_of_token_prompts_continues_the_longest_row(bench, asked):
    bench.serve(*[{"token_ids": ids} for ids in ([5], [6, 5], [5, 5], [7])])
    caller = bench.open()
    rows = [[9]]
    for pick, cut, new in asked:
        row = rows[pick % len(rows)]
        prompt = [*row[: max(1, len(row) - cut)], *new]
        await caller.openai.completions.create(model="m", prompt=prompt)
        turn = caller.turns[-1]
        known = [row for row in rows[1:] if prompt[: len(row)] == row]
        longest = max(map(len, known), default=0)
        assert len(turn.context_ids) == len(prompt) - longest
        rows.append(prompt + turn.token_ids)
    bench.check_exact(caller)


async def test_stop_strings_and_the_length_limit_end_the_text(bench):
    bench.serve({"text": "alpha beta STOP gamma"})
    caller = bench.open()
    for fields, text, finish in ({"stop": ["STOP", "zzz"]}, "alpha beta ", "stop"), ({"max_tokens": 2}, "al", "length"):
        whole = await caller.openai.completions.create(model="m", prompt="x", **fields)
        assert shown(whole) == {0: (text, finish)}
        assert folded(await frames_of(caller, prompt="x", **fields)) == shown(whole)
    assert "STOP" in bench.decode(caller.turns[0].token_ids)
    bench.check_exact(caller)


async def test_log_probs_have_the_legacy_shape_whole_and_streamed(bench):
    bench.serve({"text": "hello world", "logprob": -0.25, "chunks": [2]})
    caller = bench.open()
    whole = await caller.openai.completions.create(model="m", prompt="x", logprobs=2)
    logprobs = whole.choices[0].logprobs
    tokens = [bench.decode([token_id]) for token_id in caller.turns[0].token_ids]
    assert logprobs.tokens == tokens
    assert logprobs.token_logprobs == [-0.25] * len(tokens)
    assert logprobs.text_offset == [len("".join(tokens[:index])) for index in range(len(tokens))]
    for token, top in zip(tokens, logprobs.top_logprobs, strict=True):
        assert top[token] == -0.25
        assert len(top) == 2
    parts = [frame["choices"][0]["logprobs"] for frame in await frames_of(caller, prompt="x", logprobs=2)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert list(itertools.chain(*[part[name] for part in parts if part])) == getattr(logprobs, name)
    bare = await caller.openai.completions.create(model="m", prompt="x", logprobs=0)
    assert bare.choices[0].logprobs.top_logprobs == [{token: -0.25} for token in tokens]
    assert (await caller.openai.completions.create(model="m", prompt="x")).choices[0].logprobs is None


async def test_the_sdk_reads_a_stream(bench):
    """Without strict types, by which the SDK wants a finish reason in every chunk; the vendor sends null, too."""
    bench.serve({"text": "hello world"})
    caller = bench.open()
    async with openai.AsyncOpenAI(base_url=caller.url + "/v1", api_key=caller.key, max_retries=0) as client:
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == "hello world"
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[5], []]}, "prompt[1]"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": [1, "x"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [5, 10**9]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "end"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "n": 129}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_its_name(bench, fields, param):
    caller = bench.open()
    response = await caller.post(PATH, {"model": "m", **fields})
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"], response.json()["error"]["type"]) == (param, "invalid_request_error")
    assert caller.turns == []


async def test_fields_of_no_effect_are_accepted(bench):
    caller = bench.open()
    fields = {"echo": False, "suffix": None, "best_of": 1, "user": "u", "nobody_knows": 1, "stream_options": {}}
    response = await caller.post(PATH, {"prompt": "x", **fields})
    assert response.json()["choices"][0]["text"] == "hello"


async def test_a_raw_prompt_that_fills_the_window_is_refused(bench):
    bench.serve({"text": "hello"}, max_model_len=8)
    caller = bench.open()
    response = await caller.post(PATH, {"prompt": [5] * 8})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await caller.post(PATH, {"prompt": [5] * 7})).json()["choices"][0]["finish_reason"] == "length"


async def test_an_engine_that_dies_in_mid_stream_ends_it_by_an_error_and_no_done(bench):
    bench.serve({"text": "one two three", "error": "dead"})
    caller = bench.open()
    response = await caller.post(PATH, {"prompt": "x", "stream": True})
    frames = [data for _, data in events(response.content)]
    assert "".join([frame["choices"][0]["text"] for frame in frames[:-1]]) == "one two three"
    assert frames[-1]["error"]["type"] == "server_error"
    (turn,) = caller.turns
    assert (turn.status, bench.decode(turn.token_ids)) == ("failed", "one two three")
    bench.check_exact(caller)
