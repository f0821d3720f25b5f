"""OpenAI Responses through the real openai SDK: replies, whole and streamed."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molt.train.engine.fake import ScriptedEngine, ScriptLine
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.responses import ResponsesDialect

from .conftest import until
from .gated import gated
from .replies import call, events
from .responses_calls import APPLY_PATCH, CALCULATOR_TOOL, both, checked, frames, post, said

pytestmark = pytest.mark.asyncio(loop_scope="session")

ARGUMENTS = '{"b":2,  "a": 1, "note": "gr\\u00fc\\u00df"}'
FULL = f"<think>\nfirst add\n</think>\n\nLet me see: ünï😀.\n{call(ARGUMENTS)}\n{call('{}')}"
PATCH = call('{"input": "*** Begin \\"x\\"\\n+gr\\u00fc\\ud83d\\ude00\\\\"}', name="apply_patch")


@pytest.mark.parametrize("chunks", [[], [1000], [1, 2, 3, 5, 8, 13]])
async def test_whole_and_stream_show_reasoning_text_and_calls(bench, chunks):
    bench.serve({"text": FULL, "chunks": chunks})
    caller = bench.open()
    response = await both(caller, tools=[CALCULATOR_TOOL])
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "first add"}]
    assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], None)
    assert message["content"] == [
        {"type": "output_text", "text": "Let me see: ünï😀.", "annotations": [], "logprobs": []}
    ]
    assert (first["name"], first["arguments"], first["status"]) == ("calculator", ARGUMENTS, "completed")
    assert (second["arguments"], second["status"]) == ("{}", "completed")
    assert first["call_id"] != second["call_id"]
    assert "namespace" not in first
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert response["id"] == caller.turns[0].response_id
    assert caller.turns[0].wire == "responses"
    bench.check_exact(caller)


async def test_litellm_33688_usage_has_every_field(bench):
    class Caching(ScriptedEngine):
        def stream(self, request):
            return self._cached(super().stream(request))

        async def _cached(self, chunks):
            async for chunk in chunks:
                yield msgspec.structs.replace(chunk, num_cached_tokens=4)

        async def generate(self, request):
            return msgspec.structs.replace(await super().generate(request), num_cached_tokens=4)

    engine = Caching([ScriptLine(text=FULL)], bench.model_path)
    bench.serve(engine=engine)
    caller = bench.open()
    response = await both(caller, tools=[CALCULATOR_TOOL])
    turn = caller.turns[0]
    num_reasoning = turn.token_ids.index(bench.encode("</think>")[0]) + 1
    assert response["usage"] == {
        "input_tokens": turn.prompt_length,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": len(turn.token_ids),
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": turn.prompt_length + len(turn.token_ids),
    }


async def test_text_reaches_the_sdk_in_the_pieces_that_are_sampled(bench):
    bench.serve({"text": "one two three"})
    caller = bench.open()
    stream = await caller.openai.responses.create(model="m", input="hi", stream=True)
    received = [event async for event in stream]
    deltas = [event.delta for event in received if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(deltas) == received[-1].response.output_text == "one two three"
    whole = await caller.openai.responses.create(model="m", input="hi")
    assert (whole.output_text, whole.model) == ("one two three", "m")


@pytest.mark.parametrize("text", ["", "   ", "<think>\nhm\n</think>\n\n"])
async def test_a_reply_that_says_nothing_has_an_item_all_the_same(bench, text):
    bench.serve({"text": text})
    caller = bench.open()
    response = await both(caller)
    kind = "reasoning" if "think" in text else "message"
    assert [item["type"] for item in response["output"]] == [kind]
    second = await post(caller, input=[{"role": "user", "content": "1 + 2?"}, *response["output"]])
    assert second["status"] == "completed"
    assert caller.turns[-1].parent_turn_id is not None


SAMPLED = {
    "reasoning": ("<think>\nfirst add then", [("reasoning", "incomplete")]),
    "text": ("<think>\na\n</think>\n\nso it", [("reasoning", "completed"), ("message", "incomplete")]),
    "arguments": (
        'so\n<tool_call>\n{"name": "calculator", "arguments": {"a": 1, "b"',
        [
            ("message", "completed"),
            ("function_call", "incomplete"),
        ],
    ),
    "second call": (
        f'so\n{call(ARGUMENTS)}\n<tool_call>\n{{"name": "calculator", "arguments": {{"a"',
        [
            ("message", "completed"),
            ("function_call", "completed"),
            ("function_call", "incomplete"),
        ],
    ),
    "custom": (
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Beg',
        [("custom_tool_call", "incomplete")],
    ),
    "end": (f"so\n{call(ARGUMENTS)}", [("message", "completed"), ("function_call", "completed")]),
}


@pytest.mark.parametrize("name", list(SAMPLED))
async def test_a_reply_cut_by_length_is_incomplete_and_so_is_what_was_cut(bench, name):
    text, shown = SAMPLED[name]
    bench.serve({"text": text, "finish_reason": "length"})
    caller = bench.open()
    body = {"model": "m", "input": "hi", "tools": [CALCULATOR_TOOL, APPLY_PATCH]}
    whole = await post(caller, **body)
    assert [(item["type"], item["status"]) for item in whole["output"]] == shown
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["completed_at"] is None
    data = await frames(caller, **body)
    assert data[-1]["type"] == "response.incomplete"
    assert said(data[-1]["response"]) == said(whole)


async def test_max_output_tokens_cuts_and_is_clamped_to_the_room(bench):
    bench.serve({"text": "one two three four"}, max_model_len=200)
    caller = bench.open()
    cut = await both(caller, max_output_tokens=2)
    assert (cut["usage"]["output_tokens"], cut["status"], cut["max_output_tokens"]) == (2, "incomplete", 2)
    whole = await post(caller, input="hi", max_output_tokens=100_000)
    assert whole["status"] == "completed"
    assert caller.session.counters["max_tokens_clamped"] == 1


async def test_a_cut_call_shows_the_arguments_so_far_and_its_turn_can_go_on(bench):
    bench.serve({"text": SAMPLED["arguments"][0], "finish_reason": "length"}, {"text": "done"})
    caller = bench.open()
    first = await post(caller, input="hi", tools=[CALCULATOR_TOOL])
    cut = first["output"][1]
    assert cut["arguments"] == '{"a": 1, "b"'
    result = {"type": "function_call_output", "call_id": cut["call_id"], "output": "no JSON"}
    history = [{"role": "user", "content": "hi"}, *first["output"], result]
    await post(caller, input=history, tools=[CALCULATOR_TOOL])
    assert caller.turns[1].parent_turn_id == caller.turns[0].turn_id
    bench.check_exact(caller)


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_are_those_of_the_text(bench, stream):
    bench.serve({"text": FULL, "logprob": -0.5})
    caller = bench.open()
    ask = {"model": "m", "input": "hi", "tools": [CALCULATOR_TOOL], "include": ["message.output_text.logprobs"]}
    if stream:
        data = await frames(caller, **ask)
        response = data[-1]["response"]
        (done,) = [frame for frame in data if frame["type"] == "response.output_text.done"]
        assert done["logprobs"] == response["output"][1]["content"][0]["logprobs"]
        sent = [lp for frame in data if frame["type"] == "response.output_text.delta" for lp in frame["logprobs"]]
        assert [lp["token"] for lp in done["logprobs"]] == [lp["token"] for lp in sent][-len(done["logprobs"]) :]
    else:
        response = await post(caller, **ask)
    shown = response["output"][1]["content"][0]["logprobs"]
    assert {entry["logprob"] for entry in shown} == {-0.5}
    token_ids = bench.encode("Let me see: ünï😀.")
    assert [entry["token"] for entry in shown] == [bench.decode([token_id]) for token_id in token_ids]
    assert shown[0]["bytes"] == list(shown[0]["token"].encode())


@pytest.mark.parametrize("text", ["😀", "😀 so", "so 😀", "你好", "a😀", "<b>", "</", " x"])
async def test_logprobs_have_every_token_of_a_text_in_any_script(bench, text):
    bench.serve({"text": f"<think>\n😀 a\n</think>\n\n{text}{call('{}')}"})
    caller = bench.open()
    include = ["message.output_text.logprobs"]
    response = await both(caller, tools=[CALCULATOR_TOOL], include=include)
    shown = response["output"][1]["content"][0]
    tokens = [bench.decode([token_id]) for token_id in bench.encode(shown["text"])]
    assert "".join(entry["token"] for entry in shown["logprobs"]).strip() == "".join(tokens).strip()


async def test_whole_and_streamed_logprobs_agree_however_the_reply_is_cut(bench):
    for chunks in ([], [1000], [2, 3, 5]):
        bench.serve({"text": "one two <tool_call> three", "chunks": chunks})
        response = await both(bench.open(), include=["message.output_text.logprobs"], top_logprobs=2)
        assert response["top_logprobs"] == 2
        shown = response["output"][0]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in shown) == "one two <tool_call> three"


async def test_what_was_asked_for_is_echoed(bench):
    bench.serve({"text": "hello"})
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 64,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": {"type": "function", "name": "calculator"},
        "tools": [CALCULATOR_TOOL],
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
    }
    caller = bench.open(policy="enforce")
    data = await frames(caller, model="any name", input="hi", **asked)
    for frame in (data[0], data[1], data[-1]):
        assert {name: frame["response"][name] for name in asked} == asked
        assert frame["response"]["model"] == "any name"
        assert (frame["response"]["object"], frame["response"]["background"]) == ("response", False)
    counters = caller.session.counters
    assert counters["ignored.truncation"] == counters["ignored.verbosity"] == counters["ignored.max_tool_calls"] == 1
    plain = await post(caller, input="hi")
    assert plain["text"] == {"format": {"type": "text"}}
    assert (plain["tools"], plain["tool_choice"], plain["store"], plain["truncation"]) == ([], "auto", True, "disabled")


async def test_sampling_parameters_reach_the_engine_and_the_record(bench):
    bench.serve({"text": "hello"})
    caller = bench.open()
    await post(caller, input="hi", temperature=0.25, top_p=0.5, max_output_tokens=7)
    sampling = caller.turns[0].sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["max_tokens"]) == (0.25, 0.5, 7)


async def test_silence_is_broken_by_events_with_data_that_keep_the_numbers_contiguous(bench):
    engine = gated(bench, "one", " two", keepalive_s=0.01)
    caller = bench.open()
    body = {"model": "m", "input": "hi", "stream": True}
    auth = {"authorization": f"Bearer {caller.key}"}
    beat = b"event: response.in_progress"
    async with caller.http.stream("POST", caller.url + "/v1/responses", json=body, headers=auth) as response:
        received = response.aiter_bytes()
        seen = b""
        while seen.count(beat) < 3:  # before the first token: the stream opens with the response, then goes on living
            seen += await anext(received)
        assert events(seen)[0][0] == "response.created"
        engine.gate.release()
        while b"output_text.delta" not in seen:
            seen += await anext(received)
        count = seen.count(beat)
        while seen.count(beat) < count + 2:
            seen += await anext(received)
        engine.gate.release()
        seen += b"".join([piece async for piece in received])
    data = checked(seen)
    assert data[-1]["response"]["output"][0]["content"][0]["text"] == "one two"


async def test_the_sdk_takes_keep_alives_for_life(bench):
    bench.serve({"text": "hello", "delay_s": 0.05, "chunk_delay_s": 0.03}, keepalive_s=0.01)
    async with bench.open().openai.responses.stream(model="m", input="hi") as stream:
        assert (await stream.get_final_response()).output_text == "hello"


@pytest.mark.parametrize("error", ["dead", "overloaded"])
async def test_an_engine_that_fails_in_mid_stream_ends_it_with_response_failed(bench, error):
    bench.serve({"text": f"<think>\na\n</think>\n\none {call('{}')}", "error": error})
    caller = bench.open()
    data = await frames(caller, input="hi", tools=[CALCULATOR_TOOL])
    failed = data[-1]["response"]
    assert data[-1]["type"] == "response.failed"
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert [item["type"] for item in failed["output"]] == ["reasoning", "message", "function_call"]
    assert failed["tools"] == [CALCULATOR_TOOL]
    assert caller.turns[0].status == "failed"
    async with caller.openai.responses.stream(model="m", input="hi") as stream:
        last = [event async for event in stream][-1]
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")


async def test_a_stream_that_was_kept_alive_fails_by_an_event(bench):
    bench.serve({"error": "overloaded", "delay_s": 0.05}, keepalive_s=0.01)
    data = await frames(bench.open(), input="hi")
    assert data[-1]["response"]["error"]["code"] == "server_error"
    assert data[-1]["response"]["output"] == []


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("prompt_too_long", "context_length_exceeded"),
        ("invalid_request", "invalid_prompt"),
        ("engine", "server_error"),
        ("closed", "server_error"),
    ],
)
async def test_a_failure_before_the_first_event_is_a_stream_of_its_own(kind, code):
    dialect = ResponsesDialect()
    encoder = dialect.encoder(dialect.parse(b'{"input": "hi", "model": "m"}'), lambda _: "")
    data = [frame for _, frame in events(encoder.failure(CallError(kind, "why"), "req_1"))]
    assert [frame["type"] for frame in data] == ["response.created", "response.in_progress", "response.failed"]
    assert [frame["sequence_number"] for frame in data] == [0, 1, 2]
    assert data[-1]["response"]["error"] == {"code": code, "message": "why"}


async def test_an_engine_that_fails_before_the_first_byte_is_an_http_error(bench):
    bench.serve({"error": "overloaded"})
    caller = bench.open()
    for stream in (True, False):
        response = await caller.post("/v1/responses", {"input": "hi", "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["type"] == "server_error"
    with pytest.raises(openai.InternalServerError):
        await caller.openai.responses.create(model="m", input="hi")


async def test_a_prompt_that_does_not_fit_is_a_plain_error_with_codex_s_code(bench):
    bench.serve(max_model_len=50)
    caller = bench.open()
    for stream in (True, False):
        response = await caller.post("/v1/responses", {"input": "word " * 100, "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not caller.turns


async def test_a_closed_session_is_410_and_not_to_be_retried(bench):
    caller = bench.open()
    await bench.sessions.close(caller.session.session_id)
    response = await caller.post("/v1/responses", {"input": "hi"})
    assert (response.status_code, response.headers["x-should-retry"]) == (410, "false")
    assert response.json()["error"]["code"] == "session_closed"


async def test_a_client_that_leaves_in_mid_stream_is_aborted(bench):
    engine = gated(bench, "one", " two", grace_s=0.0)
    caller = bench.open()
    auth = {"authorization": f"Bearer {caller.key}"}
    body = {"input": "hi", "stream": True}
    engine.gate.release()
    async with caller.http.stream("POST", caller.url + "/v1/responses", json=body, headers=auth) as response:
        async for piece in response.aiter_bytes():
            if b"output_text.delta" in piece:
                break
    await until(lambda: caller.turns)
    assert (caller.turns[0].status, caller.turns[0].adopted) == ("aborted", False)
    assert bench.decode(caller.turns[0].token_ids) == "one"


@pytest.mark.parametrize(("words", "code"), [(1, None), (200, "context_length_exceeded")])
async def test_a_call_that_queues_is_kept_alive_and_then_streams_or_fails_by_name(bench, words, code):
    engine = gated(bench, "one", keepalive_s=0.01, max_session_requests=1, max_model_len=100, hold_s=30.0)
    caller = bench.open()
    first = asyncio.create_task(post(caller, input="hi"))
    await until(lambda: engine.running)
    auth = {"authorization": f"Bearer {caller.key}"}
    body = {"model": "m", "input": "word " * words, "stream": True}
    async with caller.http.stream("POST", caller.url + "/v1/responses", json=body, headers=auth) as response:
        received = response.aiter_bytes()
        seen = await anext(received)
        assert seen.startswith(b": keep-alive"), "there is no response yet that an event could speak of"
        engine.gate.release()
        engine.gate.release()
        seen += b"".join([piece async for piece in received])
    assert (checked(seen)[-1]["response"]["error"] or {}).get("code") == code
    await first


@pytest.mark.parametrize("streamed_first", [True, False])
async def test_a_replay_has_the_ids_of_the_reply_in_either_mode(bench, streamed_first):
    bench.serve({"text": f"{FULL}\n{PATCH}"}, {"text": "another"})
    caller = bench.open()
    body = {"model": "m", "input": "hi", "tools": [CALCULATOR_TOOL, APPLY_PATCH]}
    replies = []
    for stream, retries in ((streamed_first, "0"), (not streamed_first, "1")):
        response = await caller.post(
            "/v1/responses", {**body, "stream": stream}, **{"x-stainless-retry-count": retries}
        )
        replies.append(checked(response.content)[-1]["response"] if stream else response.json())
    first, second = [{key: value for key, value in reply.items() if key != "completed_at"} for reply in replies]
    assert first == second
    assert len(caller.turns) == 1


async def test_what_the_template_cannot_render_is_400_and_names_the_input(bench, with_template):
    template = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad word') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    bench.serve({"text": "hello"}, renderer=with_template(template))
    response = await bench.open().post("/v1/responses", {"input": "bad"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert "no bad word" in error["message"]


async def test_structured_output_and_required_calls_reach_the_engine_as_a_grammar(bench):
    bench.serve({"text": "{}"})
    caller = bench.open()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = await post(caller, input="hi", text=text)
    assert response["text"] == text
    await post(caller, input="hi", tools=[CALCULATOR_TOOL], tool_choice="required")
    for turn in caller.turns:
        assert turn.sampling["grammar"] is not None
        assert "grammar" in turn.off_policy


SPLIT = f"<think>\nfirst\n</think>\n\nünï😀 so\n{call(ARGUMENTS)}\n{PATCH}"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_any_two_way_split_of_the_sampled_tokens_gives_the_same_response(bench, data):
    size = len(bench.encode(SPLIT)) + 1
    first = data.draw(st.integers(1, size - 1))
    ask = {"input": "hi", "tools": [CALCULATOR_TOOL, APPLY_PATCH], "include": ["message.output_text.logprobs"]}
    bench.serve({"text": SPLIT, "chunks": [first, size]})
    caller = bench.open()
    whole, streamed = await post(caller, **ask), await frames(caller, **ask)
    assert said(streamed[-1]["response"]) == said(whole)
    assert whole["output"][-1]["input"] == '*** Begin "x"\n+grü😀\\'
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "custom_tool_call"]
