"""What an engine's worker says of the weights that it was sent, with a stand-in for vLLM's layerwise reload."""

import importlib
import socket
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import pytest
import torch

from molt.train.refit.digest import digest
from molt.train.refit.gloo_group import GlooGroup

Init, Update = TypeVar("Init"), TypeVar("Update")


class Base(Generic[Init, Update]):
    """Stands for vLLM's WeightTransferEngine, and for its nccl engine."""

    def __init__(self, model):
        self.model, self.model_config = model, None
        self.parallel_config = SimpleNamespace(rank=0)


class Embedding(torch.nn.Embedding):
    """Stands for VocabParallelEmbedding."""


class Head(Embedding):
    """Stands for ParallelLMHead."""

    quant_method = SimpleNamespace(process_weights_after_loading=lambda head: None)


class Attention(torch.nn.Module):
    """Its scales are no weights of the checkpoint."""


class Info:
    """Stands for LayerReloadingInfo: `sent` of `total` elements have come; None: the layer was put together."""

    def __init__(self, sent=None, *, total=4, kernel=()):
        self.load_numel, self.load_numel_total = sent or 0, None if sent is None else total
        self.kernel_tensors = ({str(i): tensor for i, tensor in enumerate(kernel)}, {})

    def can_load(self):
        return self.load_numel_total is not None


class Model(torch.nn.Module):
    """As vLLM has it on a CPU: a norm and embeddings as they were sent, a linear layer packed, a head that is tied."""

    def __init__(self):
        super().__init__()
        self.embed = Embedding(2, 2)
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.packed = torch.nn.Linear(2, 2, bias=False)
        self.packed.weight = torch.nn.Parameter(torch.empty(0))
        self.also_packed = torch.nn.Linear(2, 2, bias=False)
        self.also_packed.weight = torch.nn.Parameter(torch.empty(0))
        self.attention = Attention()
        self.attention.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
        self.rotary = torch.nn.Module()
        self.head = Head(2, 2)
        self.head.weight = self.embed.weight
        self.loaded = {}

    def load_weights(self, weights):
        self.loaded |= {name: weight.clone() for name, weight in weights}


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def infos(model):
    """How far the reload of each layer is: all were sent all, but those that are sent nothing of their own."""
    held = [model.embed.weight]
    return {
        model.head: Info(0, kernel=held),
        model.attention: Info(0, kernel=[model.attention.scale]),
        model.rotary: Info(0, total=8),
    }


@pytest.fixture
def receivers(monkeypatch, infos):
    """The module, on top of stand-ins for vLLM."""
    contents = {
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda name, cls: None)
        },
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Base,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.nccl_engine": {
            "NCCLWeightTransferEngine": Base,
            "NCCLWeightTransferUpdateInfo": object,
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": Embedding,
            "ParallelLMHead": Head,
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": lambda layer: infos.get(layer, Info()),
            "is_deferred_attention_layer": lambda layer: isinstance(layer, Attention),
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "molt.train.refit.receivers", raising=False)
    module = importlib.import_module("molt.train.refit.receivers")
    yield module
    sys.modules.pop("molt.train.refit.receivers")


@pytest.fixture
def receiver(receivers, model):
    receiver = receivers.GlooReceiver(model)
    receiver.begin()
    return receiver


def test_a_model_that_was_sent_all_its_weights_is_complete(receiver):
    receiver.check_complete()


@pytest.mark.parametrize("sent", [0, 3])
@pytest.mark.parametrize("name", ["norm", "packed"])
def test_a_layer_that_was_sent_nothing_or_a_part_is_named(receiver, model, infos, name, sent):
    """vLLM would put the old weights back, or what lay in memory. One that is packed has an empty weight, as others."""
    layer = getattr(model, name)
    infos[layer] = Info(sent, kernel=[layer.weight])
    with pytest.raises(RuntimeError, match=rf"not sent all of their weights \(1\): {name}$"):
        receiver.check_complete()


def test_the_padding_of_a_vocabulary_is_sent_by_nobody(receiver, model, infos):
    infos[model.embed] = Info(3, kernel=[model.embed.weight])
    receiver.check_complete()
    infos[model.embed] = Info(0, kernel=[model.embed.weight])
    with pytest.raises(RuntimeError, match=r"\(2\): embed, head$"):
        receiver.check_complete()


def test_a_head_of_its_own_needs_weights_of_its_own(receiver, model, infos):
    model.head.weight = torch.nn.Parameter(torch.zeros(2, 2))
    infos[model.head] = Info(0, kernel=[model.head.weight])
    with pytest.raises(RuntimeError, match=r"\(1\): head$"):
        receiver.check_complete()


@pytest.mark.parametrize("level", ["sample", "full"])
def test_what_the_model_holds_as_it_was_sent_is_looked_at_in_the_model_and_the_rest_as_it_came(receiver, model, level):
    sent = {"norm.weight": torch.randn(4), "packed.weight": torch.randn(2, 2), "embed.weight": torch.randn(2, 2).half()}
    receiver.level = level
    with receiver.inspecting():
        model.load_weights(sent.items())
    assert model.loaded.keys() == sent.keys()
    with torch.no_grad():
        model.norm.weight.copy_(sent["norm.weight"])
        model.embed.weight.copy_(sent["embed.weight"])  # in a type of its own
    expected = {name: digest(weight, level) for name, weight in sent.items()}
    assert receiver.digests() == expected
    with torch.no_grad():
        model.norm.weight[2] += 1
    assert receiver.digests() == expected | {"norm.weight": digest(model.norm.weight, level)}
    model.load_weights([("norm.weight", torch.zeros(4))])
    assert receiver.digests()["packed.weight"] == expected["packed.weight"], "nothing is noted outside the block"
    receiver.begin()
    assert receiver.digests() == {}


def test_a_worker_joins_in_the_background_and_receives_what_is_broadcast(receivers, receiver, model):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    receiver.init_transfer_engine(
        receivers.GlooInitInfo(host="127.0.0.1", port=port, world_size=2, timeout_s=30.0, rank_offset=1)
    )
    assert not receiver.joined(), "the other member is not there yet"
    sender = GlooGroup(host="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=30.0)
    weights = {"norm.weight": torch.randn(4), "packed.weight": torch.randn(2, 2)}
    sending = threading.Thread(target=lambda: [sender.broadcast(weight) for weight in weights.values()])
    sending.start()
    receiver.start_weight_update()
    receiver.receive_weights(
        receivers.GlooUpdateInfo(
            names=[*weights], dtype_names=["float32"] * 2, shapes=[list(weight.shape) for weight in weights.values()]
        )
    )
    sending.join()
    receiver.finish_weight_update()
    assert receiver.joined()
    assert all(torch.equal(model.loaded[name], weight) for name, weight in weights.items())
    assert receiver.digests()["packed.weight"] == digest(weights["packed.weight"], "sample")


def test_a_group_that_does_not_form_is_told_to_who_asks(receivers, receiver):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    receiver.init_transfer_engine(
        receivers.GlooInitInfo(host="127.0.0.1", port=port, world_size=2, timeout_s=0.2, rank_offset=1)
    )
    receiver._joining.exception(30)
    with pytest.raises(Exception, match=r"(?i)time|connect"):
        receiver.joined()
