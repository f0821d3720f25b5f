"""Head and body in one write, and never a head that waits for a body that does not come."""

import pytest

from molt.train.server.connection import JoiningTransport


class Transport:
    def __init__(self):
        self.done = []

    def write(self, data):
        self.done.append(data)

    def close(self):
        self.done.append("closed")

    def abort(self):
        self.done.append("aborted")

    def is_closing(self):
        return "closed" in self.done

    def get_write_buffer_size(self):
        return 7


@pytest.fixture
def transport():
    return Transport()


def test_what_is_held_goes_out_with_the_next_write(transport):
    joining = JoiningTransport(transport)
    joining.hold()
    joining.write(b"head ")
    assert transport.done == []
    joining.write(b"body")
    joining.write(b"more")
    assert transport.done == [b"head body", b"more"]


def test_an_empty_body_sends_the_head(transport):
    joining = JoiningTransport(transport)
    joining.hold()
    joining.write(b"head")
    joining.write(b"")
    assert transport.done == [b"head"]


def test_what_is_held_goes_out_before_the_connection_is_closed(transport):
    joining = JoiningTransport(transport)
    joining.hold()
    joining.write(b"refused")
    joining.close()
    assert transport.done == [b"refused", "closed"]


def test_everything_else_is_the_transports_own(transport):
    joining = JoiningTransport(transport)
    joining.abort()
    assert (transport.done, joining.is_closing(), joining.get_write_buffer_size()) == (["aborted"], False, 7)
