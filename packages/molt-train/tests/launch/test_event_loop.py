import resource

import pytest

from molt.train.launch.event_loop import run

LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture
def file_limit():
    before = resource.getrlimit(LIMIT)
    yield before
    resource.setrlimit(LIMIT, before)


async def limits():
    return resource.getrlimit(LIMIT)


def test_a_serving_process_may_have_a_file_for_every_connection(file_limit):
    _, hard = file_limit
    resource.setrlimit(LIMIT, (256, hard))
    most = 1024 * 1024
    assert run(limits()) == (most if hard == resource.RLIM_INFINITY else min(hard, most), hard)


def test_a_limit_that_is_higher_already_is_left(file_limit, monkeypatch):
    monkeypatch.setattr("molt.train.launch.event_loop._MAX_FILES", 256)
    assert run(limits()) == file_limit
