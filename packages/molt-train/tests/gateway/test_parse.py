"""The view of a reply: independent of how the text was cut, and exact in what it hides."""

from hypothesis import given
from hypothesis import strategies as st

from molt.train.gateway.call import Content, Reasoning, ToolCall
from molt.train.gateway.detokenize import Detokenizer, StopFilter, TokenReader
from molt.train.gateway.parse import HermesParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TRICKY_BODY = '\n{"name": "g", "arguments": {"s": "</tool_call>\\""}}\n'
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", ">", "/", "t", "\n", " ", '"', "\\", "{", "}", "text",
     CALL, CALL[11:-12], TRICKY_BODY, "é", "😀"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=14).map("".join)
OPTIONS = st.fixed_dictionaries(
    {"offers_tools": st.booleans(), "max_calls": st.sampled_from([None, 1]), "in_reasoning": st.booleans()}
)


def fold(events):
    """Reasoning, text and calls of a list of events; a call's text follows none."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return reasoning, content, [(event.name, event.arguments) for event in events if isinstance(event, ToolCall)]


def read(*pieces, offers_tools=True, max_calls=None, in_reasoning=False):
    reading = HermesParser().start(offers_tools=offers_tools, max_calls=max_calls, in_reasoning=in_reasoning)
    events = [event for piece in pieces for event in reading.feed(piece)] + reading.finish()
    assert all(not isinstance(event, ToolCall) or event.call_id == "" for event in events)
    assert all(event.text for event in events if not isinstance(event, ToolCall)), "no empty event"
    return *fold(events), reading.counters


def call(arguments):
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@given(TEXTS, OPTIONS)
def test_every_two_way_split_reads_as_the_whole(text, options):
    whole = read(text, **options)
    for cut in range(1, len(text)):
        assert read(text[:cut], text[cut:], **options) == whole
    assert read(*text, **options) == whole


@given(TEXTS)
def test_text_without_marks_is_shown_as_it_is(text):
    for mark in HermesParser.marks:
        text = text.replace(mark, "")
    if not any(mark in text for mark in HermesParser.marks):
        assert read(text) == ("", text, [], {})


def test_reasoning_text_and_calls():
    text = "<think>\nwhy\n\n</think>\n\nSay.\n" + call('{"a":  1}') + "\n" + call("{}")
    assert read(text) == ("why", "Say.", [("f", '{"a":  1}'), ("f", "{}")], {})


def test_a_call_without_arguments_has_empty_ones():
    assert read('<tool_call>{"name": "f"}</tool_call>')[2] == [("f", "{}")]


def test_reasoning_that_the_prompt_opened_or_that_never_ends():
    assert read("\nwhy\n</think>\n\nSay.", in_reasoning=True) == ("why", "Say.", [], {})
    assert read("<think>\nwhy\n")[:2] == ("why\n", "")
    assert read("<think></think>Say.")[:2] == ("", "Say.")


def test_marks_count_where_they_belong_only():
    assert read(f"<think>{call('{}')}</think>x")[:3] == (call("{}"), "x", []), "a call inside reasoning is reasoning"
    assert read("Say <think>x</think>")[:2] == ("", "Say <think>x</think>"), "reasoning opens at the start only"
    assert read(call("{}"), offers_tools=False)[1:3] == (call("{}"), [])


def test_a_broken_call_is_text_and_counted():
    for body in (
        "{bad}",
        '{"name": "f", "arguments": {"a": 1,}}',
        '{"name": "f", "arguments": 3}',
        '{"arguments": {}}',
        "[]",
    ):
        text = f"Say.\n<tool_call>\n{body}\n</tool_call>"
        assert read(text) == ("", text, [], {"tool_call_invalid": 1})
    text = f"<tool_call>bad</tool_call>\n{call('{}')}"
    assert read(text) == ("", "<tool_call>bad</tool_call>", [("f", "{}")], {"tool_call_invalid": 1})


def test_an_unfinished_call_is_text_and_counted():
    assert read('<tool_call>\n{"name": "f"') == ("", '<tool_call>\n{"name": "f"', [], {"tool_call_unfinished": 1})
    hidden = read(f"{call('{}')}\n<tool_call>\n{{")
    assert hidden == ("", "", [("f", "{}")], {"tool_call_unfinished": 1, "text_after_tool_call": 1})


def test_a_close_mark_inside_a_string_does_not_close():
    arguments = '{"code": "print(\'</tool_call>\') # \\"</tool_call>\\""}'
    assert read(call(arguments))[2] == [("f", arguments)]


def test_text_behind_a_call_is_hidden_and_counted():
    assert read(f"a{call('{}')} b {call('{}')} c") == ("", "a", [("f", "{}"), ("f", "{}")], {"text_after_tool_call": 1})


def test_calls_beyond_the_allowed_are_hidden_and_counted():
    assert read(call("{}") * 3, max_calls=1) == ("", "", [("f", "{}")], {"tool_call_hidden": 2})


def test_deep_nesting_is_no_crash():
    assert read(call('{"a":' + "[" * 5000 + "]" * 5000 + "}"))[3] == {"tool_call_invalid": 1}


def decode_bytes(token_ids):
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


@given(st.one_of(st.binary(max_size=24), st.text(max_size=12).map(str.encode)), st.data())
def test_broken_and_split_characters_come_out_as_of_the_whole(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.feed(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert "".join([*pieces, detokenizer.finish()]) == data.decode(errors="replace")


def test_no_half_character_is_shown():
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.feed([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_a_decoder_that_strips_the_first_space_keeps_the_others():
    words = {1: " one", 2: " two", 3: " three"}
    detokenizer = Detokenizer(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert [detokenizer.feed([i]) for i in (1, 2, 3)] == ["one", " two", " three"]


@given(st.text("abS", max_size=20), st.lists(st.text("abS", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_shown_in_any_split(text, stops):
    found = [stop for stop in stops if stop in text]
    stop = min(found, key=lambda stop: text.find(stop) + len(stop)) if found else None
    expected = text if stop is None else text[: text.find(stop)]
    for cuts in (range(0), range(1, len(text))):
        filtered = StopFilter(tuple(stops))
        pieces = [filtered.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert expected.startswith("".join(pieces))
        assert "".join([*pieces, filtered.finish(stop)]) == expected


@given(token_ids=st.lists(st.integers(0, 578), max_size=30), draw=st.data())
def test_any_tokens_in_any_chunks_read_as_the_whole(renderer, token_ids, draw):
    hidden = renderer.hidden_token_ids

    def run(*chunks):
        reader = TokenReader(
            HermesParser().start(offers_tools=True), decode=renderer.decode, hidden=hidden, stops=("ab",)
        )
        return fold([event for chunk in chunks for event in reader.feed(chunk)] + reader.finish(None))

    cuts = sorted(draw.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    chunks = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    assert run(*chunks) == run(token_ids) == run(*[[token_id] for token_id in token_ids])
