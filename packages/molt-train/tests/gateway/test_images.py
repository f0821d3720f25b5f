"""Images on every wire: checked, never fetched, and refused by a model that reads text only; never dropped."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import base64

import pytest

from molt.train.gateway.call_error import CallError
from molt.train.gateway.images import MAX_IMAGE_BYTES, image_of_base64, image_of_url

from .messages_calls import post

HEADS = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff\xe0",
    "image/gif": b"GIF89a",
    "image/webp": b"RIFF\x10\x00\x00\x00WEBPVP8 ",
}
PNG = base64.b64encode(HEADS["image/png"] + b"rest").decode()


def message_of(read, *arguments):
    with pytest.raises(CallError) as caught:
        read(*arguments, "at[0].url")
    assert (caught.value.kind, caught.value.param) == ("invalid_request", "at[0].url")
    return caught.value.message


@pytest.mark.parametrize("media_type", HEADS)
def test_an_image_of_a_known_type_is_read(media_type):
    data = HEADS[media_type] + b"rest"
    encoded = base64.b64encode(data).decode()
    for image in (
        image_of_base64(encoded, media_type, "at"),
        image_of_url(f"data:{media_type};base64,{encoded}", "at"),
        image_of_url(f"DATA:{media_type.upper()};name=a.b;BASE64,{encoded}", "at"),
    ):
        assert (image.media_type, image.data) == (media_type, data)


@pytest.mark.parametrize("scheme", ["http", "https", "HTTPS", "file", "ftp", "gopher", "s3", "javascript"])
def test_no_url_is_fetched_whatever_its_scheme(scheme):
    message = message_of(image_of_url, f"{scheme}://127.0.0.1:1/secret?key=hidden")
    assert f"scheme '{scheme.lower()}' is not fetched" in message
    assert "hidden" not in message


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "no URL is not fetched"),
        ("/etc/passwd", "no URL is not fetched"),
        ("data:image/png;base64", "not of the form data:image/png;base64,..."),
        ("data:image/png,iVBORw0KGgo=", "not of the form data:image/png;base64,..."),
        ("data:;base64,iVBORw0KGgo=", "media type '' is not read"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "media type 'image/svg+xml' is not read"),
        ("data:image/png;base64,iVBORw0K Ggo=", "not valid base64"),
        ("data:image/png;base64,iVBORw0KGgo", "not valid base64"),
        ("data:image/png;base64,", "does not begin as image/png does"),
        ("data:image/jpeg;base64," + PNG, "does not begin as image/jpeg does"),
        ("data:image/png;base64,iVBORw0KGgö=", "not valid base64"),
    ],
)
def test_a_broken_image_says_what_is_wrong(url, said):
    assert said in message_of(image_of_url, url)


def test_an_image_has_a_size_limit_to_the_byte():
    head = HEADS["image/png"]
    largest = base64.b64encode(head + bytes(MAX_IMAGE_BYTES - len(head))).decode()
    assert len(image_of_base64(largest, "image/png", "at").data) == MAX_IMAGE_BYTES
    longer = base64.b64encode(head + bytes(MAX_IMAGE_BYTES - len(head) + 1)).decode()
    assert "longer than" in message_of(image_of_base64, longer, "image/png")


def test_a_long_url_without_an_image_is_refused_in_linear_time():
    assert "not of the form" in message_of(image_of_url, "data:" + ";" * 1_000_000)
    assert "media type 'xxx" in message_of(image_of_base64, PNG, "x" * 1_000_000)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("source", "path", "said"),
    [
        ({"type": "base64", "media_type": "image/png", "data": PNG}, "source.data", "the model reads text only"),
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "source.data", "does not begin as image/png"),
        ({"type": "url", "url": "http://127.0.0.1:1/a.png"}, "source.url", "'http' is not fetched"),
        ({"type": "url", "url": f"data:image/png;base64,{PNG}"}, "source.url", "the model reads text only"),
        ({"type": "file", "file_id": "f"}, "source", "the model reads text only"),
    ],
)
async def test_an_image_in_messages_is_an_error_and_never_dropped(bench, source, path, said):
    """agent-lightning#559: images were dropped in silence, and the model trained on what it had not seen."""
    caller = bench.open()
    image = {"type": "image", "source": source}
    text = {"type": "text", "text": "look"}
    places = {
        "messages[0].content[1]": [text, image],
        "messages[0].content[0].content[1]": [{"type": "tool_result", "tool_use_id": "t", "content": [text, image]}],
        "messages[0].content[0].source.content[0]": [
            {"type": "document", "source": {"type": "content", "content": [image]}}
        ],
    }
    for place, content in places.items():
        for route in ("/v1/messages", "/v1/messages/count_tokens"):
            response = await post(caller, route, messages=[{"role": "user", "content": content}])
            message = response.json()["error"]["message"]
            assert response.status_code == 400
            assert message.startswith(f"{place}.{path}: ")
            assert said in message
    assert (caller.turns, bench.log) == ([], [])


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", "file:///etc/passwd", f"data:image/png;base64,{PNG}"])
async def test_an_image_in_a_chat_completion_is_an_error(bench, url):
    caller = bench.open()
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    response = await caller.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1].image_url.url"
    assert (caller.turns, bench.log) == ([], [])


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", f"data:image/png;base64,{PNG}"])
async def test_an_image_in_a_response_is_an_error(bench, url):
    caller = bench.open()
    content = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": url}]
    response = await caller.post("/v1/responses", {"model": "m", "input": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[0].content[1].image_url"
    assert (caller.turns, bench.log) == ([], [])
