"""The first byte: a stream whose first token is late is opened soon, unless the call may still be refused."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio

import pytest

from molt.train.errors import EngineDeadError, EngineOverloadedError

from .conftest import until
from .every_wire import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from .gated import GatedEngine, gated
from .replies import events

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOUR = 3600.0
OPENING = {
    CHAT.path: [None],
    RESPONSES.path: ["response.created", "response.in_progress"],
    MESSAGES.path: ["message_start", "ping"],
    COMPLETIONS.path: [],
}
STREAMS = pytest.mark.parametrize("wire", [CHAT, RESPONSES, MESSAGES, COMPLETIONS], ids=lambda wire: wire.path)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("molt.train.gateway.delivery.FIRST_BYTE_S", 0.01)


def streamed(bench, caller, wire):
    headers = {"authorization": f"Bearer {caller.key}", "content-type": "application/json"}
    return bench.http.stream("POST", caller.url + wire.path, content=wire.body(stream=True), headers=headers)


@STREAMS
async def test_tale_3387_a_stream_is_opened_before_its_first_token(bench, wire):
    engine = gated(bench, "one", " two", keepalive_s=HOUR)
    caller = bench.open()
    async with streamed(bench, caller, wire) as response:  # its head has come
        assert (response.status_code, caller.turns) == (200, [])
        received, seen = response.aiter_raw(), b""
        while len(events(seen)) < len(OPENING[wire.path]):
            seen += await anext(received)
        assert [name for name, _ in events(seen)] == OPENING[wire.path]
        engine.sample(2)
        seen += b"".join([piece async for piece in received])
    assert b"one" in seen
    assert b" two" in seen
    await until(lambda: caller.turns[0].status == "delivered")
    assert caller.session.counters == {}


async def test_the_first_byte_of_a_resend_that_joins_comes_as_soon(bench):
    engine = gated(bench, "one", " two", keepalive_s=HOUR)
    caller = bench.open()
    first = asyncio.create_task(caller.post(CHAT.path, CHAT.body()))
    await until(lambda: engine.running)
    first.cancel()
    await until(lambda: caller.session.counters["clients_left"])
    async with streamed(bench, caller, CHAT) as response:
        assert (response.status_code, caller.turns) == (200, [])
        engine.sample(2)
        assert b" two" in b"".join([piece async for piece in response.aiter_raw()])
    assert caller.session.counters["resends.attached"] == 1


class Dying(GatedEngine):
    """Is dead as often as it is asked."""

    asked = 0

    async def stream(self, request):
        self.asked += 1
        raise EngineDeadError("gone")
        yield


@STREAMS
async def test_a_call_that_is_held_for_a_dead_engine_keeps_its_status_line(bench, wire):
    engine = Dying()
    bench.serve(engine=engine, keepalive_s=HOUR, hold_s=0.1)
    async with streamed(bench, bench.open(), wire) as response:
        assert response.status_code == (529 if wire is MESSAGES else 503)
    assert engine.asked >= 2


async def test_a_held_stream_is_opened_by_the_keep_alive(bench):
    bench.serve(engine=Dying(), keepalive_s=0.03, hold_s=0.2)
    async with streamed(bench, bench.open(), MESSAGES) as response:
        assert response.status_code == 200
        assert events(await response.aread())[-1][0] == "error"


@STREAMS
async def test_an_engine_that_refuses_at_once_is_answered_with_its_status(bench, monkeypatch, wire):
    monkeypatch.setattr("molt.train.gateway.delivery.FIRST_BYTE_S", 1.0)
    engine = gated(bench, EngineOverloadedError("full"))
    engine.sample(1)
    async with streamed(bench, bench.open(), wire) as response:
        assert response.status_code == (529 if wire is MESSAGES else 503)


async def test_a_call_that_waits_for_its_turn_may_still_be_refused(bench):
    """Its prompt is not made yet, and may be too long: agents compact on the status of that refusal."""
    engine = gated(bench, "one", max_session_requests=1, keepalive_s=HOUR, hold_s=HOUR, max_model_len=200)
    caller = bench.open()
    first = asyncio.create_task(caller.post(CHAT.path, CHAT.body()))
    await until(lambda: engine.running)
    long = CHAT.body(stream=True, messages=[{"role": "user", "content": "long " * 200}])
    waiting = asyncio.create_task(caller.post(CHAT.path, long))
    await until(lambda: caller.session.slots._waiters)
    await asyncio.sleep(0.05)  # several times FIRST_BYTE_S
    engine.sample(1)
    assert (await first).status_code == 200
    assert (await waiting).status_code == 400
