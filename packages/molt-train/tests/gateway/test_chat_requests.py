"""What Chat Completions accepts, maps and refuses: no field that an agent sends breaks a call by itself."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import pytest

from molt.train.gateway.wires.chat import ChatDialect

from .replies import CALCULATOR, call

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "1 + 2?"}]
PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


class Sampling:
    """Remembers how each call was sampled, and samples by the script."""

    def __init__(self, bench):
        self.requests, self._scripted = [], bench.scripted
        bench.serve({"text": "hello"}, engine=self)

    async def generate(self, request):
        self.requests.append(request)
        return await self._scripted.generate(request)

    async def abort(self, request_id):
        await self._scripted.abort(request_id)


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def error_of(caller, **fields):
    response = await caller.post(PATH, {"model": "m", "messages": USER, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


async def prompt_of(bench, caller, *messages):
    response = await caller.post(PATH, {"messages": list(messages)})
    assert response.status_code == 200, response.text
    return bench.decode(caller.turns[-1].context_ids)


@pytest.mark.parametrize("arguments", ['{"a": 1', "not json", "", '["list"]', None, '{"a": "\\ud800"}'])
async def test_arguments_in_history_that_are_no_json_poison_nothing(bench, arguments):
    """vllm#43995, vllm#47761, vllm#48922, local-inference-lab/vllm#684."""
    caller = bench.open()
    function = {"name": "calculator", "arguments": arguments}
    echoed = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "x", "content": "no"}
    body = {"messages": [*USER, echoed, result], "tools": [CALCULATOR]}
    for stream in (False, True):
        response = await caller.post(PATH, {**body, "stream": stream})
        assert response.status_code == 200, response.text
    assert len(caller.turns) == 2


async def test_a_cut_call_that_comes_back_is_continued_and_not_parsed(bench):
    """vllm#43995 with a call of ours: what was sampled is spliced in."""
    bench.serve(
        {"text": '<tool_call>\n{"name": "calculator", "arguments": {"a": "x', "finish_reason": "length"}, {"text": "ok"}
    )
    caller = bench.open()
    first = await caller.openai.chat.completions.create(model="m", messages=USER, tools=[CALCULATOR])
    message = first.choices[0].message
    assert message.tool_calls[0].function.arguments == '{"a": "x'
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "invalid JSON"}
    await caller.openai.chat.completions.create(
        model="m", messages=[*USER, message.model_dump(exclude_none=True), result], tools=[CALCULATOR]
    )
    one, two = caller.turns
    assert two.parent_turn_id == one.turn_id
    bench.check_exact(caller)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "reasoning": "one",
            "reasoning_content": "two",
            "reasoning_details": [{"type": "reasoning.text", "text": "three"}],
        },
        {"reasoning_content": "one", "reasoning_details": [{"type": "reasoning.text", "text": "three"}]},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "o"},
                {"type": "reasoning.summary", "summary": "ne"},
            ]
        },
        {"reasoning": None, "reasoning_content": "", "reasoning_details": [{"type": "reasoning.text", "text": "one"}]},
    ],
)
async def test_echoed_reasoning_is_read_from_the_first_field_that_has_it(bench, fields):
    caller = bench.open()
    call_again = {"role": "assistant", "content": "hm", "tool_calls": [], **fields}
    prompt = await prompt_of(bench, caller, *USER, call_again, {"role": "tool", "tool_call_id": "x", "content": "4"})
    assert "<think>\none\n</think>\n\nhm<|im_end|>" in prompt


async def test_a_refusal_is_text_of_the_assistant(bench):
    caller = bench.open()
    said = {"role": "assistant", "content": None, "refusal": "I may not."}
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "Nor this."}]}
    prompt = await prompt_of(bench, caller, *USER, said, *USER, part, *USER)
    assert "assistant\nI may not.<|im_end|>" in prompt
    assert "assistant\nNor this.<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
            "messages[0].content[0].image_url.url",
        ),
    ],
)
async def test_what_the_model_cannot_read_is_refused_by_its_path(bench, message, param):
    assert (await error_of(bench.open(), messages=[message]))[0] == param


