"""The gateway's rules on top of another library's parser; vLLM's own are in the engine's tests."""

from molt.train.gateway.call import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from molt.train.gateway.parse_foreign import ForeignParser


class Library:
    """Says what it is told to, a list of parts a token."""

    reasoning_marks: tuple[str, str] = ("<r>", "</r>")

    def __init__(self, *steps, last=()):
        self.steps, self.last = list(steps), list(last)
        self.asked = None

    def start(self, **asked):
        self.asked = asked
        return self

    def feed(self, text, token_ids, *, is_last=False):
        return self.last if is_last else self.steps.pop(0)


def read(*steps, last=(), **options):
    library = Library(*steps, last=last)
    reading = ForeignParser(library, marks=["<r>"]).start(offers_tools=True, **options)
    assert reading.by_token
    return [event for _ in steps for event in reading.feed("x", [1])] + reading.finish(), reading.counters


def test_the_library_is_told_of_tools_and_of_the_prompts_end():
    library = Library()
    parser = ForeignParser(library, marks=["<r>"])
    parser.start(offers_tools=False, tools=[{"type": "function"}], prompt_end=[1, 2])
    assert library.asked == {"offers_tools": False, "tools": [{"type": "function"}], "prompt_end": [1, 2]}
    assert (parser.marks, parser.opens_reasoning, parser.closes_reasoning) == (("<r>",), "<r>", "</r>")


def test_space_between_the_parts_is_dropped_and_within_them_kept():
    events, counters = read(
        [("reasoning", "\na\n")], [("reasoning", "b\n\n")], [("content", "\n\n")], [("content", "c \n")],
        [("content", "d\n"), ("call", "f"), ("arguments", "{}")], [("content", "\n")],
    )  # fmt: skip
    assert events == [
        Reasoning("a"), Reasoning("\nb"), Content("c"), Content(" \nd"), ToolCallStart("f"), ToolCallArguments("{}"),
        ToolCallEnd(),
    ]  # fmt: skip
    assert counters == {}
    assert read([("content", "a\n")]) == ([Content("a"), Content("\n")], {})


def test_what_is_not_shown_is_counted():
    calls = [("call", "f"), ("arguments", '{"a"'), ("arguments", ": 1}"), ("call", "g"), ("content", "x")]
    events, counters = read(calls, max_calls=1)
    assert events == [ToolCallStart("f"), ToolCallArguments('{"a"'), ToolCallArguments(": 1}"), ToolCallEnd()]
    assert counters == {"tool_call_hidden": 1, "text_after_tool_call": 1}


def test_a_call_has_an_end_if_its_arguments_are_whole():
    assert read([("call", "f")]) == ([ToolCallStart("f"), ToolCallArguments("{}"), ToolCallEnd()], {})
    cut = [ToolCallStart("f"), ToolCallArguments('{"a')]
    assert read([("call", "f"), ("arguments", '{"a')]) == (cut, {"tool_call_cut": 1})
    late = [*cut, ToolCallArguments('": 1}'), ToolCallEnd()]
    assert read([("call", "f"), ("arguments", '{"a')], last=[("arguments", '": 1}')]) == (late, {})
