"""The engines' half of a refit: weight-transfer backends that know what they hold.

vLLM imports this module in every worker, as its `worker_extension_cls`, and finds the backends registered.
"""

import ctypes
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from molt.train.refit.digest import Level, digest
from molt.train.refit.gloo_group import GlooGroup

MAX_NAMES = 5
"""Layers that a message names."""
_PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>."""


class _Received(NamedTuple):
    digest: str
    dtype: torch.dtype
    shape: torch.Size


class Inspected:
    """What both backends add to those of vLLM: no weight that did not arrive, or not whole, is served unnoticed.

    vLLM's layerwise reload puts the old weights back where a layer was sent none, with no more than a warning.
    """

    model: torch.nn.Module
    level: Level = "sample"
    """How closely `digests` looks."""
    _received: dict[str, _Received]

    def begin(self) -> None:
        """An update starts."""
        self._received = {}

    @contextmanager
    def inspecting(self) -> Iterator[None]:
        """Note what is loaded in the block."""
        model = cast("Any", self.model)  # nn.Module declares no `load_weights`
        load = model.load_weights

        def noted(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                self._received[name] = _Received(digest(weight, self.level), weight.dtype, weight.shape)
                yield name, weight

        model.load_weights = lambda weights: load(noted(weights))  # hides the method
        try:
            yield
        finally:
            del model.load_weights

    def check_complete(self) -> None:
        """To be called before the reload's end. Raises RuntimeError when some layer was not sent all of its weights."""
        if missing := list(_incomplete_layers(self.model)):
            raise RuntimeError(
                f"layers that were not sent all of their weights ({len(missing)}): {', '.join(missing[:MAX_NAMES])}"
            )

    def digests(self) -> dict[str, str]:
        """Of every weight: as the model holds it, where it holds it under its name as it was sent, else as received."""
        found = {name: received.digest for name, received in self._received.items()}
        for name, held in self.model.named_parameters():
            sent = self._received.get(name)
            if sent is not None and (held.dtype, held.shape) == (sent.dtype, sent.shape):
                found[name] = digest(held, self.level)
        return found


def _incomplete_layers(model: torch.nn.Module) -> Iterator[str]:
    """Layers of a reload under way that still wait for weights of their own."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, is_deferred_attention_layer

    waiting, loaded = [], list[torch.Tensor]()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            loaded += layer.parameters(recurse=False)
            continue
        weights = [*(info.kernel_tensors or ({}, {}))[0].values()]
        if isinstance(layer, VocabParallelEmbedding) and info.load_numel:
            loaded += weights  # what is missing is the padding of the vocabulary
        elif weights and not is_deferred_attention_layer(layer):
            waiting.append((name, weights))
    # Weights that the CPU build has packed are empty: they are at no address.
    places = {weight.data_ptr() for weight in loaded if weight.numel()}
    for name, weights in waiting:
        if not all(weight.data_ptr() in places for weight in weights):  # a tied head has those of the embeddings
            yield name


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the group meets. `rank_offset` is the rank of this engine's first worker."""

    host: str
    port: int
    world_size: int
    timeout_s: float
    rank_offset: int = 1


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What is about to be broadcast, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooReceiver(Inspected, WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives whole weights in checkpoint format, over gloo.

    The CPU build prepacks linear weights, so they are reloaded layer by layer.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _joining: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Begin to join the sender's group; `joined` says when it is done.

        It takes until the last member is there, and the engine goes on sampling meanwhile.
        """
        thread = ThreadPoolExecutor(max_workers=1)
        self._joining = thread.submit(
            GlooGroup,
            host=init_info.host,
            port=init_info.port,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )
        thread.shutdown(wait=False)

    def joined(self) -> bool:
        """Whether the group is whole. Raises what went wrong."""
        return self._joining.done() and self._joining.result() is not None

    def start_weight_update(self) -> None:
        """Take the model apart layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.begin()
        with torch.no_grad():
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load every weight."""
        if self._joining is None:
            raise RuntimeError("weights sent before the transfer group was joined")
        group: GlooGroup = self._joining.result()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast(weight)
                yield name, weight

        with self.inspecting():
            cast("Any", self.model).load_weights(weights())

    def finish_weight_update(self) -> None:
        """Put the model together again."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self.check_complete()
        with torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
            # A head that is tied to the embeddings was sent no weight of its own, so its packed copy is still the old.
            for head in self.model.modules():
                if isinstance(head, ParallelLMHead):
                    head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Leave the group."""
        self._joining = None


class NcclReceiver(Inspected, NCCLWeightTransferEngine):
    """vLLM's own, inspected."""

    def joined(self) -> bool:
        """Whether the group is whole: vLLM's engine returns when it is."""
        return True

    def start_weight_update(self) -> None:
        """Take the model apart layer by layer."""
        self.begin()
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load every weight."""
        with self.inspecting():
            super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        """Put the model together again."""
        self.check_complete()
        super().finish_weight_update()


WeightTransferEngineFactory.register_engine("molt_gloo", GlooReceiver)
WeightTransferEngineFactory.register_engine("molt_nccl", NcclReceiver)


class WorkerExtension:
    """What the engine asks of each of its workers beyond what vLLM has."""

    weight_transfer_engine: Any

    def end_with_parent(self) -> None:
        """Have the kernel end this process with the one that started it, which may be killed, even if this one hangs.

        vLLM's own process, in which a worker that is alone runs, would stay for ever.
        """
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def refit_inspect(self, level: Level) -> None:
        """Look so closely at the weights of later updates."""
        self.weight_transfer_engine.level = level

    def refit_joined(self) -> bool:
        """Whether the transfer group is whole."""
        return self.weight_transfer_engine.joined()

    def refit_digests(self) -> dict[str, str]:
        """Of what this worker holds since the last update."""
        return self.weight_transfer_engine.digests()
