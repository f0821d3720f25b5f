"""What one client does to the others: nothing, whether it sends too much at once or never reads."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio
import json
import socket

import pytest
import pytest_asyncio

from molt.train.config.sections import GatewayConfig
from molt.train.gateway import history, past
from molt.train.gateway.call import ModelCall
from molt.train.gateway.history import MessageCache, Tools
from molt.train.gateway.past import Past
from molt.train.gateway.routes import WIRES
from molt.train.server.listen import HttpServer, bind

from .conftest import until
from .every_wire import CHAT, COMPLETIONS, CONVERSING, USER
from .gated import gated

pytestmark = pytest.mark.asyncio(loop_scope="session")

MANY = [{"role": "user", "content": f"message {number}"} for number in range(2000)]


def conversation(messages):
    return ModelCall(model="m", messages=[json.dumps(message).encode() for message in messages])


def ran(coroutine):
    """Its result, and how often it let the event loop go on."""
    pauses = 0
    try:
        while True:
            coroutine.send(None)
            pauses += 1
    except StopIteration as stopped:
        return stopped.value, pauses


async def test_a_long_history_is_read_and_converted_in_slices(monkeypatch):
    monkeypatch.setattr(history, "_SLICE_BYTES", 10 * history._MESSAGE_BYTES)
    cache, dialect = MessageCache(), WIRES[CHAT.path]
    read, pauses = ran(cache.history(conversation(MANY[:100]), dialect))
    assert (len(read.links), pauses) == (100, 10)
    assert ran(read.messages())[1] == 0, "what is new is converted already"
    cache.keep(read, Tools(b"", []), lambda _: None)

    again, pauses = ran(cache.history(conversation([{"role": "system", "content": "x"}, *MANY[:100]]), dialect))
    assert pauses == 10
    messages, pauses = ran(again.messages())
    assert ([message["content"] for message in messages], pauses) == (["x", *[m["content"] for m in MANY[:100]]], 10)

    more, pauses = ran(cache.history(conversation([*MANY[:100], *USER]), dialect))
    assert (len(more.links), pauses) == (101, 0), "a turn of an agent waits for nobody"


@CONVERSING
async def test_another_session_is_served_while_a_long_conversation_is_read(bench, monkeypatch, wire):
    monkeypatch.setattr(history, "_SLICE_BYTES", history._MESSAGE_BYTES)
    num_read = []
    read_one = history._slice
    monkeypatch.setattr(history, "_slice", lambda *args: num_read.append(1) or read_one(*args))
    bench.serve({"text": "hello"}, max_model_len=1_000_000)
    large, other = bench.open(), bench.open()
    reading = asyncio.create_task(large.post(wire.path, wire.body(**{wire.history: MANY})))
    await until(lambda: num_read)
    assert (await other.post(COMPLETIONS.path, COMPLETIONS.body())).status_code == 200
    assert 0 < len(num_read) < len(MANY)
    assert (await reading).status_code == 200
    assert len(num_read) == len(MANY)


async def test_a_long_message_is_read_beside_the_event_loop(bench, monkeypatch):
    monkeypatch.setattr(history, "_OFFLOAD_BYTES", 1000)
    monkeypatch.setattr(history, "_SHARED_BYTES", 1000)
    to_thread, threads = asyncio.to_thread, []

    async def spy(function, *args):
        threads.append(function.__name__)
        return await to_thread(function, *args)

    monkeypatch.setattr(history.asyncio, "to_thread", spy)
    caller = bench.open()
    long = [{"role": "user", "content": "x" * 2000}]
    for messages in (long, [{"role": "system", "content": "y"}, *long]):
        assert (await caller.post(CHAT.path, CHAT.body(messages=messages))).status_code == 200
    assert threads == ["_read", "read"], "once to know it, once to render it again"
    bench.check_exact(caller)


class NeverReads:
    """A client of its own server that takes a few KB of its reply, and no more."""

    def __init__(self, bench, sock):
        self._bench, self._server = bench, sock.getsockname()
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._sock.setblocking(False)

    async def ask(self, caller):
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._sock, self._server)
        body = CHAT.body(stream=True)
        path = caller.url.removeprefix(self._bench.url) + CHAT.path
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {caller.key}\r\ncontent-length: {len(body)}"
        await loop.sock_sendall(self._sock, head.encode() + b"\r\n\r\n" + body)

    def close(self):
        self._sock.close()


@pytest_asyncio.fixture(loop_scope="session")
async def never_reads(bench):
    """Starts a server with a `write_timeout_s`, whose sockets hold little, and a client of it."""
    made = []

    async def start(write_timeout_s):
        async def app(scope, receive, send):
            await bench.gateway.asgi(scope, receive, send)

        sock = bind("127.0.0.1", 0, token="")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = HttpServer(app, sock, GatewayConfig(write_timeout_s=write_timeout_s))
        await server.start()
        made.extend([server, NeverReads(bench, sock)])
        return made[-1]

    yield start
    server, client = made
    client.close()
    await server.stop(grace_s=0)


async def test_a_client_that_never_reads_is_cut_and_its_run_takes_the_grace_path(bench, never_reads):
    engine = gated(bench, [72] * 200_000, "more", grace_s=0.0, max_session_requests=1, max_model_len=10**6)
    caller, other = bench.open(), bench.open()
    client = await never_reads(0.05)
    await client.ask(caller)
    await until(lambda: engine.running)
    engine.sample(1)
    await until(lambda: caller.turns)
    (turn,) = caller.turns
    assert (turn.status, turn.finish_reason, len(turn.token_ids)) == ("aborted", "abort", 200_000)
    assert engine.aborted == [turn.turn_id]
    assert caller.session.counters == {"clients_left": 1, "attempts.given_up": 1}
    engine.sample(4)
    for untouched in (other, caller):
        assert (await untouched.post(CHAT.path, CHAT.body())).status_code == 200


async def test_closing_a_session_does_not_wait_for_a_client_that_never_reads(bench, never_reads, caplog):
    engine = gated(bench, [72] * 200_000, [72], "more", max_model_len=10**6)
    caller, other = bench.open(), bench.open()
    client = await never_reads(3600.0)
    await client.ask(caller)
    await until(lambda: engine.running)
    engine.sample(2)
    run = next(iter(caller.session._running))
    await until(lambda: len(run.reply.token_ids) == 200_001)
    session = await bench.sessions.close(caller.session.session_id)
    assert [(turn.status, len(turn.token_ids)) for turn in session.turns()] == [("aborted", 200_001)]
    assert engine.aborted[0] == session.turns()[0].turn_id
    engine.sample(4)
    assert (await other.post(CHAT.path, CHAT.body())).status_code == 200
    assert not caplog.records


async def test_the_past_of_a_long_responses_conversation_is_kept_in_slices(monkeypatch):
    monkeypatch.setattr(past, "_SLICE", 10)
    messages = [json.dumps(message).encode() for message in MANY[:100]]
    kept, at_once = Past(), Past()
    _, pauses = ran(kept.learn(messages))
    assert pauses == 9
    for each in (kept, at_once):
        each.keep("resp_1", messages, b"[]")
        assert each.messages("resp_1") == [*messages, b"[]"]
    assert kept._nodes == at_once._nodes
    assert ran(kept.learn(messages[:10]))[1] == 0
