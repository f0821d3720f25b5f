"""Payloads in Ray's object store, with a stand-in for Ray: who owns what, and how a loss is called."""

import pickle
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError

from molt.train.cluster import payloads as module
from molt.train.cluster.payloads import RayPayloadStore
from molt.train.errors import PayloadLostError


class Keeper:
    def __init__(self):
        self.kept = []
        self.keep = SimpleNamespace(remote=self._keep)

    def _keep(self, payload):
        self.kept.append(payload)
        return [f"kept {payload}"]


@pytest.fixture
def fake_ray(monkeypatch):
    """A process on node `n1`; `process` is its name, `fault` what fetching raises."""
    state = SimpleNamespace(process="driver", node="n1", fault=None, put=[])

    def get(ref, timeout):
        assert timeout == module.GET_TIMEOUT_S
        if state.fault is not None:
            raise state.fault
        return ref

    context = SimpleNamespace(get_worker_id=lambda: state.process, get_node_id=lambda: state.node)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module.ray, "put", lambda payload: state.put.append(payload) or f"put {payload}")
    monkeypatch.setattr(module.ray, "get", get)
    return state


def test_the_process_that_made_the_store_owns_what_it_puts(fake_ray):
    keeper = Keeper()
    assert RayPayloadStore({"n1": keeper}).put("p") == "put p"
    assert keeper.kept == []


def test_what_another_process_puts_belongs_to_the_keeper_of_its_node(fake_ray):
    keepers = {"n1": Keeper(), "n2": Keeper()}
    store = RayPayloadStore(keepers)
    fake_ray.process, fake_ray.node = "a worker", "n2"
    assert store.put("p") == "kept p"
    assert (fake_ray.put, keepers["n1"].kept, keepers["n2"].kept) == ([], [], ["p"])


def test_without_a_keeper_another_process_may_read_and_not_put(fake_ray):
    store = pickle.loads(pickle.dumps(RayPayloadStore()))
    fake_ray.process = "a rank"
    assert store.get("ref") == "ref"
    with pytest.raises(RuntimeError, match="may die before the run does"):
        store.put("p")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ObjectLostError("00", ("",), ""), "gone from the object store: ObjectLostError"),
        (OwnerDiedError("00", ("",), ""), "gone from the object store: OwnerDiedError"),
        (GetTimeoutError("late"), "did not arrive within 60 s"),
    ],
)
def test_a_payload_that_cannot_be_had_is_lost(fake_ray, fault, message):
    fake_ray.fault = fault
    with pytest.raises(PayloadLostError, match=message):
        RayPayloadStore().get("ref")