async def test_fields_without_effect_are_accepted_and_those_that_would_change_the_reply_counted(bench):
    caller = bench.open()
    quiet = {
        "store": True, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
        "modalities": ["text"], "nobody_knows": {"deep": [1]}, "stream_options": {"include_usage": True},
        "tools": [], "n": None, "stop": None, "logit_bias": None, "response_format": {"type": "text"},
    }  # fmt: skip
    loud = {
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "repetition_penalty": 1.1,
        "audio": None,
    }
    response = await caller.post(PATH, {"messages": USER, "service_tier": "auto", **quiet, **loud})
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    assert response.json()["service_tier"] == "default"
    assert caller.session.counters == {"ignored.prediction": 1, "ignored.verbosity": 1, "ignored.repetition_penalty": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "two"}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{broken"}}, "structured_outputs.json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a+"}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "calculator"}}}, "tool_choice"),
        ({"tools": [CALCULATOR], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CALCULATOR], "tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CALCULATOR], "tool_choice": {"type": "hosted"}}, "tool_choice"),
        ({"tools": [CALCULATOR], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [CALCULATOR], "tool_choice": allowed("any", "calculator")}, "tool_choice"),
        ({"tools": [CALCULATOR], "tool_choice": allowed("auto", "calculator", "other")}, "tool_choice"),
        ({"functions": [CALCULATOR["function"]], "function_call": {"name": "other"}}, "function_call"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_by_its_name(bench, fields, param):
    caller = bench.open()
    assert (await error_of(caller, **fields))[0] == param
    assert caller.turns == []


async def test_what_the_client_asks_of_the_sampling_reaches_the_engine(bench):
    sampling = Sampling(bench)
    caller = bench.open()
    await caller.openai.chat.completions.create(
        model="m",
        messages=USER,
        max_tokens=3,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"5": -100, "6": 1},
        seed=11,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 4, "min_p": 0.05},
    )
    (request,) = sampling.requests
    used = request.sampling
    assert (used.max_tokens, used.temperature, used.top_p, used.top_k, used.min_p) == (7, 0.5, 0.9, 4, 0.05)
    assert (used.presence_penalty, used.frequency_penalty, used.seed, used.stop) == (0.1, -0.2, 11, ("a", "b"))
    assert used.logit_bias == {5: -100, 6: 1}
    assert request.num_top_logprobs == 2


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": FORMAT}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", ["yes", "no"]),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)  # fmt: skip
async def test_a_bound_on_the_reply_reaches_the_engine_as_a_grammar(bench, fields, kind, text):
    sampling = Sampling(bench)
    caller = bench.open()
    # The template closes the reasoning, so that the grammar is that of the text alone.
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    response = await caller.post(PATH, {"messages": USER, **fields, **kwargs})
    assert response.status_code == 200, response.text
    grammar = sampling.requests[0].sampling.grammar
    assert grammar.kind == kind
    assert grammar.text == text or json.loads(grammar.text) == text
    assert caller.turns[0].off_policy == ["grammar"]


CUSTOM = {"type": "custom", "custom": {"name": "write", "description": "Writes."}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"calculator", "other", "write"}),
        ({"type": "function", "function": {"name": "other"}}, {"other"}),
        ({"type": "custom", "custom": {"name": "write"}}, {"write"}),
        (allowed("required", "calculator", "other"), {"calculator", "other"}),
        (allowed("auto", "calculator"), {"calculator"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CUSTOM]}},
            {"write"},
        ),
    ],
)
async def test_a_tool_choice_allows_the_tools_that_it_names(bench, choice, names):
    sampling = Sampling(bench)
    caller = bench.open()
    tools = [CALCULATOR, OTHER, CUSTOM]
    await caller.openai.chat.completions.create(model="m", messages=USER, tools=tools, tool_choice=choice)
    grammar = sampling.requests[0].sampling.grammar.text
    assert {name for name in ("calculator", "other", "write") if f'\\"{name}\\"' in grammar} == names


async def test_tools_that_are_only_offered_leave_the_sampling_free(bench):
    sampling = Sampling(bench)
    caller = bench.open()
    for choice in ("auto", "none", None):
        await caller.post(PATH, {"messages": USER, "tools": [CALCULATOR], "tool_choice": choice})
    assert [request.sampling.grammar for request in sampling.requests] == [None, None, None]


async def test_an_empty_list_of_tools_is_none(bench):
    """vLLM refuses `tools: []`, which several agents send."""
    caller = bench.open()
    for tools in ({}, {"tools": []}, {"tools": None}):
        assert (await caller.post(PATH, {"messages": USER, **tools})).status_code == 200
    assert len({tuple(turn.context_ids) for turn in caller.turns}) == 1


async def test_legacy_functions_are_offered_called_and_answered(bench):
    bench.serve({"text": call('{"a": 1}')}, {"text": "3"})
    caller = bench.open()
    functions = {"functions": [CALCULATOR["function"]], "function_call": "auto"}
    first = await caller.openai.chat.completions.create(model="m", messages=USER, extra_body=functions)
    choice = first.choices[0]
    assert choice.finish_reason == "function_call"
    assert (choice.message.tool_calls, choice.message.function_call.name) == (None, "calculator")
    assert choice.message.function_call.arguments == '{"a": 1}'
    messages = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "calculator", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "calculator", "content": "3"},
    ]
    stream = await caller.openai.chat.completions.create(
        model="m", messages=messages, extra_body=functions, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "3"
    one, two = caller.turns
    assert two.parent_turn_id == one.turn_id
    assert "<tool_response>\n3\n</tool_response>" in bench.decode(two.context_ids)


async def test_a_legacy_call_streams_as_function_call(bench):
    bench.serve({"text": call('{"a": 1}'), "chunks": [1000]})
    caller = bench.open()
    stream = await caller.openai.chat.completions.create(
        model="m", messages=USER, stream=True, extra_body={"functions": [CALCULATOR["function"]]}
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [(part.name, part.arguments) for part in calls[:1]] == [("calculator", "")]
    assert "".join(part.arguments for part in calls) == '{"a": 1}'
    assert chunks[-1].finish_reason == "function_call"


@pytest.mark.parametrize(
    ("effort", "kwargs"),
    [
        (None, {}),
        ("high", {"reasoning_effort": "high"}),
        ("none", {"reasoning_effort": "none", "enable_thinking": False}),
    ],
)
async def test_reasoning_effort_is_told_to_the_template(effort, kwargs):
    body = {"messages": USER, "reasoning_effort": effort, "chat_template_kwargs": {"own": 1}}
    assert ChatDialect().parse(json.dumps(body).encode()).template_kwargs == {"own": 1} | kwargs


async def test_reasoning_effort_reaches_the_template(bench):
    caller = bench.open()
    await caller.openai.chat.completions.create(model="m", messages=USER, reasoning_effort="none")
    assert bench.decode(caller.turns[0].context_ids).endswith("<think>\n\n</think>\n\n")
