"""Bad bodies on every wire: refused in the wire's shape, small, at once, and without a trace in any recording."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio
import gzip
import json
import zlib

import pytest
from backports import zstd

from molt.train.gateway.wires.nesting import MAX_DEPTH, MAX_ITEMS, MAX_NODES

from .conftest import until
from .every_wire import CHAT, CONVERSING, COUNT, EVERY, USER, nested, with_raw

pytestmark = pytest.mark.asyncio(loop_scope="session")

BAD_BODIES = {
    "empty": (lambda wire: b"", None),
    "begun": (lambda wire: b"{", None),
    "array": (lambda wire: b"[]", None),
    "null": (lambda wire: b"null", None),
    "byte_order_mark": (lambda wire: b"\xef\xbb\xbf" + wire.body(), None),
    "more_behind": (lambda wire: wire.body() + b"x", None),
    "cut": (lambda wire: wire.body()[:-3], None),
    "utf_16": (lambda wire: wire.body().decode().encode("utf-16"), None),
    "nan": (lambda wire: with_raw(wire, "temperature", b"NaN"), None),
    "bad_utf_8": (lambda wire: with_raw(wire, "model", b'"\xff"'), "model"),
    "bad_utf_8_unread": (lambda wire: with_raw(wire, "nobody_reads", b'"\xff"'), "nobody_reads"),
    "half_a_surrogate": (lambda wire: with_raw(wire, "model", b'"\\ud800"'), "model"),
    "deep_array": (lambda wire: with_raw(wire, "nobody_reads", nested(MAX_DEPTH)), "nobody_reads"),
    "deep_object": (lambda wire: with_raw(wire, "nobody_reads", b'{"a":' * 64 + b"1" + b"}" * 64), "nobody_reads"),
    "deeper": (lambda wire: with_raw(wire, "nobody_reads", nested(100_000)), None),
    "endless": (lambda wire: b"[" * 1_000_000, None),
}


@EVERY
@pytest.mark.parametrize("bad", BAD_BODIES)
async def test_a_malformed_body_is_refused(bench, unmoved, wire, bad):
    make, field = BAD_BODIES[bad]
    status, param, message = await wire.refused(unmoved, make(wire))
    assert (status, "JSON" in message or "Expected" in message or "nested" in message or "UTF-8" in message) == (
        400,
        True,
    )
    if field == "nobody_reads":
        assert field in (param or message)


@CONVERSING
@pytest.mark.parametrize(
    "content",
    [
        b'"\xff"',
        b'[{"type": "text", "text": "\xff"}]',
        b'[{"type": "text", "text": 3}]',
        b'[{"type": "text", "nobody_reads": ' + nested(62) + b"}]",
        nested(500),
        b'"' + b"\xff" * 1_000_000 + b'"',
    ],
)
async def test_bad_messages_are_refused_with_the_path_of_theirs(bench, unmoved, wire, content):
    body = wire.body(**{wire.history: [*USER, "HERE"]}).replace(
        b'"HERE"', b'{"role": "user", "content": ' + content + b"}"
    )
    status, param, message = await wire.refused(unmoved, body)
    assert status == 400
    assert (param or message).startswith(f"{wire.history}[1]")


@CONVERSING
async def test_a_conversation_has_100000_messages_at_the_most(bench, unmoved, wire):
    status, param, message = await wire.refused(unmoved, wire.body(**{wire.history: USER * (MAX_ITEMS + 1)}))
    assert (status, param or wire.history) == (400, wire.history)
    assert "100000" in message
    assert wire.history in (param or message)


@EVERY
async def test_a_body_of_braces_is_refused_before_each_becomes_an_object(bench, unmoved, wire):
    status, _, message = await wire.refused(unmoved, with_raw(wire, "x", b"[" + b"{}," * MAX_NODES + b"{}]"))
    assert (status, message) == (400, f"the body has more than {MAX_NODES} objects and arrays")


@EVERY
async def test_an_error_is_small_however_much_it_could_quote(bench, unmoved, wire):
    """As vLLM's validation errors were not: 4.4 KB in, 23.6 MB out."""
    long = "\U0001f600\x01\\\"'" * 100_000
    for body in (
        wire.body(**{wire.history or "prompt": [{"role": long, "content": long}]}),
        wire.body(model={long: long}),
        wire.body(model=[long]),
        wire.body(tools=[{"type": "function", "function": {"name": [long]}}], prompt={long: long}),
        with_raw(wire, long, nested(100)),
        with_raw(wire, "x", json.dumps(long).encode()[:-1]),
    ):
        if (wire.sdk == "openai" and wire.history) or b'"function"' not in body:
            assert (await wire.refused(unmoved, body))[0] == 400


