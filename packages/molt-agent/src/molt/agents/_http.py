"""The only importer of httpx: JSON over keep-alive connections, with typed errors and retries.

Retries follow what the OpenAI and Anthropic SDKs do (connection errors, time-outs, 408, 429, 5xx; `x-should-retry` and
`retry-after` are obeyed), bounded by time instead of a count: a server that is gone is given up sooner than one that
answers and asks to wait. All tries of one call carry the same `idempotency-key`
and count up `x-stainless-retry-count`, so that a gateway can tell a resend from a new request.
"""

import asyncio
import logging
import random
import time
import uuid
from typing import Any, TypeVar

import httpx
import msgspec

from molt.agents.blame import is_fault_status
from molt.agents.errors import AuthenticationError, FencedError, ServerError, ServerUnavailableError

CONNECT_LIMIT_S = 5.0
KEEPALIVE_S = 60.0
BACKOFF_START_S = 0.1
BACKOFF_END_S = 5.0
REPEATED = "repeated"
"""`code` of the refusal of a report that was accepted before."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class JsonClient:
    """POSTs msgspec structs and reads them back.

    Each concurrent call has an httpx client, and so a connection, of its own, and leaves it to the next call. One
    client for all would be slower: at every request its pool compares each connection with every other, which at 32
    calls at once costs four times the CPU of the call itself.

    Args:
        busy_limit_s: Seconds for which a server that asks its clients to wait (429 or 503 with `retry-after`) is
            obeyed; None: as long as one that is gone is tried.
    """

    def __init__(self, *, busy_limit_s: float | None = None) -> None:
        self._busy_limit_s = busy_limit_s
        self._tls = httpx.create_ssl_context()
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    async def post(
        self, url: str, body: Any, reply_type: type[T], *, api_key: str, timeout_s: float, give_up_s: float
    ) -> T:
        """Send `body` until it is answered.

        Args:
            url: The whole URL.
            body: Anything that msgspec encodes as JSON.
            reply_type: What to decode the answer as; unknown fields are ignored.
            api_key: The bearer token.
            timeout_s: Longest silence of one try, in seconds.
            give_up_s: Seconds after the first failure beyond which no further try starts; an answer that asks to wait
                is no failure, and has the limit of this client.

        Raises:
            ServerUnavailableError: No usable answer within `give_up_s`.
            AuthenticationError: 401 or 403.
            FencedError: 409.
            ServerError: Any other refusal, or an answer that is no `reply_type`.
        """
        content = msgspec.json.encode(body)
        headers = {"authorization": f"Bearer {api_key}", "idempotency-key": uuid.uuid4().hex}
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_LIMIT_S))
        patience = _Patience(give_up_s, give_up_s if self._busy_limit_s is None else self._busy_limit_s)
        num_retries = 0
        while True:
            headers["x-stainless-retry-count"] = str(num_retries)
            retry_after: float | None = None
            try:
                response = await self._send(url, content, headers=headers, timeout=timeout)
            except httpx.RequestError as exc:
                reason = f"{url}: {type(exc).__name__} {exc}".strip()
            else:
                if response.is_success:
                    return _decode(response, reply_type)
                refusal = _refusal(response)
                if not _worth_retrying(response):
                    raise refusal
                reason, retry_after = str(refusal), _retry_after(response)
            await asyncio.sleep(patience.pause(reason, retry_after, retry_after or _backoff(num_retries)))
            num_retries += 1

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.aclose()

    async def _send(
        self, url: str, content: bytes, *, headers: dict[str, str], timeout: httpx.Timeout
    ) -> httpx.Response:
        client = self._free.pop() if self._free else self._new_client()
        try:
            return await client.post(url, content=content, headers=headers, timeout=timeout)
        finally:
            self._free.append(client)

    def _new_client(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            verify=self._tls,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            headers={"content-type": "application/json"},
        )
        self._clients.append(client)
        return client


class _Patience:
    """How long one call is tried again."""

    def __init__(self, give_up_s: float, busy_limit_s: float) -> None:
        self._give_up_s, self._busy_limit_s = give_up_s, busy_limit_s
        self._gone_since: float | None = None
        self._busy_since: float | None = None

    def pause(self, reason: str, retry_after: float | None, pause_s: float) -> float:
        """Take why a try failed, and for how long the server asks to wait, if it does.

        Returns:
            `pause_s`: how long to wait before the next try.

        Raises:
            ServerUnavailableError: The next try would come too late.
        """
        now = time.monotonic()
        if self._gone_since is None and self._busy_since is None:
            log.warning("%s; trying again for up to %g s", reason, self._limit_of(retry_after))
        if retry_after is None:
            self._gone_since = since = now if self._gone_since is None else self._gone_since
        else:
            self._gone_since = None  # it answered
            self._busy_since = since = now if self._busy_since is None else self._busy_since
        limit_s = self._limit_of(retry_after)
        if now + pause_s - since > limit_s:
            raise ServerUnavailableError(f"no usable answer for {limit_s:g} s: {reason}")
        return pause_s

    def _limit_of(self, retry_after: float | None) -> float:
        return self._give_up_s if retry_after is None else self._busy_limit_s


def _worth_retrying(response: httpx.Response) -> bool:
    hint = response.headers.get("x-should-retry")
    return hint == "true" if hint in ("true", "false") else is_fault_status(response.status_code)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks for; dates and nonsense count as nothing."""
    for header, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(response.headers.get(header, "")) * unit
        except ValueError:
            continue
        if seconds > 0:
            return seconds
    return None


def _backoff(num_retries: int) -> float:
    return min(BACKOFF_START_S * 2.0**num_retries, BACKOFF_END_S) * random.uniform(0.75, 1.0)


def _decode(response: httpx.Response, reply_type: type[T]) -> T:
    try:
        return msgspec.json.decode(response.content, type=reply_type)
    except msgspec.DecodeError as exc:
        raise ServerError(f"{response.url}: unreadable answer: {exc}", status=response.status_code) from exc


class _Detail(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Detail | None = None
    reason: str | None = None
    """Of a verdict that a report does not count."""
    repeated: bool = False


def _refusal(response: httpx.Response) -> ServerError:
    """Read an error answer; the control API and the OpenAI wire have one shape, verdicts on reports another."""
    try:
        body = msgspec.json.decode(response.content, type=_ErrorBody)
    except msgspec.DecodeError:
        body = _ErrorBody()
    detail = body.error or _Detail(body.reason or response.text[:200], code=REPEATED if body.repeated else None)
    status = response.status_code
    error_type = {401: AuthenticationError, 403: AuthenticationError, 409: FencedError}.get(status, ServerError)
    code = detail.code or detail.type
    message = f"{response.url}: HTTP {status}: {detail.message or response.reason_phrase}"
    return error_type(message, status=status, code=None if code is None else str(code))
