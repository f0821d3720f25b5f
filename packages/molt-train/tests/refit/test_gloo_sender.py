"""A refit over gloo between threads: every weight arrives whole, in order, between the engines' start and finish."""

import socket
import threading

import pytest
import torch

from molt.train.errors import RunError
from molt.train.refit.gloo_group import GlooGroup
from molt.train.refit.sender import GlooSender, make_sender


class Engines:
    """Two engines' workers: ranks 1 and 2 of the group, each a thread while it has something to do."""

    def __init__(self, *, fault=None):
        self.log, self.groups, self.received = [], {}, {1: {}, 2: {}}
        self.fault = fault

    def _on_all(self, work):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def init_weight_transfer_engine(self, init_info):
        def join(rank):
            self.groups[rank] = GlooGroup(
                host=init_info["host"],
                port=init_info["port"],
                rank=rank,
                world_size=init_info["world_size"],
                timeout_s=init_info["timeout_s"],
            )

        self._on_all(join)

    def start_weight_update(self):
        self.log.append("start")

    def update_weights(self, update_info):
        self.log.append(list(update_info["names"]))

        def receive(rank):
            columns = (update_info["names"], update_info["dtype_names"], update_info["shapes"])
            for name, dtype, shape in zip(*columns, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.groups[rank].broadcast(weight)
                self.received[rank][name] = weight

        self._on_all(receive)
        if self.fault:
            raise self.fault

    def finish_weight_update(self, weight_version=None):
        self.log.append("finish")


class Sharded:
    """A parameter of which this rank holds a part: `full_tensor` gathers it, which all ranks must do together."""

    dtype, shape = torch.float32, (2, 2)

    def __init__(self):
        self.num_gathered = 0

    def full_tensor(self):
        self.num_gathered += 1
        return torch.full((2, 2), 7.0)


@pytest.fixture
def init():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    return {"host": "127.0.0.1", "port": port, "world_size": 3, "timeout_s": 30.0}


@pytest.fixture
def model():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model[0].weight.data = torch.arange(6.0).reshape(3, 2).t()  # not contiguous in memory
    model[1].to(torch.bfloat16)
    return model


def test_every_weight_reaches_every_worker_bit_for_bit(model, init):
    engines = Engines()
    sender = GlooSender(model, rank=0, init=init, client=engines)
    sender.send_weights()
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert engines.log == ["start", names, "finish"]
    for received in engines.received.values():
        assert list(received) == names
        for name, weight in model.named_parameters():
            assert received[name].dtype == weight.dtype
            assert torch.equal(received[name], weight)


def test_a_second_refit_sends_the_weights_as_they_are_then(model, init):
    engines = Engines()
    sender = GlooSender(model, rank=0, init=init, client=engines)
    sender.send_weights()
    with torch.no_grad():
        model[0].weight += 1
    sender.send_weights()
    assert torch.equal(engines.received[2]["0.weight"], model[0].weight)
    assert engines.log.count("finish") == 2


def test_sharded_weights_are_gathered_first(model, init, monkeypatch):
    sharded = Sharded()
    monkeypatch.setattr(model, "named_parameters", lambda: [("w", sharded)])
    engines = Engines()
    GlooSender(model, rank=0, init=init, client=engines).send_weights()
    assert torch.equal(engines.received[1]["w"], torch.full((2, 2), 7.0))
    assert sharded.num_gathered == 1


def test_other_ranks_gather_along_and_talk_to_nobody(model, init, monkeypatch):
    sharded = Sharded()
    monkeypatch.setattr(model, "named_parameters", lambda: [("w", sharded)])
    engines = Engines()
    sender = GlooSender(model, rank=1, init=init, client=engines)
    sender.send_weights()
    assert sharded.num_gathered == 1
    assert (engines.log, engines.groups) == ([], {})


def test_weights_that_did_not_arrive_whole_are_never_announced(model, init):
    engines = Engines(fault=RuntimeError("shape mismatch"))
    sender = GlooSender(model, rank=0, init=init, client=engines)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        sender.send_weights()
    assert "finish" not in engines.log


def test_a_sender_that_has_left_the_group_sends_nothing(model, init):
    engines = Engines()
    sender = GlooSender(model, rank=0, init=init, client=engines)
    sender.shutdown()
    sender.send_weights()
    assert engines.log == []


def test_weights_go_over_gloo_where_the_placement_says_so(model, init):
    assert isinstance(make_sender(model, "gloo", rank=1, init=init, client=Engines()), GlooSender)


@pytest.mark.parametrize("transfer", ["gloo", "nccl"])
def test_a_model_with_names_of_its_own_is_refused(model, init, transfer):
    model.state_dict_adapter = object()
    with pytest.raises(RunError, match="names its parameters otherwise than its checkpoint"):
        make_sender(model, transfer, rank=1, init=init, client=Engines())
