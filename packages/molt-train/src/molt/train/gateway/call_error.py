"""Model calls that end in an error, said once; each wire has its own status, type and body for a kind."""

from typing import Literal

from molt.train.errors import MoltError

ErrorKind = Literal[
    "invalid_request",
    "prompt_too_long",
    "authentication",
    "not_found",
    "method_not_allowed",
    "closed",
    "too_large",
    "unsupported_media",
    "engine",
    "overloaded",
]

RETRY_AFTER_S = 1
"""What an overloaded reply asks clients to wait."""


class CallError(MoltError):
    """A model call refused or failed, as its client is told.

    `param` is the path of the field at fault in the request's body, such as `messages[0].content[1]`.
    """

    def __init__(self, kind: ErrorKind, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.param = param

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What tells the clients' SDKs whether to try again."""
        if self.kind == "overloaded":
            return [(b"retry-after", b"%d" % RETRY_AFTER_S)]
        return [(b"x-should-retry", b"false")] if self.kind == "closed" else []
