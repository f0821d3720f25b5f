"""Images of requests: their bytes come inside the request, are checked, and are never fetched or decompressed.

The served model reads text only, so every wire ends at `refuse_url` or `refuse_base64`: a client is told of an image
that the model cannot see, and of a broken one what is wrong with it.
"""

import base64
import re
from typing import NoReturn

import msgspec

from molt.train.gateway.call_error import CallError

MAX_IMAGE_BYTES = 20 * 1024 * 1024
"""Of one image, decoded."""

_MAX_ENCODED = (MAX_IMAGE_BYTES + 2) // 3 * 4

_SIGNATURES = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*?)(;base64)?,", re.IGNORECASE)
_FORM = "data:image/png;base64,..."
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31}):")


class Image(msgspec.Struct, frozen=True):
    """An image as it was sent: of a known type, still compressed."""

    media_type: str
    data: bytes


def image_of_url(url: str, where: str) -> Image:
    """The image inside a data URL; `where` is the path of the URL in the request.

    Raises:
        CallError: The URL is no data URL in base64 (nothing is fetched, whatever the scheme), or its image is broken.
    """
    head = _DATA_URL.match(url)
    if head and head[3]:
        return image_of_base64(url[head.end() :], head[1].lower(), where)
    scheme = _SCHEME.match(url)
    if scheme and scheme[1].lower() == "data":
        message = f"the data URL is not of the form {_FORM}"
    else:
        named = f"a URL of scheme {scheme[1].lower()!r}" if scheme else "what is no URL"
        message = f"{named} is not fetched: send the image itself, as a data URL of the form {_FORM}"
    raise CallError("invalid_request", message, param=where)


def image_of_base64(data: str, media_type: str, where: str) -> Image:
    """The image that `data` is in base64; `where` is the path of `data` in the request.

    Raises:
        CallError: The type is none that is read, the base64 is wrong, the image is longer than `MAX_IMAGE_BYTES`, or
            does not begin as its type does.
    """
    signature = _SIGNATURES.get(media_type)
    if signature is None:
        message = f"the media type {media_type[:64]!r} is not read: use {', '.join(_SIGNATURES)}"
        raise CallError("invalid_request", message, param=where)
    decoded = b""
    if len(data) <= _MAX_ENCODED:
        try:
            decoded = base64.b64decode(data, validate=True)
        except ValueError as error:
            raise CallError("invalid_request", f"the image is not valid base64: {error}", param=where) from None
    if len(data) > _MAX_ENCODED or len(decoded) > MAX_IMAGE_BYTES:
        message = f"the image is longer than {MAX_IMAGE_BYTES} bytes: send a smaller one"
        raise CallError("invalid_request", message, param=where)
    if not signature.match(decoded):
        message = f"the image does not begin as {media_type} does: give the type that it has"
        raise CallError("invalid_request", message, param=where)
    return Image(media_type, decoded)


def refuse_url(url: str, where: str) -> NoReturn:
    """Refuse the image at `url`, for what is wrong with it, else since no image is read. Raises CallError."""
    image_of_url(url, where)
    refuse_image(where)


def refuse_base64(data: str, media_type: str, where: str) -> NoReturn:
    """Refuse the image in `data`, for what is wrong with it, else since no image is read. Raises CallError."""
    image_of_base64(data, media_type, where)
    refuse_image(where)


def refuse_image(where: str) -> NoReturn:
    """Refuse an image, however it is given. Raises CallError."""
    raise CallError("invalid_request", "the model reads text only, not images: leave the image out", param=where)
