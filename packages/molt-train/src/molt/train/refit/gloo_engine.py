"""The engines' half of a refit over gloo: a weight-transfer backend for vLLM's CPU build.

vLLM imports this module in every worker, as its `worker_extension_cls`, and finds the backend registered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from molt.train.refit.gloo_group import GlooGroup


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


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives whole weights in checkpoint format.

    The CPU build prepacks linear weights, so they are reloaded layer by layer.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group."""
        self._group = GlooGroup(
            host=init_info.host,
            port=init_info.port,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Take the model apart layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with torch.no_grad():
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load every weight."""
        group = self._group
        if group is None:
            raise RuntimeError("weights sent before the transfer group was joined")

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast(weight)
                yield name, weight

        cast("Any", self.model).load_weights(weights())  # nn.Module declares no such method

    def finish_weight_update(self) -> None:
        """Put the model together again."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
            # A head that is tied to the embeddings was sent no weight of its own, so its packed copy is still the old.
            for head in self.model.modules():
                if isinstance(head, ParallelLMHead):
                    head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


class WorkerExtension:
    """Nothing but the reason why vLLM's workers import this module."""
