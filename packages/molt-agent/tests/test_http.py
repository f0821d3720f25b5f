"""The JSON client: what it retries, for how long, and what it raises."""

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from molt.agents import AuthenticationError, FencedError, ServerError, ServerUnavailableError
from molt.agents._http import JsonClient
from molt.agents.testing.loopback import LoopbackServer, Request, Response


class Pong(msgspec.Struct):
    number: int


class Answers(LoopbackServer):
    """Gives the answers one by one; None cuts the connection."""

    def __init__(self, *answers: Response | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.requests: list[Request] = []

    async def handle(self, request: Request) -> Response | None:
        self.requests.append(request)
        return self.answers.pop(0)


GOOD = Response(body=b'{"number": 7, "unknown": true}')


@pytest.fixture
async def client() -> AsyncIterator[JsonClient]:
    http = JsonClient()
    yield http
    await http.close()


async def post(client: JsonClient, server: Answers, *, give_up_s: float = 10.0) -> Pong:
    return await client.post(f"{server.url}/ping", {"a": 1}, Pong, api_key="key", timeout_s=10.0, give_up_s=give_up_s)


@pytest.fixture(autouse=True)
def fast_backoff(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("molt.agents._http.BACKOFF_START_S", 0.001)


async def test_a_body_goes_and_a_typed_answer_comes(client: JsonClient):
    async with Answers(GOOD) as server:
        assert await post(client, server) == Pong(7)
    (request,) = server.requests
    assert (request.method, request.path, request.body) == ("POST", "/ping", b'{"a":1}')
    assert request.headers["authorization"] == "Bearer key"
    assert request.headers["content-type"] == "application/json"


async def test_what_the_server_is_to_blame_for_is_retried_as_one_call(
    client: JsonClient, caplog: pytest.LogCaptureFixture
):
    async with Answers(None, Response(status=503), Response(status=429), Response(status=408), GOOD) as server:
        assert await post(client, server) == Pong(7)
    assert [r.headers["x-stainless-retry-count"] for r in server.requests] == ["0", "1", "2", "3", "4"]
    assert len({r.headers["idempotency-key"] for r in server.requests}) == 1
    assert len({r.body for r in server.requests}) == 1
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


async def test_two_calls_have_two_keys(client: JsonClient):
    async with Answers(GOOD, GOOD) as server:
        await post(client, server)
        await post(client, server)
    assert len({r.headers["idempotency-key"] for r in server.requests}) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, ServerError),
        (404, ServerError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (409, FencedError),
    ],
)
async def test_what_the_request_is_to_blame_for_is_raised_at_once(
    client: JsonClient, status: int, error: type[ServerError]
):
    body = b'{"error": {"type": "some_type", "message": "Some reason.", "param": null}}'
    async with Answers(Response(status=status, body=body)) as server:
        with pytest.raises(error, match=rf"/ping: HTTP {status}: Some reason\.") as caught:
            await post(client, server)
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.code) == (status, "some_type")


async def test_an_error_body_of_another_shape_is_quoted(client: JsonClient):
    async with Answers(Response(status=404, body=b"<html>nothing here</html>")) as server:
        with pytest.raises(ServerError, match="HTTP 404: <html>nothing here</html>") as caught:
            await post(client, server)
    assert caught.value.code is None


async def test_a_hint_of_the_server_wins_over_its_status(client: JsonClient):
    async with Answers(Response(status=400, headers={"x-should-retry": "true"}), GOOD) as server:
        assert await post(client, server) == Pong(7)
    async with Answers(Response(status=503, headers={"x-should-retry": "false"})) as server:
        with pytest.raises(ServerError, match="HTTP 503"):
            await post(client, server)


async def test_a_wait_that_the_server_asks_for_is_kept(client: JsonClient):
    """A wait beyond the limit cannot be kept, so the call gives up at once and not after waiting in vain."""
    for headers in ({"retry-after": "3600"}, {"retry-after-ms": "3600000"}):
        async with Answers(Response(status=503, headers=headers)) as server:
            with pytest.raises(ServerUnavailableError, match=r"no usable answer for 10 s: .*/ping: HTTP 503"):
                await post(client, server)
    for headers in ({"retry-after-ms": "1"}, {"retry-after": "Mon, 30 Nov 2026 00:00:00 GMT"}, {"retry-after": "0"}):
        async with Answers(Response(status=503, headers=headers), GOOD) as server:
            assert await post(client, server) == Pong(7)


async def test_a_server_that_asks_to_wait_is_obeyed_for_longer_than_one_that_is_gone():
    busy = Response(status=503, headers={"retry-after-ms": "1"})
    client = JsonClient(busy_limit_s=10.0)
    try:
        async with Answers(*[busy] * 5, GOOD) as server:
            assert await post(client, server, give_up_s=0.0) == Pong(7)
        async with Answers(busy, None) as server:
            with pytest.raises(ServerUnavailableError, match=r"no usable answer for 0 s: .*RemoteProtocolError"):
                await post(client, server, give_up_s=0.0)
        async with Answers(Response(status=503, headers={"retry-after": "11"})) as server:
            with pytest.raises(ServerUnavailableError, match=r"no usable answer for 10 s: .*HTTP 503"):
                await post(client, server, give_up_s=0.0)
    finally:
        await client.close()


async def test_the_reason_of_a_verdict_is_the_error(client: JsonClient):
    verdict = b'{"accepted": false, "reason": "it is over", "repeated": %s}'
    for repeated, code in ((b"true", "repeated"), (b"false", None)):
        async with Answers(Response(status=409, body=verdict % repeated)) as server:
            with pytest.raises(FencedError, match=r"HTTP 409: it is over$") as caught:
                await post(client, server)
        assert caught.value.code == code


async def test_a_server_that_is_gone_is_given_up_after_the_limit(client: JsonClient):
    async with Answers() as server:
        url = server.url
    with pytest.raises(ServerUnavailableError, match=r"no usable answer for 0.02 s: .*ConnectError"):
        await client.post(url, {}, Pong, api_key="key", timeout_s=1.0, give_up_s=0.02)


async def test_silence_is_a_failure(client: JsonClient):
    class Silent(Answers):
        async def handle(self, request: Request) -> Response | None:
            self.requests.append(request)
            if len(self.requests) == 1:
                await asyncio.get_running_loop().create_future()
            return GOOD

    async with Silent() as server:
        answer = await client.post(f"{server.url}/ping", {}, Pong, api_key="key", timeout_s=0.05, give_up_s=10.0)
    assert answer == Pong(7)
    assert len(server.requests) == 2


async def test_an_answer_that_cannot_be_read_is_an_error(client: JsonClient):
    for body in (b"not json", b'{"number": "seven"}'):
        async with Answers(Response(body=body)) as server:
            with pytest.raises(ServerError, match="/ping: unreadable answer"):
                await post(client, server)


async def test_connections_are_kept(client: JsonClient):
    connections = 0

    class Counting(Answers):
        def _connected(self, reader, writer) -> None:
            nonlocal connections
            connections += 1
            super()._connected(reader, writer)

    async with Counting(*[GOOD] * 5) as server:
        for _ in range(5):
            await post(client, server)
    assert connections == 1
