"""Clients that do not get on with it, over raw sockets: uvicorn alone holds each of them for ever."""

import asyncio
import json
import logging
import socket
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio

from molt.train.config.sections import GatewayConfig
from molt.train.observe.metrics import Metrics
from molt.train.server import HttpServer, bind, create_app
from molt.train.server.connection import MAX_HEAD_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, MESSAGES, CONTROL = "/s/x/v1/chat/completions", "/s/x/v1/messages", "/api/v1/leases"
LARGE = 12 * 1024 * 1024


class Application:
    """Stands for the gateway: reads the body, and answers with its length, or as told."""

    def __init__(self):
        self.forget()

    def forget(self):
        self.bodies = []
        self.left = asyncio.Event()
        self.reply = b""

    async def __call__(self, scope, receive, send):
        body, more = b"", not scope["path"].startswith("/s/refused")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        reply = self.reply or b"%d" % len(body)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(reply))],
            }
        )
        await send({"type": "http.response.body", "body": reply[: len(reply) // 2], "more_body": True})
        await send({"type": "http.response.body", "body": reply[len(reply) // 2 :]})
        if self.reply:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    application = Application()
    app = create_app(SimpleNamespace(open_session=None), application, Metrics(), token="t")
    limits = GatewayConfig(header_timeout_s=0.05, min_body_bytes_per_s=1000, write_timeout_s=0.05)
    server = HttpServer(app, bind("127.0.0.1", 0, token="t"), limits)
    await server.start()
    yield server, application
    await server.stop(grace_s=1)


@pytest.fixture
def application(served):
    served[1].forget()
    return served[1]


@pytest_asyncio.fixture(loop_scope="module")
async def other(served):
    """Another client of the server, which must not notice."""
    async with httpx.AsyncClient(base_url=served[0].url, timeout=10) as client:
        yield client


class Peer:
    """A client that sends what it likes, when it likes."""

    def __init__(self, url, *, receive_buffer=0):
        self._address = url.removeprefix("http://").split(":")
        self._receive_buffer = receive_buffer
        self._loop = asyncio.get_running_loop()
        self.was_reset = False

    async def __aenter__(self):
        self._sock = socket.socket()
        if self._receive_buffer:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        self._sock.setblocking(False)
        await self._loop.sock_connect(self._sock, (self._address[0], int(self._address[1])))
        return self

    async def __aexit__(self, *_error):
        self._sock.close()

    async def send(self, data):
        """Send all of it; False when the server has hung up."""
        try:
            await self._loop.sock_sendall(self._sock, data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def receive(self):
        """What there is; empty at the end, also where that is a reset."""
        try:
            return await self._loop.sock_recv(self._sock, 2**18)
        except ConnectionResetError:
            self.was_reset = True
            return b""

    async def until(self, end):
        data = b""
        while not data.endswith(end):
            part = await self.receive()
            assert part, data
            data += part
        return data

    async def rest(self):
        """All that comes until the server closes the connection."""
        data = b""
        while part := await self.receive():
            data += part
        return data

    async def response(self):
        """Status, headers and JSON of a response that closes the connection."""
        return parse(await self.rest())


def parse(data):
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body) < 4096
    return int(status.split()[1]), headers, json.loads(body)


def check_shape(path, response, *, status, kinds):
    """The error is in the shape of the path's API; `kinds` are its types on OpenAI, Anthropic and the control API."""
    found, headers, body = response
    assert (found, headers["connection"], headers["content-type"]) == (status, "close", "application/json")
    assert headers["request-id"] == headers["x-request-id"]
    error = body["error"]
    if path == MESSAGES:
        assert (body["type"], body["request_id"], error["type"]) == ("error", headers["request-id"], kinds[1])
        assert error.keys() == {"type", "message"}
    elif path == CHAT:
        assert (error.keys(), error["type"]) == ({"message", "type", "param", "code"}, kinds[0])
    else:
        assert (error.keys(), error["type"]) == ({"message", "type", "param"}, kinds[2])
    return error["message"]


SLOW = ("invalid_request_error", "timeout_error", "timeout_error")
BAD = ("invalid_request_error",) * 3
TOO_LARGE = ("invalid_request_error", "request_too_large", "request_too_large")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, CONTROL])
async def test_a_head_that_does_not_end_is_answered_with_408_in_its_apis_shape(served, application, other, path):
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {path} HTTP/1.1\r\nhost: x\r\nx-slow".encode())
        assert (await other.post("/s/y", content=b"12345")).text == "5"
        message = check_shape(path, await peer.response(), status=408, kinds=SLOW)
    assert "head was not complete within 0.05 s (gateway.header_timeout_s)" in message
    assert application.bodies == [b"12345"]


async def test_a_head_drop_by_drop_is_as_late_as_one_that_stops(served, application):
    """The slowloris: each byte would put off a limit on silence."""
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {CHAT} HTTP/1.1\r\n".encode())
        while await peer.send(b"x: y\r\n"):  # noqa: ASYNC110 - the pace is the point
            await asyncio.sleep(0.005)
        check_shape(CHAT, await peer.response(), status=408, kinds=SLOW)


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n"])
async def test_a_connection_that_says_nothing_is_closed_without_a_word(served, data):
    async with Peer(served[0].url) as peer:
        await peer.send(data)
        assert await peer.rest() == b""
        assert not peer.was_reset


async def test_a_connection_between_two_requests_may_wait_longer_than_a_head(served, application):
    async with Peer(served[0].url) as peer:
        for _ in range(2):
            await peer.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 2\r\n\r\nab".encode())
            assert (await peer.until(b"\r\n\r\n2")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.1)  # twice the limit on a head
        await peer.send(f"POST {MESSAGES} HTTP/1.1\r\n".encode())
        check_shape(MESSAGES, await peer.response(), status=408, kinds=SLOW)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
async def test_a_body_that_stops_is_answered_with_408_and_its_call_ends(served, application, other, path, framing):
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {path} HTTP/1.1\r\n{framing}\r\n\r\n1\r\na".encode())
        message = check_shape(path, await peer.response(), status=408, kinds=SLOW)
    assert "less than 1000 bytes a second (gateway.min_body_bytes_per_s)" in message
    await application.left.wait()
    assert application.bodies == []
    assert (await other.post("/s/y", content=b"12345")).text == "5"


async def test_a_body_drop_by_drop_is_too_slow_and_one_at_a_fair_rate_is_not(served, application):
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 100000\r\n\r\n".encode())
        while await peer.send(b"x"):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.005)
        check_shape(CHAT, await peer.response(), status=408, kinds=SLOW)
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 20000\r\n\r\n".encode())
        for _ in range(20):
            await peer.send(b"x" * 1000)
            await asyncio.sleep(0.01)
        assert (await peer.until(b"20000")).startswith(b"HTTP/1.1 200")


async def test_a_body_that_goes_on_after_its_refusal_is_not_read_for_ever(served, application):
    """The application answers without reading; what still comes is thrown away, and then the connection closed."""
    async with Peer(served[0].url) as peer:
        await peer.send(b"POST /s/refused HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        while await peer.send(b"400\r\n" + b"x" * 1024 + b"\r\n"):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.002)
        assert (await peer.rest()).endswith(b"\r\n\r\n0")
    assert application.bodies == [b""]


async def test_a_short_rest_of_a_refused_body_leaves_the_connection_usable(served, application):
    async with Peer(served[0].url) as peer:
        for _ in range(2):
            await peer.send(b"POST /s/refused HTTP/1.1\r\ncontent-length: 3\r\n\r\na")
            await peer.until(b"\r\n\r\n0")
            await peer.send(b"bc")
    assert application.bodies == [b"", b""]


async def test_a_client_that_never_reads_is_cut(served, application, other):
    application.reply = b"x" * LARGE
    async with Peer(served[0].url, receive_buffer=4096) as peer:
        await peer.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 0\r\n\r\n".encode())
        await application.left.wait()
        application.reply = b""
        assert (await other.post("/s/y", content=b"12345")).text == "5"
        assert len(await peer.rest()) < LARGE


async def test_a_client_that_reads_slowly_gets_the_whole(served, application):
    application.reply = b"x" * LARGE
    async with Peer(served[0].url, receive_buffer=2**16) as peer:
        await peer.send(f"POST {CHAT} HTTP/1.1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
        size = 0
        while data := await peer.receive():
            if size // 2**20 % 4 == 0:
                await asyncio.sleep(0.001)
            size += len(data)
    assert size > LARGE


@pytest.mark.parametrize("path", [CHAT, MESSAGES, CONTROL])
async def test_a_head_without_end_is_refused_by_its_size(served, path):
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {path} HTTP/1.1\r\n".encode())
        for _ in range(MAX_HEAD_BYTES // 1000 + 1):
            await peer.send(b"x: " + b"y" * 995 + b"\r\n")
        message = check_shape(path, await peer.response(), status=431, kinds=TOO_LARGE)
    assert message == f"the request's head is longer than {MAX_HEAD_BYTES} bytes"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, CONTROL])
@pytest.mark.parametrize(
    "head",
    [
        "content-length: -1",
        "content-length: 1\r\ncontent-length: 2",
        "content-length: 1\r\ntransfer-encoding: chunked",
        "content-length: 99999999999999999999999",
        "no colon",
        "x: \x01\x00",
    ],
)
async def test_what_is_no_http_is_answered_with_400_in_its_apis_shape(served, application, path, head):
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        check_shape(path, await peer.response(), status=400, kinds=BAD)
    assert application.bodies == []


async def test_bytes_that_are_no_request_at_all_are_answered_with_400(served):
    for data in (b"\x16\x03\x01\x02\x00\x01", b"GET \xff HTTP/1.1\r\n\r\n", b"{}\r\n\r\n"):
        async with Peer(served[0].url) as peer:
            await peer.send(data)
            check_shape(CONTROL, await peer.response(), status=400, kinds=BAD)


async def test_a_broken_second_request_never_writes_into_the_first_ones_response(served, application):
    application.reply = b"x" * LARGE
    async with Peer(served[0].url) as peer:
        await peer.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 0\r\n\r\n".encode())
        assert (await peer.receive()).startswith(b"HTTP/1.1 200")
        await peer.send(b"\x00\x00")
        rest = await peer.rest()
        assert (rest.strip(b"x"), len(rest) < LARGE) == (b"", True)
    await application.left.wait()


async def test_trailers_are_no_headers(served, application):
    async with Peer(served[0].url) as peer:
        head = f"POST {CONTROL} HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        await peer.send(head.encode() + b"0\r\nauthorization: Bearer t\r\n\r\n")
        status, _, body = parse(await peer.rest())
    assert (status, body["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("path", ["/metrics/", "/api/v1/status/", "/api/hello/", "/s"])
async def test_a_forged_host_is_named_in_no_answer(other, path):
    """CVE-2026-48710, GHSA-4xpc-pv4p-pm3w: what is built from the request's URL is built by the client."""
    for host in ("evil.example", "evil.example/api/hello?", "127.0.0.1@evil.example"):
        headers = {"host": host, "authorization": "Bearer t", "x-forwarded-host": host}
        response = await other.get(path, headers=headers)
        assert response.status_code == 404
        assert "evil" not in response.text + str(response.headers)
    assert (await other.get("/api/v1/status", headers={"host": "x/api/hello?"})).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/s/x/../../api/v1/status", "/s/x/..%2f..%2fapi/v1/status", "/s/%2e%2e/api/v1/status", "/s/x%00/v1", "/s//api/v1"],
)
async def test_no_path_crosses_from_sessions_to_the_control_api(served, application, path):
    """vllm#58144 is of this kind: a path that one layer guards and another serves."""
    async with Peer(served[0].url) as peer:
        await peer.send(f"GET {path} HTTP/1.1\r\nconnection: close\r\nauthorization: Bearer t\r\n\r\n".encode())
        assert (await peer.rest()).startswith(b"HTTP/1.1 200")  # by the application that stands for the gateway
    assert application.bodies == [b""]


@pytest.mark.parametrize("path", ["/api%2fv1%2fstatus", "/api/v1/../v1/status", "/%61pi/v1/status", "//metrics"])
async def test_no_spelling_of_a_control_path_goes_past_its_token(served, path):
    async with Peer(served[0].url) as peer:
        await peer.send(f"GET {path} HTTP/1.1\r\nconnection: close\r\n\r\n".encode())
        status, _, _ = parse(await peer.rest())
    assert status in (401, 404)


async def test_options_are_answered_and_allow_no_other_origin(other):
    for path in ("/", "/api/v1/leases", "/nowhere"):
        response = await other.options(path, headers={"origin": "http://x", "access-control-request-method": "POST"})
        assert (response.status_code, response.content) == (204, b"")
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_another_method_names_those_that_are_served(other):
    response = await other.post("/metrics")
    assert response.status_code == 405
    assert sorted(response.headers["allow"].split(", ")) == ["GET", "HEAD"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"sampling_policy": "' + b"x" * 1_000_000 + b'"}',
        b'{"' + b"\\u0001\xf0\x9f\x98\x80" * 100_000 + b'": 1}',
        b'{"metadata": ' + b'{"a":' * 64 + b"1" + b"}" * 64 + b"}",
    ],
)
async def test_an_error_is_small_however_much_it_could_quote(other, body):
    response = await other.post("/api/v1/sessions", content=body, headers={"authorization": "Bearer t"})
    assert response.status_code == 400
    assert len(response.content) < 4096
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_refused_request_leaves_its_key_in_no_log(served, caplog):
    caplog.set_level(logging.DEBUG)
    key = "k3y-that-nobody-may-see"
    for rest in (b"x-slow", b"content-length: 5\r\n\r\na", b"content-length: x\r\n\r\n"):
        async with Peer(served[0].url) as peer:
            await peer.send(
                f"POST {CHAT} HTTP/1.1\r\nauthorization: Bearer {key}\r\nx-api-key: {key}\r\n".encode() + rest
            )
            assert key.encode() not in await peer.rest()
    assert caplog.text.count("refused a request: ") == 3
    assert key not in caplog.text
