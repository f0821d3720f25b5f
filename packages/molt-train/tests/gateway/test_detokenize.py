"""From token ids to text and events: characters in pieces, stop strings in pieces, chunks of any size."""
# ruff: noqa: TID252 - the folders of tests are no installed package

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from molt.train.gateway.detokenize import Detokenizer, StopFilter, TokenReader
from molt.train.gateway.parse import HermesParser

from .test_parse import CALL, merged


def decode_bytes(token_ids):
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


@given(st.one_of(st.binary(max_size=24), st.text(max_size=12).map(str.encode)), st.data())
def test_broken_and_split_characters_come_out_as_of_the_whole(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.feed(data[a:b]) for a, b in pairwise([0, *cuts, len(data)])]
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
        pieces = [filtered.feed(text[a:b]) for a, b in pairwise([0, *cuts, len(text)])]
        assert expected.startswith("".join(pieces))
        assert "".join([*pieces, filtered.finish(stop)]) == expected


WORDS = [
    "<think>",
    "</think>",
    CALL,
    CALL[:-15],
    "Some text. ",
    "naïve ",
    "你好 😀",
    "\n",
    " ab",
    "<tool",
    "hello world",
]


@given(
    words=st.lists(st.sampled_from(WORDS), max_size=8), noise=st.lists(st.integers(0, 578), max_size=6), at=st.data()
)
def test_any_tokens_in_any_chunks_read_as_the_whole(renderer, words, noise, at):
    token_ids = renderer._backend.encode("".join(words), add_special_tokens=False).ids
    place = at.draw(st.integers(0, len(token_ids)))
    token_ids[place:place] = noise

    def run(*chunks):
        reading = HermesParser().start(offers_tools=True)
        hidden, stops = renderer.hidden_token_ids, ("ab", "world</")
        reader = TokenReader(reading, decode=renderer.decode, hidden=hidden, stops=stops)
        events = [event for chunk in chunks for event in reader.feed(chunk)] + reader.finish(None)
        return merged(events), reading.counters

    whole = run(token_ids)
    assert run(*[[token_id] for token_id in token_ids]) == whole
    for cut in range(1, len(token_ids)):
        assert run(token_ids[:cut], token_ids[cut:]) == whole
    cuts = sorted(at.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    assert run(*[token_ids[a:b] for a, b in pairwise([0, *cuts, len(token_ids)])]) == whole


def test_broken_bytes_without_end_do_not_pile_up():
    detokenizer = Detokenizer(decode_bytes)
    text, data = "", b"\x80\xe4" * 500
    for byte in data:
        text += detokenizer.feed([byte])
        assert len(detokenizer._held) <= 32
    assert text + detokenizer.finish() == decode_bytes(data)
