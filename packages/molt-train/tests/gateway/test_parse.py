"""The view of a reply: independent of how the text was cut, and exact in what it hides."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.gateway.call import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from molt.train.gateway.parse import HermesParser
from molt.train.gateway.parse_hermes import HermesReading

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TRICKY_BODY = '\n{"name": "g", "arguments": {"s": "</tool_call>\\""}}\n'
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", ">", "/", "t", "\n", " ", '"', "\\", "{", "}", "text",
     CALL, CALL[11:-12], CALL[11:-13], TRICKY_BODY, '{"name": "f", "arguments": {', '{"arguments": {"b": [1, -2.5e3]}',
     ', "name": "h"}', ', "id": 3', "é", "😀"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=14).map("".join)
OPTIONS = st.fixed_dictionaries(
    {"offers_tools": st.booleans(), "max_calls": st.sampled_from([None, 1]), "in_reasoning": st.booleans()}
)


def merged(events):
    """The events with neighbours of one kind joined: how long the pieces are is all that chunks may decide."""
    joined = []
    for event in events:
        if isinstance(event, Reasoning | Content | ToolCallArguments):
            assert event.text, "no empty event"
            if joined and type(joined[-1]) is type(event):
                event = type(event)(joined.pop().text + event.text)
        joined.append(event)
    return joined


def events_of(*pieces, offers_tools=True, max_calls=None, in_reasoning=False):
    reading = HermesParser().start(offers_tools=offers_tools, max_calls=max_calls, in_reasoning=in_reasoning)
    return merged([event for piece in pieces for event in reading.feed(piece)] + reading.finish()), reading.counters


def read(*pieces, **options):
    """Reasoning, text, calls (with a third item where one has no end), counters."""
    events, counters = events_of(*pieces, **options)
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case ToolCallStart(name):
                calls.append((name, "", "open"))
            case ToolCallArguments(text):
                calls.append((calls.pop()[0], text, "open"))
            case ToolCallEnd():
                calls.append(calls.pop()[:2])
            case Content(text):
                assert not calls, "text may not follow a call"
                content += text
            case Reasoning(text):
                reasoning += text
    return reasoning, content, calls, counters


def call(arguments):
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@given(TEXTS, OPTIONS)
def test_every_two_way_split_reads_as_the_whole(text, options):
    # vllm#55082, vllm#41967: arguments were lost where two marks came in one chunk
    whole = events_of(text, **options)
    for cut in range(1, len(text)):
        assert events_of(text[:cut], text[cut:], **options) == whole
    assert events_of(*text, **options) == whole


@given(TEXTS, OPTIONS, st.data())
def test_every_many_way_split_reads_as_the_whole(text, options, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert events_of(*pieces, **options) == events_of(text, **options)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.booleans(), st.sampled_from([None, 0, 2]))
def test_arguments_are_shown_byte_for_byte(value, ascii_only, indent):
    arguments = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert read(*call(arguments)) == ("", "", [("f", arguments)], {})


@given(TEXTS)
def test_text_without_marks_is_shown_as_it_is(text):
    for mark in HermesParser.marks:
        text = text.replace(mark, "")
    if not any(mark in text for mark in HermesParser.marks):
        assert read(text) == ("", text, [], {})


def test_reasoning_text_and_calls():
    text = "<think>\nwhy\n\n</think>\n\nSay.\n" + call('{"a":  1}') + "\n" + call("{}")
    assert read(text) == ("why", "Say.", [("f", '{"a":  1}'), ("f", "{}")], {})


def test_a_call_is_shown_while_it_is_sampled():
    # vllm#15274, vllm#47901: arguments came with the end of the call only, or never
    reading = HermesParser().start(offers_tools=True)
    assert reading.feed('<tool_call>\n{"name": "f", "argum') == []
    assert reading.feed('ents": ') == [], "arguments that are no object make no call"
    assert reading.feed('{"a": "x') == [ToolCallStart("f"), ToolCallArguments('{"a": "x')]
    assert reading.feed('y"}') == [ToolCallArguments('y"}')]
    assert reading.feed("}\n</tool_cal") == []
    assert reading.feed("l>") == [ToolCallEnd()]
    assert reading.finish() == []


def test_arguments_before_the_name_wait_for_it():
    reading = HermesParser().start(offers_tools=True)
    assert reading.feed('<tool_call>{"arguments": {"a": 1}, "name": "f') == []
    assert reading.feed('"}') == [ToolCallStart("f"), ToolCallArguments('{"a": 1}')]
    assert reading.feed("</tool_call>") == [ToolCallEnd()]


def test_a_call_without_arguments_has_empty_ones():
    assert read('<tool_call>{"name": "f"}</tool_call>')[2] == [("f", "{}")]
    assert read('<tool_call>{"name": "f"} x</tool_call>')[1:3] == ('<tool_call>{"name": "f"} x</tool_call>', [])


def test_keys_beside_name_and_arguments_are_left_out_and_counted():
    body = '{"id": 3, "name": "f", "arguments": {}, "more": [{"name": "g"}, null]}'
    assert read(f"<tool_call>{body}</tool_call>") == ("", "", [("f", "{}")], {"tool_call_extra_keys": 1})


def test_reasoning_that_the_prompt_opened_or_that_never_ends():
    assert read("\nwhy\n</think>\n\nSay.", in_reasoning=True) == ("why", "Say.", [], {})
    assert read("<think>\nwhy</think>", in_reasoning=True)[0] == "why", "the policy opened it once more"
    assert read("<thin", in_reasoning=True)[0] == "<thin"
    assert read("<think>\nwhy\n")[:2] == ("why\n", "")
    assert read("<think></think>Say.")[:2] == ("", "Say.")


def test_calls_inside_reasoning_that_ends_are_reasoning():
    # vllm#39056
    assert read(f"<think>a\n{call('{}')}b</think>x") == (f"a\n{call('{}')}b", "x", [], {})
    reading = HermesParser().start(offers_tools=True)
    assert reading.feed("<think>a\n<tool_call>{") == [Reasoning("a")], "what follows is not known yet"
    assert reading.feed("b</think>") == [Reasoning("\n<tool_call>{b")]


def test_a_call_ends_reasoning_that_nothing_else_ends():
    # vllm#39056
    text = f"<think>\na\n\n{call('{}')}\n{call('{}')}"
    assert read(text) == ("a", "", [("f", "{}"), ("f", "{}")], {"tool_call_in_reasoning": 1})
    assert read(text, offers_tools=False) == (text[8:], "", [], {})


def test_reasoning_opens_at_the_start_only():
    assert read("Say <think>x</think>")[:2] == ("", "Say <think>x</think>")


def test_a_call_that_no_tool_is_offered_for_is_text():
    # tt-inference-server#4386
    assert read(call("{}"), offers_tools=False) == ("", call("{}"), [], {})


@pytest.mark.parametrize(
    "body",
    [
        "{bad}",
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '{"arguments": {"a": 01}, "name": "f"}',
        "[]",
        "<tool_call>{}",
    ],
)
def test_what_turns_out_to_be_no_call_is_text_and_counted(body):
    text = f"Say.\n<tool_call>\n{body}\n</tool_call>"
    assert read(text) == ("", text, [], {"tool_call_invalid": 1})
    assert read(f"{text}\n{call('{}')}") == ("", text, [("f", "{}")], {"tool_call_invalid": 1})


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a": .5}', '{"a": '),
        ('{"a": "x\ny"}', '{"a": "x'),
        (r'{"a": "\x"}', '{"a": "\\'),
        ("{'a': 1}", "{"),
        ('{"a": NaN}', '{"a": '),
        ('{"a": 1e999}', '{"a": 1e999}'),
        (r'{"a": "\ud800"}', r'{"a": "\ud800"}'),
        ("{}, 3", "{}"),
        ('{}, "arguments": {}', "{}"),
        ("{}}", "{}"),
    ],
)
def test_a_call_whose_json_breaks_has_no_end_and_reading_goes_on_behind_it(arguments, shown):
    text = f"{call(arguments)}\n{call('{}')}"
    assert read(text) == ("", "", [("f", shown, "open"), ("f", "{}")], {"tool_call_invalid": 1})
    assert read(*text) == read(text)


def test_a_call_that_the_reply_cuts_has_no_end_and_is_text_before_it_is_known():
    assert read('<tool_call>\n{"name": "f"') == ("", '<tool_call>\n{"name": "f"', [], {"tool_call_cut": 1})
    cut = read('<tool_call>{"name": "f", "arguments": {"a": [1')
    assert cut == ("", "", [("f", '{"a": [1', "open")], {"tool_call_cut": 1})
    hidden = read(f"{call('{}')}\n<tool_call>\n{{")
    assert hidden == ("", "", [("f", "{}")], {"tool_call_cut": 1, "text_after_tool_call": 1})


@pytest.mark.parametrize("end", ["", "\n", "\n</tool_"])
def test_a_call_that_is_whole_but_for_its_mark_is_a_call(end):
    unclosed = read(f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}{end}')
    assert unclosed == ("", "", [("f", '{"a": 1}')], {"tool_call_unclosed": 1})
    assert read(f'<tool_call>{{"name": "f"}}{end}')[2] == [("f", "{}")]


def test_a_close_mark_inside_a_string_does_not_close():
    arguments = '{"code": "print(\'</tool_call>\') # \\"</tool_call>\\""}'
    assert read(call(arguments))[2] == [("f", arguments)]


def test_text_behind_a_call_is_hidden_and_counted():
    assert read(f"a{call('{}')} b {call('{}')} c") == ("", "a", [("f", "{}"), ("f", "{}")], {"text_after_tool_call": 1})


def test_calls_beyond_the_allowed_are_hidden_and_counted():
    assert read(call("{}") * 3, max_calls=1) == ("", "", [("f", "{}")], {"tool_call_hidden": 2})


def test_arguments_nest_as_deep_as_a_client_can_send_back_and_no_deeper():
    nested = '{"a":' + "[" * 55 + "]" * 55 + "}"
    assert read(call(nested))[2] == [("f", nested)]
    deep = read(call('{"a":' + "[" * 5000 + "]" * 5000 + "}"))
    assert deep[2:] == ([("f", '{"a":' + "[" * 55, "open")], {"tool_call_invalid": 1})


def test_what_is_held_back_of_a_long_call_stays_small():
    text = call(json.dumps({"code": "x = 1\n" * 2000}))
    reading = HermesReading(offers_tools=True, max_calls=None, in_reasoning=False)
    for index in range(0, len(text), 3):
        reading.feed(text[index : index + 3])
        assert len(reading._held) + sum(map(len, reading._raw)) + sum(map(len, reading._call._new)) < 64
