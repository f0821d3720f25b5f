import asyncio
import ipaddress
import signal
import socket

import httpx
import pytest

from molt.train.config.sections import GatewayConfig
from molt.train.errors import ConfigError, RunError
from molt.train.server import HttpServer, bind

TOKEN = "0123456789abcdef"


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_a_port_in_use_is_named_with_the_fix():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use.*server\.port=0"):
            bind("127.0.0.1", port, token="t")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_that_others_can_reach_needs_a_token_that_is_not_guessed(host):
    for weak in ("", "sk-1234", "x" * 15):
        with pytest.raises(ConfigError, match=r"reach this address; set server\.token to 16 characters or more"):
            bind(host, 0, token=weak)
    bind(host, 0, token=TOKEN).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.5"])
def test_loopback_needs_none(host):
    with bind(host, 0, token="") as sock:
        assert ipaddress.ip_address(sock.getsockname()[0]).is_loopback


@pytest.mark.parametrize("port", [65536, -1])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(ConfigError, match=rf"server\.port={port}: a port is a number from 0 to 65535"):
        bind("127.0.0.1", port, token="t")


def test_an_unknown_host_is_refused():
    with pytest.raises(ConfigError, match=r"server\.host='no\.such\.host\.invalid', .*: no such address"):
        bind("no.such.host.invalid", 0, token="t")


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="cannot listen there: Cannot assign requested address"):
        bind("192.0.2.1", 0, token=TOKEN)


def test_answers_are_not_held_back_by_the_kernel():
    with bind("127.0.0.1", 0, token="t") as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_client_that_lost_its_power_is_noticed():
    server = HttpServer(hello, bind("127.0.0.1", 0, token="t"), GatewayConfig(write_timeout_s=7.5))
    sock = server._sock
    sock.listen()
    with socket.create_connection(sock.getsockname()), sock.accept()[0] as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500
    await server.stop()


async def test_the_port_is_taken_before_anyone_is_answered_and_free_again_afterwards():
    sock = bind("127.0.0.1", 0, token="t")
    port = sock.getsockname()[1]
    server = HttpServer(hello, sock)
    assert server.url == f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=server.url) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/")
        await server.start()
        assert (await client.get("/")).text == "hello"
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get("/")
    bind("127.0.0.1", port, token="t").close()


async def test_an_address_for_everyone_is_shown_as_one_that_works_here():
    server = HttpServer(hello, bind("0.0.0.0", 0, token=TOKEN))
    await server.start()
    async with httpx.AsyncClient() as client:
        assert (await client.get(server.url)).text == "hello"
    await server.stop()


async def test_the_process_keeps_its_signal_handlers():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    server = HttpServer(hello, bind("127.0.0.1", 0, token="t"))
    await server.start()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    await server.stop()


async def test_a_port_that_was_stolen_meanwhile_is_an_error_of_the_start():
    sock = bind("127.0.0.1", 0, token="t")
    with socket.create_server(sock.getsockname()):
        server = HttpServer(hello, sock)
        with pytest.raises(RunError, match=r"did not start: .*Address already in use"):
            await server.start()
    sock.close()


async def test_stopping_lets_requests_under_way_end_and_cuts_those_that_do_not():
    started, release, cut = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        started.set()
        try:
            await release.wait()
        except asyncio.CancelledError:
            cut.set()
            raise
        await hello(scope, receive, send)

    for is_released in (True, False):
        server = HttpServer(slow, bind("127.0.0.1", 0, token="t"))
        await server.start()
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(client.get(server.url))
            await started.wait()
            stopping = asyncio.create_task(server.stop(grace_s=1))
            if is_released:
                release.set()
                assert (await request).text == "hello"
            await asyncio.wait_for(stopping, timeout=5)
            assert cut.is_set() == (not is_released)
            await asyncio.gather(request, return_exceptions=True)
        started.clear()
        release.clear()


async def test_a_server_that_never_started_gives_its_port_back():
    sock = bind("127.0.0.1", 0, token="t")
    address = sock.getsockname()
    await HttpServer(hello, sock).stop()
    with socket.socket() as other:  # without SO_REUSEADDR, under which two sockets that do not listen share a port
        other.bind(address)
        assert other.getsockname() == address