@EVERY
async def test_a_body_over_the_limit_is_refused_before_it_is_read(bench, wire):
    bench.serve({"text": "x"}, max_body_bytes=100_000)
    caller = bench.open()

    assert (await wire.refused(caller, b" " * 100_001))[0] == 413
    address, path = bench.url.removeprefix("http://").split(":"), f"/s/{caller.session.session_id}{wire.path}"
    for head, sent in (
        ("content-length: 1000000000000", b""),
        ("expect: 100-continue\r\ncontent-length: 100001", b""),
        ("transfer-encoding: chunked", b"186a1\r\n" + b" " * 100_001),
    ):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"POST {path} HTTP/1.1\r\nauthorization: Bearer {caller.key}\r\n{head}\r\n\r\n".encode() + sent)
        assert (await reader.readline()).split()[1] == b"413"  # while the body is still to come
        writer.close()
    packed = {"gzip": gzip.compress(b" " * 10_000_000), "zstd": zstd.compress(b" " * 10_000_000)}
    for coding, content in packed.items():
        assert len(content) < 100_000
        status, _, message = await wire.refused(caller, content, **{"content-encoding": coding})
        assert (status, message) == (413, "the body is longer than 100000 bytes (gateway.max_body_bytes)")
    assert (caller.turns, bench.log) == ([], [])


@EVERY
async def test_bodies_may_be_packed(bench, wire):
    caller = bench.open()
    for coding, pack in (
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("zstd", zstd.compress),
        ("identity", bytes),
    ):
        assert await wire.post(caller, pack(wire.body()), **{"content-encoding": coding})


_GZIPPED = gzip.compress(b"{}", mtime=0)  # no clock in it: it names a test, the same in every process


@EVERY
@pytest.mark.parametrize(
    ("coding", "content", "status"),
    [
        ("br", b"x", 415),
        ("deflate", zlib.compress(b"{}"), 415),
        ("gzip, zstd", _GZIPPED, 415),
        ("gzip", b"{}", 400),
        ("gzip", _GZIPPED[:-1], 400),
        ("gzip", _GZIPPED * 2, 400),
        ("gzip", b"", 400),
        ("zstd", _GZIPPED, 400),
        ("zstd", zstd.compress(b"{}")[:-1], 400),
        ("zstd", zstd.compress(b"{}") * 2, 400),
        ("zstd", zstd.compress(b" ", options={zstd.CompressionParameter.window_log: 27}), 400),
        ("x" * 5000, b"{}", 415),
    ],
)
async def test_bodies_packed_otherwise_or_badly_are_refused(bench, unmoved, wire, coding, content, status):
    assert (await wire.refused(unmoved, content, **{"content-encoding": coding}))[0] == status


async def test_a_session_at_its_limit_holds_up_no_other(bench):
    lines = {"match": "crowd", "text": "slow", "delay_s": 60}, {"text": "quick"}
    bench.serve(*lines, max_session_requests=2, hold_s=60)
    crowded, other = bench.open(), bench.open()
    body = CHAT.body(messages=[{"role": "user", "content": "crowd"}])
    crowd = [asyncio.create_task(crowded.post(CHAT.path, body)) for _ in range(20)]
    await until(lambda: crowded.session.slots and crowded.session.slots.locked())
    for _ in range(5):
        assert (await other.post(CHAT.path, CHAT.body())).status_code == 200
    assert not any(task.done() for task in crowd)
    await bench.sessions.close(crowded.session.session_id)
    assert {response.status_code for response in await asyncio.gather(*crowd)} == {410}


async def test_a_large_body_is_read_off_the_event_loop(bench, monkeypatch):
    caller = bench.open()
    threads = []
    to_thread = asyncio.to_thread

    async def spy(function, *args):
        threads.append(function)
        return await to_thread(function, *args)

    monkeypatch.setattr("molt.train.gateway.app.asyncio.to_thread", spy)
    assert (await caller.post(COUNT.path, COUNT.body(metadata={"x": "y" * 2**20}))).status_code == 200
    assert len(threads) == 1
    assert (await caller.post(COUNT.path, COUNT.body())).status_code == 200
    assert len(threads) == 1
