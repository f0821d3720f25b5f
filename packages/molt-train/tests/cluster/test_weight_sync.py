"""What rank 0 of the actor calls on the engines during a refit."""

from types import SimpleNamespace

import pytest

from molt.train.cluster import weight_sync as module
from molt.train.cluster.weight_sync import RayWeightSync
from molt.train.records.refit import Interrupted


class Engine:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda **kwargs: self.calls.append((name, kwargs)) or name)


@pytest.fixture
def waits(monkeypatch):
    """What was waited for, and how long at most. Every engine answers what `answers` has for the method."""
    seen = []

    def get(calls, timeout):
        seen.append((calls, timeout))
        return [ANSWERS.get(name) for name in calls]

    monkeypatch.setattr(module.ray, "get", get)
    return seen


ANSWERS = {"weight_digests": [{"w": "a"}, {"w": "b"}], "serve": Interrupted(held=1, anew=2)}


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


def test_a_refit_reaches_every_engine_and_announces_the_version_at_the_end(client, engines, waits):
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update("the version that a sender of vLLM names is not ours")
    assert client.weight_digests() == [{"w": "a"}, {"w": "b"}] * 3
    assert client.serve(8) == Interrupted(held=3, anew=6)
    for engine in engines:
        assert engine.calls == [
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"names": ["w"]}}),
            ("finish_weight_update", {}),
            ("weight_digests", {}),
            ("serve", {"version": 8}),
        ]
    names = ("start_weight_update", "update_weights", "finish_weight_update", "weight_digests", "serve")
    assert waits == [([name] * 3, 60.0) for name in names]
