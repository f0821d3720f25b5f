"""Whether a client has its reply: told from its socket, however late the server looks."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import json

import pytest

from molt.train.gateway.delivery import Delivery
from molt.train.gateway.exchange import Exchange
from molt.train.server.connection import BoundedConnection, JoiningTransport

from .conftest import until
from .gated import gated
from .sockets import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
MODES = pytest.mark.parametrize("stream", [True, False])


async def test_a_reset_behind_the_last_event_leaves_the_turn_delivered(bench):
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {**BODY, "stream": True})
    await client.read_until(b"[DONE]\n\n")
    client.reset()
    assert [turn.status for turn in caller.turns] == ["delivered"]
    assert (await caller.post(CHAT, BODY)).json()["id"] != caller.turns[0].response_id


@MODES
async def test_a_client_that_closes_as_soon_as_it_has_its_reply_leaves_the_turn_delivered(bench, monkeypatch, stream):
    monkeypatch.setattr(Exchange, "settle", lambda self: until(lambda: self.gone))  # however late the server looks
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {**BODY, "stream": stream})
    await client.read_until(b"[DONE]\n\n" if stream else b"}}")
    client.close()
    await until(lambda: not caller.session.attempts._under_way)
    assert [turn.status for turn in caller.turns] == ["delivered"]
    assert "replies_undelivered" not in caller.session.counters


@MODES
async def test_a_client_that_closed_before_its_reply_was_written_leaves_it_undelivered(bench, monkeypatch, stream):
    monkeypatch.setattr(Exchange, "settle", lambda self: until(lambda: self.gone))
    engine = gated(bench, "one")
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {**BODY, "stream": stream})
    await until(lambda: engine.running)
    client.close()
    engine.gate.release()
    await until(lambda: caller.turns and not caller.session.attempts._under_way)
    assert [turn.status for turn in caller.turns] == ["undelivered"]


@MODES
async def test_a_connection_that_ended_just_before_the_reply_was_written_leaves_it_undelivered(
    bench, monkeypatch, stream
):
    monkeypatch.setattr(Exchange, "watch", lambda self, left=None: None)  # the watcher has not heard of it yet
    ended = []
    connection_lost = BoundedConnection.connection_lost

    def lost(self, exc):
        connection_lost(self, exc)
        ended.append(self)

    monkeypatch.setattr(BoundedConnection, "connection_lost", lost)
    engine = gated(bench, "one")
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {**BODY, "stream": stream})
    await until(lambda: engine.running)
    client.close()
    await until(lambda: ended)
    engine.gate.release()
    await until(lambda: caller.turns and not caller.session.attempts._under_way)
    assert [turn.status for turn in caller.turns] == ["undelivered"]


@MODES
async def test_a_reset_that_waits_in_the_socket_when_the_reply_is_written_leaves_it_undelivered(bench, stream):
    engine = gated(bench, "one")
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {**BODY, "stream": stream})
    await until(lambda: engine.running)
    client.reset()
    engine.gate.release()  # the server learns of both in the same turn of its loop
    await until(lambda: caller.turns and not caller.session.attempts._under_way)
    assert [turn.status for turn in caller.turns] == ["undelivered"]
    assert caller.session.counters["replies_undelivered"] == 1


@MODES
async def test_a_client_that_wants_no_other_reply_on_its_connection_leaves_the_turn_delivered(bench, stream):
    """The server closes such a connection itself, which is no sign of a client that has left."""
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {**BODY, "stream": stream}, connection="close")
    await client.read_until(b"[DONE]\n\n" if stream else b"}}")
    await until(lambda: not caller.session.attempts._under_way)
    assert [turn.status for turn in caller.turns] == ["delivered"]
    assert "replies_undelivered" not in caller.session.counters


async def test_a_whole_reply_is_one_write(bench, monkeypatch):
    written = []
    write = JoiningTransport.write

    def keep(self, data):
        before = self._held
        write(self, data)
        if not self._held:
            written.append(before + data)

    monkeypatch.setattr(JoiningTransport, "write", keep)
    assert (await bench.open().post(CHAT, BODY)).status_code == 200
    (reply,) = [data for data in written if b"chatcmpl-" in data]
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.endswith(b"}")


async def test_what_a_flush_on_its_way_was_to_send_is_sent_once(bench, monkeypatch):
    """The end of a reply may be written before a flush that was begun comes to its turn."""
    finished, flushes = Delivery.finish, []

    async def finish(self, nodes):
        self._flush_now()
        flushes.append(self._flushing)
        return await finished(self, nodes)

    monkeypatch.setattr(Delivery, "finish", finish)
    bench.serve({"text": "one two three"})
    caller = bench.open()
    client = await RawClient.post(caller, CHAT, {**BODY, "stream": True})
    sent = await client.read_until(b"[DONE]\n\n")
    (flush,) = flushes
    await flush  # fails where it writes behind the end
    texts = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in _data_lines(sent)]
    assert "".join(texts) == "one two three"
    await until(lambda: not caller.session.attempts._under_way)
    assert caller.turns[0].status == "delivered"


def _data_lines(sent: bytes) -> list[bytes]:
    return [line for line in sent.splitlines() if line.startswith(b"data: {")]
