"""Which wire speaks on a path under `/s/`, and whose errors are answered there."""

from collections.abc import Mapping

from molt.train.gateway.call import Dialect
from molt.train.gateway.wires.chat import ChatDialect
from molt.train.gateway.wires.completions import CompletionsDialect
from molt.train.gateway.wires.messages import MessagesDialect
from molt.train.gateway.wires.responses import ResponsesDialect

PREFIX = "/s/"
CHAT, MESSAGES, RESPONSES = ChatDialect(), MessagesDialect(), ResponsesDialect()
WIRES: dict[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/completions": CompletionsDialect(),
}
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
HELLO = "/api/hello"
"""What Claude Code asks, under its base URL, whether it is online (router-for-me/CLIProxyAPI#5905)."""


def split(path: str) -> tuple[str, str]:
    """Session id and route of a path, which is the path that the server decoded: a `%2f` in it separates too."""
    session_id, slash, rest = path.removeprefix(PREFIX).partition("/")
    return session_id, (slash + rest).rstrip("/")


def dialect_of(route: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """The wire of a route; where it belongs to none, the one that the client's headers speak for."""
    if route in WIRES:
        return WIRES[route]
    return MESSAGES if route == COUNT_TOKENS or b"anthropic-version" in headers else CHAT
