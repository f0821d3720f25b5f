"""The scripted engine: queues, limits, delays, errors and the log."""

import asyncio
import json

import msgspec
import pytest

from molt.train.engine.fake import ScriptedEngine, ScriptLine, read_script
from molt.train.engine.protocol import EngineRequest, EngineSampling
from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.errors import ConfigError, EngineDeadError, EngineError, EngineOverloadedError


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return scripted_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_of(model_path, tmp_path):
    def make(*lines, **settings):
        return ScriptedEngine(
            [ScriptLine(**line) for line in lines], model_path, log_path=tmp_path / "log.jsonl", **settings
        )

    return make


@pytest.fixture
def log(tmp_path):
    return lambda: [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]


def request(engine, prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", request_id="r", **sampling):
    ids = engine.tokenizer.encode(prompt).ids
    sampling = EngineSampling(**{"max_tokens": 1000, **sampling})
    return EngineRequest(request_id=request_id, prompt_token_ids=ids, sampling=sampling)


def text(engine, chunk):
    return engine.tokenizer.decode(chunk.token_ids, skip_special_tokens=False)


async def say(engine, newest):
    chunk = await engine.generate(request(engine, f"<|im_start|>user\n{newest}<|im_end|>\n<|im_start|>assistant\n"))
    return text(engine, chunk).removesuffix("<|im_end|>")


async def test_matched_lines_go_first_each_queue_in_order_its_last_line_repeating(engine_of):
    engine = engine_of(
        {"text": "other 1"},
        {"match": "weather", "text": "sun"},
        {"match": "wea", "text": "never while weather matches"},
        {"match": "weather", "text": "rain"},
        {"text": "other 2"},
    )
    asked = ["weather?", "x", "the weather", "weather", "weapon", "y", "z"]
    assert [await say(engine, newest) for newest in asked] == [
        "sun", "other 1", "rain", "rain", "never while weather matches", "other 2", "other 2",
    ]  # fmt: skip


async def test_a_match_sees_the_newest_user_or_tool_text_only(engine_of):
    engine = engine_of(
        {"match": "old|assistant|first", "text": "wrong"}, {"match": "new$", "text": "right"}, {"text": "none"}
    )
    history = "<|im_start|>user\nold<|im_end|>\n<|im_start|>assistant\nassistant<|im_end|>\n"
    result = "<tool_response>\n{}\n</tool_response>"
    for newest in ("new", result.format("new"), result.format("first") + "\n" + result.format("new")):
        prompt = f"{history}<|im_start|>user\n{newest}<|im_end|>\n<|im_start|>assistant\n"
        assert text(engine, await engine.generate(request(engine, prompt))).startswith("right"), newest
    assert text(engine, await engine.generate(request(engine, "plain prompt, new"))).startswith("right")


async def test_text_that_stops_ends_in_the_end_token_and_token_ids_are_verbatim(engine_of):
    engine = engine_of(
        {"text": "a", "logprob": -0.5, "version": "7"},
        {"text": "a", "finish_reason": "length", "version": "default"},
        {"token_ids": [5, 6]},
    )
    stopped, cut, verbatim = [await engine.generate(request(engine)) for _ in range(3)]
    assert (text(engine, stopped), stopped.finish_reason) == ("a<|im_end|>", "stop")
    assert (stopped.logprobs, stopped.versions) == ([-0.5, -0.5], [7, 7])
    assert (text(engine, cut), cut.finish_reason, cut.versions) == ("a", "length", [0])
    assert (verbatim.token_ids, verbatim.finish_reason) == ([5, 6], "stop")


async def test_it_stops_where_vllm_would(engine_of):
    engine = engine_of({"text": "one two three"}, max_model_len=16)
    room = 16 - len(request(engine).prompt_token_ids)
    full = await engine.generate(request(engine))
    assert (len(full.token_ids), full.finish_reason) == (room, "length")
    short = await engine.generate(request(engine, max_tokens=2))
    assert (short.token_ids, short.finish_reason) == (full.token_ids[:2], "length")
    stopped = await engine.generate(request(engine, stop=("two", "ne t", "absent")))
    assert (text(engine, stopped), stopped.finish_reason, stopped.stop_string) == ("one two", "stop", "ne t")
    with pytest.raises(EngineError, match="no room"):
        await engine.generate(request(engine, "x" * 40))


async def test_a_stream_has_the_chunks_of_the_script(engine_of, log):
    engine = engine_of({"token_ids": [1, 2, 3, 4, 5, 6], "chunks": [1, 2]}, {"token_ids": [1, 2]})
    chunks = [chunk async for chunk in engine.stream(request(engine))]
    assert [chunk.token_ids for chunk in chunks] == [[1], [2, 3], [4, 5, 6]]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    assert [chunk.token_ids async for chunk in engine.stream(request(engine))] == [[1], [2]]
    assert log()[0] == {
        "request_id": "r",
        "prompt_token_ids": request(engine).prompt_token_ids,
        "token_ids": [1, 2, 3, 4, 5, 6],
        "logprobs": [-1.0] * 6,
        "version": "0",
        "finish_reason": "stop",
        "aborted": False,
    }


async def test_the_likeliest_tokens_are_the_sampled_one_and_those_of_the_next_ids(engine_of):
    engine = engine_of({"token_ids": [5, 6], "logprob": -0.5, "chunk_delay_s": 0.001})
    asked = msgspec.structs.replace(request(engine), num_top_logprobs=2)
    whole = await engine.generate(asked)
    assert whole.top_logprobs == [[(5, -0.5), (6, -1.5)], [(6, -0.5), (7, -1.5)]]
    chunks = [chunk async for chunk in engine.stream(asked)]
    assert [chunk.top_logprobs for chunk in chunks] == [[top] for top in whole.top_logprobs]
    assert (await engine.generate(request(engine))).top_logprobs == []


async def test_delays_come_before_the_first_and_each_later_chunk(engine_of):
    engine = engine_of({"token_ids": [1, 2, 3], "delay_s": 0.06, "chunk_delay_s": 0.02})
    clock = asyncio.get_running_loop().time
    start = clock()
    times = [clock() - start async for _ in engine.stream(request(engine))]
    assert times[0] >= 0.06
    assert times[2] - times[0] >= 0.04
    start = clock()
    assert (await engine.generate(request(engine))).token_ids == [1, 2, 3]
    assert clock() - start >= 0.1


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_abort_ends_a_call_with_what_it_has_sampled(engine_of, log, streamed):
    engine = engine_of({"token_ids": [1, 2, 3], "chunk_delay_s": 3600.0})

    async def run():
        if streamed:
            return [chunk async for chunk in engine.stream(request(engine))][-1].finish_reason
        chunk = await engine.generate(request(engine))
        assert chunk.token_ids == [1]
        return chunk.finish_reason

    running = asyncio.create_task(run())
    for _ in range(5):
        await asyncio.sleep(0)
    await engine.abort("unknown")
    await engine.abort("r")
    assert await running == "abort"
    assert (log()[0]["token_ids"], log()[0]["finish_reason"], log()[0]["aborted"]) == ([1], "abort", True)


async def test_a_call_whose_reader_goes_away_is_logged_as_aborted(engine_of, log):
    engine = engine_of({"token_ids": [1, 2, 3]})
    stream = engine.stream(request(engine))
    await anext(stream)
    await stream.aclose()
    assert (log()[0]["token_ids"], log()[0]["aborted"]) == ([1], True)


@pytest.mark.parametrize(("error", "kind"), [("dead", EngineDeadError), ("overloaded", EngineOverloadedError)])
async def test_an_error_fails_one_call_after_its_tokens(engine_of, log, error, kind):
    engine = engine_of({"error": error, "delay_s": 0.001}, {"token_ids": [1, 2], "error": error}, {"token_ids": [3]})
    with pytest.raises(kind):
        await engine.generate(request(engine))
    seen = []

    async def read():
        async for chunk in engine.stream(request(engine)):
            seen.extend(chunk.token_ids)

    with pytest.raises(kind):
        await read()
    assert seen == [1, 2]
    assert (await engine.generate(request(engine))).token_ids == [3]
    assert [(line["token_ids"], line["finish_reason"]) for line in log()] == [
        ([], "error"),
        ([1, 2], "error"),
        ([3], "stop"),
    ]


async def test_a_prompt_that_no_line_answers_is_an_error(engine_of):
    with pytest.raises(EngineError, match="no line of the script"):
        await engine_of({"match": "weather", "text": "sun"}).generate(request(engine_of()))


def test_reading_a_script(tmp_path):
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "a"}\n\n{"match": "b", "token_ids": [1], "chunks": [1]}\n')
    assert [line.match for line in read_script(path)] == [None, "b"]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "script.jsonl:2: "),
        ('{"txt": "a"}', "unknown field `txt`"),
        ("{}", "one of text, token_ids and error"),
        ('{"text": "a", "token_ids": [1]}', "exclude each other"),
        ('{"text": "a", "match": "("}', r"'\(' is no regular expression"),
        ('{"text": "a", "chunks": [0]}', "token counts of 1 or more"),
        ('{"text": "a", "finish_reason": "abort"}', "finish_reason"),
    ],
)
def test_a_bad_script_line_is_named(tmp_path, line, message):
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(ConfigError, match=message) as error:
        read_script(path)
    assert "script.jsonl:2: " in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ScriptedEngine([], tmp_path)


def test_the_tokenizer_has_control_tokens_and_merges_that_re_encoding_moves(model_path):
    engine = ScriptedEngine([], model_path)
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
                  "<tool_response>", "</tool_response>"):  # fmt: skip
        assert len(engine.tokenizer.encode(token).ids) == 1
    letters = [token_id for letter in "hello" for token_id in engine.tokenizer.encode(letter).ids]
    assert engine.tokenizer.decode(letters) == "hello"
    assert engine.tokenizer.encode("hello").ids != letters
    unicode = "naïve 你好 😀 \n\t{}"
    assert engine.tokenizer.decode(engine.tokenizer.encode(unicode).ids, skip_special_tokens=False) == unicode


def test_transformers_loads_it(model_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
