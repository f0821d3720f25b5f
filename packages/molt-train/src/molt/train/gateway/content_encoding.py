"""Compressed request bodies, unpacked within a limit: Codex and Claude Code offer gzip and zstd."""

import sys
import zlib
from collections.abc import Callable
from typing import Protocol

from molt.train.gateway.call_error import CallError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

IDENTITY = b"identity"
_GZIP_WINDOW = 31
"""zlib's: the largest window, behind a gzip header."""
_ZSTD_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
"""8 MiB, the most that RFC 9659 lets a content coding ask its reader to hold."""


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


_DECODERS: dict[bytes, Callable[[], _Decoder]] = {
    b"gzip": lambda: zlib.decompressobj(_GZIP_WINDOW),
    b"x-gzip": lambda: zlib.decompressobj(_GZIP_WINDOW),
    b"zstd": lambda: zstd.ZstdDecompressor(options=_ZSTD_WINDOW),
}


def normalise(content_encoding: bytes) -> bytes:
    """The one coding of a body, in lower case.

    Raises:
        CallError: It is none that is read here.
    """
    coding = content_encoding.strip().lower() or IDENTITY
    if coding != IDENTITY and coding not in _DECODERS:
        message = f"content-encoding {coding.decode('latin-1')!r} is not accepted: use gzip, zstd or none"
        raise CallError("unsupported_media", message)
    return coding


def unpack(body: bytes, coding: bytes, max_bytes: int) -> bytes:
    """The body that `coding` packed. A few bytes can stand for gigabytes: it stops once there are over `max_bytes`.

    Raises:
        CallError: The body is no whole `coding` stream, or more than one, or longer than `max_bytes`.
    """
    decoder = _DECODERS[coding]()
    try:
        unpacked = decoder.decompress(body, max_bytes + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise CallError("invalid_request", f"the body is not {coding.decode()}: {error}") from None
    if len(unpacked) > max_bytes:
        raise too_large(max_bytes)
    if not decoder.eof or decoder.unused_data:
        raise CallError("invalid_request", f"the body is not one whole {coding.decode()} stream")
    return unpacked


def too_large(max_bytes: int) -> CallError:
    """What a body is refused with that is longer than the limit, packed or unpacked."""
    return CallError("too_large", f"the body is longer than {max_bytes} bytes (gateway.max_body_bytes)")
