"""What rank 0 of the actor calls on the engines during a refit."""

from types import SimpleNamespace

import pytest

from molt.train.cluster import weight_sync as module
from molt.train.cluster.weight_sync import RayWeightSync


class Engine:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda **kwargs: self.calls.append((name, kwargs)) or name)


@pytest.fixture
def waits(monkeypatch):
    """What was waited for, and how long at most."""
    seen = []
    monkeypatch.setattr(module.ray, "get", lambda calls, timeout: seen.append((calls, timeout)))
    return seen


@pytest.fixture
def engines():
    return [Engine(), Engine(), Engine()]


@pytest.fixture
def client(engines, waits):
    return RayWeightSync(engines, workers_per_engine=2, timeout_s=60.0)


def test_the_workers_of_the_engines_are_numbered_after_the_sender(client, engines):
    client.init_weight_transfer_engine({"host": "h"})
    assert [engine.calls for engine in engines] == [
        [("init_weight_transfer_engine", {"init_info": {"host": "h", "rank_offset": offset}})] for offset in (1, 3, 5)
    ]


def test_a_refit_reaches_every_engine_and_announces_the_version_that_was_set(client, engines, waits):
    client.version = 8
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    for engine in engines:
        assert engine.calls == [
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"names": ["w"]}}),
            ("finish_weight_update", {"version": 8}),
        ]
    assert waits == [([name] * 3, 60.0) for name in ("start_weight_update", "update_weights", "finish_weight_update")]


def test_the_version_that_a_sender_of_vllm_names_is_not_ours(client, engines):
    client.version = 8
    client.finish_weight_update("step-1")
    assert engines[0].calls == [("finish_weight_update", {"version": 8})]
