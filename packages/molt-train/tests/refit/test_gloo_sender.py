"""A refit over gloo between threads: every weight arrives whole, in order, between the engines' start and finish."""

import contextlib
import socket
import threading
import time

import pytest
import torch

from molt.train.errors import RunError
from molt.train.records.refit import Interrupted
from molt.train.refit.digest import digest
from molt.train.refit.gloo_group import GlooGroup
from molt.train.refit.sender import check_digests, make_refitter


class Engines:
    """Two engines' workers: ranks 1 and 2 of the group, each a thread while it has something to do.

    `fails_in` names a step that fails, `gives_up_after` how many weights they receive before they fail, and `alter`
    what they make of one.
    """

    def __init__(self, *, fails_in=None, gives_up_after=None, alter=None):
        self.log, self.groups, self.received = [], {}, {1: {}, 2: {}}
        self.fails_in, self.gives_up_after, self.alter = fails_in, gives_up_after, alter or {}

    def _step(self, step):
        self.log.append(step)
        if step == self.fails_in:
            raise RuntimeError("injected")

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
        self._step("start")

    def update_weights(self, update_info):
        self.log.append(list(update_info["names"]))

        def receive(rank):
            columns = (update_info["names"], update_info["dtype_names"], update_info["shapes"])
            for number, (name, dtype, shape) in enumerate(zip(*columns, strict=True)):
                if number == self.gives_up_after:
                    return
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.groups[rank].broadcast(weight)
                self.received[rank][name] = weight

        self._on_all(receive)
        if self.fails_in == "update" or self.gives_up_after is not None:
            raise RuntimeError("injected")

    def finish_weight_update(self, weight_version=None):
        self._step("finish")

    def weight_digests(self):
        self._step("digests")
        return [
            {name: digest(self.alter.get((rank, name), weight), "sample") for name, weight in received.items()}
            for rank, received in self.received.items()
        ]

    def serve(self, version):
        self._step(f"serve {version}")
        return Interrupted(held=3)


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


@pytest.fixture
def make(model, init):
    """A rank's end of refits, the sender's if not told otherwise."""

    def make_one(engines, *, rank=0):
        return make_refitter(model, "gloo", rank=rank, init=init, client=engines, verify="sample")

    return make_one


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_every_weight_reaches_every_worker_bit_for_bit_before_the_version_is_served(model, make):
    engines = Engines()
    assert make(engines).refit(4) == Interrupted(held=3)
    assert engines.log == ["start", NAMES, "finish", "digests", "serve 4"]
    for received in engines.received.values():
        assert list(received) == NAMES
        for name, weight in model.named_parameters():
            assert received[name].dtype == weight.dtype
            assert torch.equal(received[name], weight)


def test_a_second_refit_sends_the_weights_as_they_are_then(model, make):
    engines = Engines()
    refitter = make(engines)
    refitter.refit(1)
    with torch.no_grad():
        model[0].weight += 1
    refitter.refit(2)
    assert torch.equal(engines.received[2]["0.weight"], model[0].weight)
    assert engines.log[-1] == "serve 2"


def test_sharded_weights_are_gathered_first(model, make, monkeypatch):
    sharded = Sharded()
    monkeypatch.setattr(model, "named_parameters", lambda: [("w", sharded)])
    engines = Engines()
    make(engines).refit(1)
    assert torch.equal(engines.received[1]["w"], torch.full((2, 2), 7.0))
    assert sharded.num_gathered == 1


def test_other_ranks_gather_along_and_talk_to_nobody(model, make, monkeypatch):
    sharded = Sharded()
    monkeypatch.setattr(model, "named_parameters", lambda: [("w", sharded)])
    engines = Engines()
    assert make(engines, rank=1).refit(1) == Interrupted()
    assert sharded.num_gathered == 1
    assert (engines.log, engines.groups) == ([], {})


@pytest.mark.parametrize("step", ["start", "update", "finish", "digests"])
def test_after_a_step_that_failed_no_later_one_is_made(make, step):
    engines = Engines(fails_in=step)
    with pytest.raises(RuntimeError, match="injected"):
        make(engines).refit(1)
    order = ["start", NAMES, "finish", "digests"]
    assert engines.log == order[: 1 + ["start", "update", "finish", "digests"].index(step)]


@pytest.mark.parametrize("step", ["start", "update", "finish"])
def test_a_rank_whose_refit_failed_gathers_every_weight_all_the_same(model, make, monkeypatch, step):
    """The other ranks do, and each is a collective: they would wait for it."""
    sharded = [Sharded() for _ in range(3)]
    monkeypatch.setattr(model, "named_parameters", lambda: [(f"w{i}", weight) for i, weight in enumerate(sharded)])
    with pytest.raises(RuntimeError, match="injected"):
        make(Engines(fails_in=step)).refit(1)
    assert [weight.num_gathered for weight in sharded] == [1, 1, 1]


def test_receivers_that_gave_up_are_not_waited_for(model, make, monkeypatch):
    """They would take the next weight in 30 s or never."""
    sharded = [Sharded() for _ in range(3)]
    monkeypatch.setattr(model, "named_parameters", lambda: [(f"w{i}", weight) for i, weight in enumerate(sharded)])
    refitter = make(engines := Engines(gives_up_after=1))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="injected"):
        refitter.refit(1)
    assert time.monotonic() - started < 15
    assert [weight.num_gathered for weight in sharded] == [1, 1, 1]
    engines.groups.clear()


def test_what_a_worker_does_not_hold_as_it_was_sent_is_named_and_not_served(make):
    altered = {(2, "0.bias"): torch.zeros(2), (2, "1.bias"): torch.ones(2, dtype=torch.bfloat16)}
    engines = Engines(alter=altered)
    with pytest.raises(
        RunError, match=r"worker 1 of the engines does not hold the weights that were sent: 0.bias, 1.b"
    ):
        make(engines).refit(1)
    assert engines.log[-1] == "digests"


def test_the_names_in_the_message_are_few():
    sent = {f"w{i}": "a" for i in range(9)}
    with pytest.raises(RunError, match=r": w0, w1, w2, w3, w4 and 4 more$"):
        check_digests(sent, [sent, {}])
    with pytest.raises(RunError, match=r": odd$"):
        check_digests(sent, [{**sent, "odd": "a"}])
    check_digests(sent, [sent, dict(sent)])


def test_a_sender_that_has_left_the_group_sends_nothing(make):
    engines = Engines()
    refitter = make(engines)
    refitter.shutdown()
    with contextlib.suppress(RunError):
        refitter.refit(1)
    assert "start" not in engines.log
    assert "serve 1" not in engines.log


@pytest.mark.parametrize("transfer", ["gloo", "nccl"])
def test_a_model_with_names_of_its_own_is_refused(model, init, transfer):
    model.state_dict_adapter = object()
    with pytest.raises(RunError, match="names its parameters otherwise than its checkpoint"):
        make_refitter(model, transfer, rank=1, init=init, client=Engines(), verify="sample")
