"""What is read back from a frame equals what was written, whatever it was; and a frame is small."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.pool.frames import decode_frame, encode_frame
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn

TEXT = st.text(max_size=8)
IDS = st.one_of(st.integers(0, 151_936), st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1))
FLOATS = st.one_of(st.just(0.0), st.floats(allow_nan=False, width=32), st.floats(allow_nan=False))
VERSIONS = st.integers(0, 2**40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def turns(draw):
    num = draw(st.integers(0, 20))
    return Turn(
        turn_id=draw(TEXT),
        session_id=draw(TEXT),
        wire=draw(st.sampled_from(["chat", "responses", "messages", "completions"])),
        parent_turn_id=draw(st.none() | TEXT),
        opened_by=draw(st.none() | TEXT),
        response_id=draw(TEXT),
        status=draw(st.sampled_from(["delivered", "undelivered", "aborted", "failed"])),
        adopted=draw(st.booleans()),
        auxiliary=draw(st.booleans()),
        finish_reason=draw(TEXT),
        prompt_length=draw(st.integers(0, 2**31)),
        context_ids=draw(st.lists(IDS, max_size=20)),
        token_ids=draw(st.lists(IDS, min_size=num, max_size=num)),
        logprobs=draw(st.lists(FLOATS, min_size=num, max_size=num)),
        versions=draw(st.lists(VERSIONS, min_size=num, max_size=num)),
        sampling=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        off_policy=draw(st.lists(TEXT, max_size=2)),
        client=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
    )


@st.composite
def segments(draw):
    num = draw(st.integers(0, 20))
    return Segment(
        segment_id=draw(TEXT),
        turn_ids=draw(st.lists(TEXT, max_size=3)),
        opened_by=draw(TEXT),
        token_ids=draw(st.lists(IDS, min_size=num, max_size=num)),
        action_mask=draw(st.lists(st.integers(0, 1) if draw(st.booleans()) else IDS, min_size=num, max_size=num)),
        logprobs=draw(st.lists(FLOATS, min_size=num, max_size=num)),
        versions=draw(st.lists(st.none() | VERSIONS, min_size=num, max_size=num)),
        trained=draw(st.booleans()),
        untrained_reason=draw(st.none() | TEXT),
    )


@given(st.lists(turns(), max_size=4), st.lists(segments(), max_size=4))
def test_what_is_read_is_what_was_written(turns, segments):
    assert decode_frame(encode_frame(turns, segments)) == (turns, segments)


def segment(**changes):
    values = {
        "segment_id": "s",
        "turn_ids": [],
        "opened_by": "start",
        "token_ids": [1, 2],
        "action_mask": [0, 1],
        "logprobs": [0.0, -0.5],
        "versions": [None, 3],
        "trained": True,
        **changes,
    }
    return Segment(**values)


@pytest.mark.parametrize("value", [-0.0, 0.1, 1e300, -math.inf, 5e-324, float(np.float32(0.1))])
def test_a_log_prob_keeps_every_bit(value):
    ((_, [read])) = decode_frame(encode_frame([], [segment(logprobs=[0.0, value])]))
    assert [math.copysign(1, x) for x in read.logprobs] == [1.0, math.copysign(1, value)]
    assert read.logprobs == [0.0, value]


def test_a_log_prob_that_is_no_number_stays_none():
    ((_, [read])) = decode_frame(encode_frame([], [segment(logprobs=[math.nan, -1.0])]))
    assert math.isnan(read.logprobs[0])
    assert read.logprobs[1] == -1.0


def test_a_frame_takes_about_five_bytes_a_context_token_and_eight_a_sampled_one():
    num = 10_000
    row = segment(
        token_ids=list(range(num)),
        action_mask=[0] * (num // 2) + [1] * (num // 2),
        logprobs=[0.0] * (num // 2) + [-0.5] * (num // 2),
        versions=[None] * (num // 2) + [3] * (num // 2),
    )
    size = len(encode_frame([], [row]))
    assert size < 4 * num + 4 * num // 2 + 2 * num // 8 + 1000
    assert size < len(msgspec.msgpack.encode(row)) * 0.75


def test_a_column_that_holds_fewer_numbers_than_it_says_is_an_error():
    turns, segments = msgspec.msgpack.decode(encode_frame([], [segment()]))
    segments["versions"][2] = [None, 1]
    with pytest.raises(ValueError, match="a column of 2 numbers holds 1"):
        decode_frame(msgspec.msgpack.encode([turns, segments]))
