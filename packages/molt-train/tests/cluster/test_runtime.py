"""The Ray runtime's own odds and ends; starting it belongs to the integration tests."""

import socket

from molt.train.cluster import runtime
from molt.train.cluster.runtime import ray_runtime


def stand_in(monkeypatch, calls, *, write_logs=False):
    def init(**options):
        calls.append(("init", options))
        if write_logs:
            logs = runtime.Path(options["_temp_dir"]) / "session_2026" / "logs"
            logs.mkdir(parents=True)
            (logs / "worker-1.err").write_text("a traceback")
            (logs / "worker-1.out").touch()
            (logs / "raylet.out").write_text("noise")

    monkeypatch.setattr(runtime.ray, "init", init)
    monkeypatch.setattr(runtime.ray, "shutdown", lambda: calls.append(("shutdown",)))


def test_a_local_cluster_leaves_its_actors_output_and_nothing_else(monkeypatch, tmp_path):
    calls = []
    stand_in(monkeypatch, calls, write_logs=True)
    with ray_runtime(address="", logs=tmp_path / "logs"):
        ((_, options),) = calls
        folder = runtime.Path(options["_temp_dir"])
        assert folder.is_dir()
    assert calls[-1] == ("shutdown",)
    assert [(file.name, file.read_text()) for file in (tmp_path / "logs").iterdir()] == [
        ("worker-1.err", "a traceback")
    ]
    assert not folder.exists()
    assert (options["address"], options["include_dashboard"]) == ("local", False)


def test_a_cluster_by_address_is_joined_and_left_alone(monkeypatch, tmp_path):
    calls = []
    stand_in(monkeypatch, calls)
    with ray_runtime(address="10.0.0.1:6379", logs=tmp_path / "logs"):
        pass
    assert calls == [
        ("init", {"address": "10.0.0.1:6379", "log_to_driver": False, "configure_logging": False}),
        ("shutdown",),
    ]
    assert not (tmp_path / "logs").exists()


def test_a_rendezvous_is_at_a_port_that_nobody_holds(monkeypatch):
    monkeypatch.setattr(runtime.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    host, port = runtime.node_address()
    assert host == "127.0.0.1"
    with socket.socket() as sock:
        sock.bind((host, port))


def test_gpus_are_those_of_the_cluster(monkeypatch):
    monkeypatch.setattr(runtime.ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    assert runtime.num_gpus() == 2
    monkeypatch.setattr(runtime.ray, "cluster_resources", lambda: {"CPU": 4.0})
    assert runtime.num_gpus() == 0
