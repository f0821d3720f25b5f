"""Model calls that end in an error, said once; each wire has its own status, type and body for a kind."""

import re
from typing import Literal

from molt.train.errors import MoltError

ErrorKind = Literal[
    "invalid_request",
    "prompt_too_long",
    "authentication",
    "not_found",
    "method_not_allowed",
    "timeout",
    "closed",
    "too_large",
    "unsupported_media",
    "headers_too_large",
    "engine",
    "not_implemented",
    "overloaded",
]

RETRY_AFTER_S = 1
"""What an overloaded reply asks clients to wait."""
MAX_MESSAGE, MAX_PARAM = 600, 120
"""Characters: as UTF-8, or escaped, both stay under 4 KB in every wire's body."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")


class CallError(MoltError):
    """A model call refused or failed, as its client is told.

    `param` is the path of the field at fault in the request's body, such as `messages[0].content[1]`. Both are cut in
    their middle where they quote more of the request than fits an error's body.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        allow: str | None = None,
        code: str | None = None,
    ) -> None:
        """Take the message.

        `allow` is the method that the route serves, where another was used; `code` is what OpenAI's wires name the
        error, where it has a name of its own among those of its kind.
        """
        message = shortened(message, MAX_MESSAGE)
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.param = param and shortened(param, MAX_PARAM)
        self.allow = allow
        self.code = code

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the status asks for, and what tells the clients' SDKs whether to try again."""
        if self.kind == "overloaded":
            return [(b"retry-after", b"%d" % RETRY_AFTER_S)]
        if self.kind == "authentication":
            return [(b"www-authenticate", b"Bearer")]
        if self.allow is not None:
            return [(b"allow", self.allow.encode())]
        return [(b"x-should-retry", b"false")] if self.kind == "closed" else []


def shortened(text: str, limit: int) -> str:
    """A text that may quote what a client sent: on one line, and at the most `limit` characters, its two ends."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3 - 5]} ... {text[-(limit // 3) :]}"
    return _CONTROL.sub(" ", text)
