"""Who is to blame for an error that an agent raised: the agent, or what it ran on."""

from collections.abc import Iterator
from typing import cast

from molt.agents.errors import InfrastructureError
from molt.agents.protocol import OutcomeKind

BROKEN_CONNECTIONS = {
    "aiohttp.ClientConnectionError",
    "anthropic.APIConnectionError",
    "httpx.TransportError",
    "httpx2.TransportError",
    "openai.APIConnectionError",
    "requests.ConnectionError",
    "requests.Timeout",
}
"""By package and class, so that none of them need be installed."""


def blame(error: BaseException) -> OutcomeKind:
    """Name the outcome of an attempt whose agent raised `error`.

    `infrastructure` where it, or what it was raised from, is an InfrastructureError, a broken connection, or an HTTP
    status that blames the server (408, 429, 5xx); of an exception group every member must be. Else `failed`.
    """
    if members := group_members(error):
        return "infrastructure" if all(blame(member) == "infrastructure" for member in members) else "failed"
    return "infrastructure" if any(_is_fault(cause) for cause in _causes(error)) else "failed"


def group_members(error: BaseException) -> tuple[BaseException, ...]:
    """Give the members of an exception group, none for any other error."""
    return cast("tuple[BaseException, ...]", error.exceptions) if isinstance(error, BaseExceptionGroup) else ()


def is_fault_status(status: int) -> bool:
    """Tell whether an HTTP status blames the server or its load, and not the request."""
    return status in (408, 429) or status >= 500


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, InfrastructureError | ConnectionError):
        return True
    if any(f"{c.__module__.partition('.')[0]}.{c.__name__}" in BROKEN_CONNECTIONS for c in type(error).__mro__):
        return True
    # The OpenAI and Anthropic SDKs have the status on the error, httpx and requests on its response.
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and is_fault_status(status)
