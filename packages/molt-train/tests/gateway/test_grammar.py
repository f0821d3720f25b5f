"""What requests demand of their replies, as grammars: xgrammar itself says which replies they admit."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import pytest
import xgrammar

from molt.agents.protocol import SamplingParams
from molt.train.errors import EngineRequestError
from molt.train.gateway.call import ModelCall, ResponseFormat, ToolChoice
from molt.train.gateway.call_error import CallError
from molt.train.gateway.grammar import reply_grammar
from molt.train.gateway.parse import HermesParser
from molt.train.gateway.sessions import Sessions

from .replies import CALCULATOR, call

STOP = 0
SEARCH = {"type": "function", "function": {"name": "search"}}
TOOLS = [CALCULATOR, SEARCH]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
JSON = ResponseFormat(kind="json_schema", spec=SCHEMA)
THOUGHT = "<think>\nShall I <tool_call>?\n</think>\n\n"
CALL, FOUND = call('{"a": 1, "b": 2}'), call("{}", "search")


@pytest.fixture(scope="module")
def compiler():
    info = xgrammar.TokenizerInfo(["</s>", "a"], xgrammar.VocabType.RAW, stop_token_ids=[STOP])
    return xgrammar.GrammarCompiler(info)


@pytest.fixture
def session():
    return Sessions().open(sampling=SamplingParams(), policy="client")[0]


@pytest.fixture
def admits(compiler, session):
    """Whether a reply is a whole one under the grammar of a request."""

    def check(reply, *, reasoning="none", tools=(), **request):
        model_call = ModelCall(model="m", messages=[], **request)
        grammar = reply_grammar(
            model_call, tools, parser=HermesParser(), reasoning=reasoning, policy=session.policy, count=session.count
        )
        compiled = {
            "structural_tag": lambda: compiler.compile_structural_tag(grammar.text),
            "json_schema": lambda: compiler.compile_json_schema(grammar.text),
            "json_object": lambda: compiler.compile_json_schema('{"type": "object"}'),
        }[grammar.kind]()
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(reply) and matcher.accept_token(STOP)

    return check


def grammar_of(session, tools=(), reasoning="optional", **request):
    model_call = ModelCall(model="m", messages=[], **request)
    return reply_grammar(
        model_call, tools, parser=HermesParser(), reasoning=reasoning, policy=session.policy, count=session.count
    )


def test_a_request_that_only_offers_tools_leaves_the_sampling_free(session):
    assert grammar_of(session) is None
    assert grammar_of(session, TOOLS) is None
    assert grammar_of(session, TOOLS, tool_choice=ToolChoice(mode="none", max_calls=1)) is None
    assert grammar_of(session, tool_choice=ToolChoice(max_calls=1)) is None
    assert session.counters == {}


@pytest.mark.parametrize(
    ("reply", "admitted"),
    [
        (CALL, True),
        (FOUND, True),
        (f"{CALL}\n{FOUND}", True),
        (THOUGHT + CALL, True),
        ("<think></think>" + CALL, True),
        ("", False),
        ("I will not.", False),
        (f"Well: {CALL}", False),
        (f"{CALL} Done.", False),
        (f"{CALL}\n", False),
        (call("{}", "unknown"), False),
        (call("[]"), False),
        (THOUGHT, False),
        ("<think>for ever", False),
    ],
)
def test_required_means_one_call_or_more(admits, reply, admitted):
    assert admits(reply, reasoning="optional", tools=TOOLS, tool_choice=ToolChoice(mode="required")) == admitted


def test_reasoning_is_where_the_model_may_reason(admits):
    required = {"tools": TOOLS, "tool_choice": ToolChoice(mode="required")}
    assert not admits(THOUGHT + CALL, reasoning="none", **required)
    assert admits(CALL, reasoning="none", **required)
    assert admits(THOUGHT.removeprefix("<think>") + CALL, reasoning="open", **required)
    assert not admits(CALL, reasoning="open", **required)


def test_a_named_tool_is_the_only_one_and_called_once(admits):
    named = {"tools": TOOLS, "tool_choice": ToolChoice(mode="required", names=("search",), max_calls=1)}
    assert admits(FOUND, **named)
    assert not admits(CALL, **named)
    assert not admits(f"{FOUND}\n{FOUND}", **named)


@pytest.mark.parametrize("reasoning", ["none", "optional"])
def test_some_tools_only_leave_text_and_the_number_of_calls_free(admits, reasoning):
    some = {"reasoning": reasoning, "tools": TOOLS, "tool_choice": ToolChoice(names=("search",))}
    for reply in ("", "No tool.", f"Let me see.\n{FOUND}", f"{FOUND}\n{FOUND}"):
        assert admits(reply, **some), reply
    assert not admits(f"Let me see.\n{CALL}", **some)


def test_no_parallel_calls_means_text_then_at_most_one(admits):
    one = {"reasoning": "optional", "tools": TOOLS, "tool_choice": ToolChoice(max_calls=1)}
    for reply in ("", "No tool.", CALL, f"Let me see.\n{FOUND}", f"{THOUGHT}{FOUND}"):
        assert admits(reply, **one), reply
    for reply in (f"{CALL}\n{FOUND}", f"{CALL} and more", f"{THOUGHT}{CALL}{CALL}"):
        assert not admits(reply, **one), reply


def test_arguments_of_strict_tools_follow_their_schema_and_others_are_any_object(admits):
    odd = call('{"a": "one", "z": [1]}')
    strict = {"tools": [CALCULATOR], "tool_choice": ToolChoice(strict=("calculator",))}
    assert admits(CALL, **strict)
    assert not admits(odd, **strict)
    assert admits(odd, tools=[CALCULATOR], tool_choice=ToolChoice(mode="required"))


@pytest.mark.parametrize("reasoning", ["none", "optional"])
def test_a_response_format_bounds_what_follows_the_reasoning(admits, reasoning):
    for reply, admitted in {'{"x": 3}': True, '{\n  "x": 3\n}': True, '{"x": "3"}': False, "3": False}.items():
        assert admits(reply, reasoning=reasoning, response_format=JSON) == admitted
        assert admits(THOUGHT + reply, reasoning=reasoning, response_format=JSON) == (admitted and reasoning != "none")


@pytest.mark.parametrize(
    ("kind", "spec", "good", "bad"),
    [
        ("json_object", None, '{"a": []}', "[]"),
        ("regex", "[0-9]{2}", "12", "123"),
        ("choice", ["yes", "no"], "no", "maybe"),
        ("grammar", 'root ::= "a" | "b"', "b", "c"),
    ],
)
def test_every_kind_of_format_goes_behind_reasoning(admits, kind, spec, good, bad):
    wanted = ResponseFormat(kind=kind, spec=spec)
    assert admits(THOUGHT + good, reasoning="optional", response_format=wanted)
    assert not admits(THOUGHT + bad, reasoning="optional", response_format=wanted)


@pytest.mark.parametrize(
    ("kind", "spec", "text"),
    [
        ("json_object", None, ""),
        ("json_schema", SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
        ("regex", "a+", "a+"),
        ("choice", ["yes"], '["yes"]'),
        ("grammar", 'root ::= "a"', 'root ::= "a"'),
        ("structural_tag", {"format": {"type": "any_text"}}, '{"format":{"type":"any_text"}}'),
    ],
)
def test_a_format_goes_to_the_engine_as_it_is_where_nothing_can_precede_it(session, kind, spec, text):
    grammar = grammar_of(session, reasoning="none", response_format=ResponseFormat(kind=kind, spec=spec))
    assert (grammar.kind, grammar.text) == (kind, text)


def test_with_tools_a_reply_in_a_format_may_be_calls_instead(admits):
    both = {"reasoning": "optional", "tools": TOOLS, "response_format": JSON}
    for reply in ('{"x": 3}', CALL, f"{THOUGHT}{CALL}\n{FOUND}"):
        assert admits(reply, **both), reply
    for reply in ("3", f'{CALL}{{"x": 3}}'):
        assert not admits(reply, **both), reply
    assert not admits(CALL, **both, tool_choice=ToolChoice(mode="none"))
    assert not admits('{"x": 3}', **both, tool_choice=ToolChoice(mode="required"))
    assert not admits(f"{CALL}\n{FOUND}", **both, tool_choice=ToolChoice(max_calls=1))


def test_names_are_written_as_json(admits):
    odd = {"type": "function", "function": {"name": 'say "hi"'}}
    assert admits(call("{}", r"say \"hi\""), tools=[odd], tool_choice=ToolChoice(mode="required"))


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"tool_choice": ToolChoice(mode="required")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": ToolChoice(mode="required", names=("other",))}, "tool_choice"),
        ({"response_format": JSON, "prefill": "{"}, "response_format"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(session, request_, param):
    with pytest.raises(CallError) as caught:
        grammar_of(session, **request_)
    assert (caught.value.kind, caught.value.param) == ("invalid_request", param)


def test_a_family_whose_calls_no_grammar_knows_cannot_be_made_to_call(session):
    class Other(HermesParser):
        call_format = None

    for choice in (ToolChoice(), ToolChoice(max_calls=1), ToolChoice(strict=("search",))):
        free = ModelCall(model="m", messages=[], tool_choice=choice)
        assert (
            reply_grammar(free, TOOLS, parser=Other(), reasoning="none", policy=session.policy, count=session.count)
            is None
        )
    assert session.counters == {"parallel_calls_not_prevented": 1, "strict_not_enforced": 1}
    required = ModelCall(model="m", messages=[], tool_choice=ToolChoice(mode="required"))
    with pytest.raises(CallError, match="cannot be bound"):
        reply_grammar(required, TOOLS, parser=Other(), reasoning="none", policy=session.policy, count=session.count)


class Refusing:
    """An engine that finds fault with requests."""

    def __init__(self, field):
        self.field = field

    async def generate(self, request):
        raise EngineRequestError("it is no schema", self.field)

    async def stream(self, request):
        raise EngineRequestError("it is no schema", self.field)
        yield

    async def abort(self, request_id):
        raise AssertionError("nothing runs")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "body", "param"),
    [
        ("grammar", {"response_format": {"type": "json_object"}}, "response_format"),
        ("grammar", {"tools": [CALCULATOR], "tool_choice": "required"}, "tools"),
        ("num_top_logprobs", {}, "top_logprobs"),
        ("logit_bias", {}, "logit_bias"),
        (None, {}, None),
    ],
)
async def test_a_request_that_the_engine_refuses_is_the_clients_fault_and_leaves_no_turn(
    bench, field, body, param, stream
):
    bench.serve(engine=Refusing(field))
    caller = bench.open()
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, **body}
    response = await caller.post("/v1/chat/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["message"]) == ("invalid_request_error", param, "it is no schema")
    assert caller.turns == []
