"""The checker of JSON in the making, against Python's own parser."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.gateway.json_text import MAX_DEPTH, JsonText

WHOLE = json.dumps({"a": [1, -2.5e3, 0.5, True, False, None, 'x\\\n"é'], "b": {"c": [], "d": {}}})
TEXTS = st.one_of(
    st.text('{}[]",:\\ 0123.eE+-truefalsnul\n', max_size=10),
    st.tuples(st.integers(0, len(WHOLE)), st.text('{}[]",:\\ 01.e-n', max_size=2), st.integers(0, 3)).map(
        lambda at: WHOLE[: at[0]] + at[1] + WHOLE[at[0] + at[2] :]
    ),
)


def is_json(text):
    try:
        json.loads(text, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


def read(*pieces):
    """Whether the pieces are JSON, with nothing but white space behind it."""
    value, rest = JsonText(), ""
    for piece in [*pieces, " "]:
        rest += piece[value.feed(piece) :]
    return value.whole and not rest.strip()


@given(TEXTS, st.data())
def test_it_takes_what_python_takes_in_any_pieces(text, data):
    cut = data.draw(st.integers(0, len(text)))
    assert read(text) == read(*text) == read(text[:cut], text[cut:]) == is_json(text)


@given(st.integers(0, len(WHOLE) - 1))
def test_the_beginning_of_a_value_is_neither_whole_nor_broken(size):
    value = JsonText()
    assert value.feed(WHOLE[:size]) == size
    assert (value.whole, value.broken) == (False, False)


@pytest.mark.parametrize(
    ("text", "stops_at"),
    [("{,", 1), ('{"a" 1', 5), ("[1,]", 3), ("01", 1), ("-x", 1), ('"\n', 1), ('"\\q', 2), ('"\\u12g', 5), ("trux", 3)],
)
def test_it_stops_at_the_first_character_that_cannot_be(text, stops_at):
    value = JsonText()
    assert value.feed(text) == stops_at
    assert value.broken or value.whole


def test_depth_has_a_limit():
    value = JsonText()
    assert value.feed("[" * (MAX_DEPTH + 1)) == MAX_DEPTH
    assert value.broken
