"""The trainer's half of a refit.

It speaks the protocol of `vllm.distributed.weight_transfer`, so that the gloo sender and vLLM's own nccl sender are
driven alike; vllm itself is imported for nccl only (it takes ten seconds).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import torch

from molt.train.errors import RunError
from molt.train.refit.gloo_group import GlooGroup

Transfer = Literal["gloo", "nccl"]


class SyncClient(Protocol):
    """The control plane of the engines: each call reaches all of them and returns when all have done it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the sender's group."""
        ...

    def start_weight_update(self) -> None:
        """Hold the requests, and make ready for new weights."""
        ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive what is being sent."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new weights, and let the held requests go on."""
        ...


class WeightSender(Protocol):
    """One rank's end of the transfer. `send_weights` is called on every rank; rank 0 alone talks to the engines."""

    def send_weights(self) -> None:
        """Send every weight to every engine."""
        ...

    def shutdown(self) -> None:
        """Leave the group."""
        ...


def make_sender(
    model: torch.nn.Module, transfer: Transfer, *, rank: int, init: dict[str, Any], client: SyncClient
) -> WeightSender:
    """Rendezvous with the engines' workers: `init` holds `host`, `port`, `world_size` (1 + workers), `timeout_s`.

    Raises RunError for a model whose parameters are not named as in its Hugging Face checkpoint: engines load by name.
    """
    if getattr(model, "state_dict_adapter", None) is not None:
        raise RunError(
            f"{type(model).__name__} names its parameters otherwise than its checkpoint does: no refit of it"
        )
    if transfer == "gloo":
        return GlooSender(model, rank=rank, init=init, client=client)
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(
        master_address=init["host"], master_port=init["port"], world_size=init["world_size"], rank=rank
    )
    return WeightTransferTrainerFactory.trainer_init(init_info=info, client=client, source=ModuleSource(model))


class GlooSender:
    """Broadcasts every weight, whole and in order, over gloo."""

    def __init__(self, model: torch.nn.Module, *, rank: int, init: dict[str, Any], client: SyncClient):
        self._model, self._client = model, client
        self._group: GlooGroup | None = None
        if rank == 0:
            # The workers wait inside the rendezvous, so it must be opened while they are being told of it.
            with ThreadPoolExecutor(max_workers=1) as pool:
                told = pool.submit(client.init_weight_transfer_engine, init)
                self._group = GlooGroup(
                    host=init["host"],
                    port=init["port"],
                    rank=0,
                    world_size=init["world_size"],
                    timeout_s=init["timeout_s"],
                )
                told.result()

    def send_weights(self) -> None:
        """Send them all. Gathering a sharded weight is a collective, so every rank walks the same order."""
        if self._group is None:
            for _ in self._weights():
                pass
            return
        parameters = list(self._model.named_parameters())
        info = {
            "names": [name for name, _ in parameters],
            "dtype_names": [str(p.dtype).removeprefix("torch.") for _, p in parameters],
            "shapes": [list(p.shape) for _, p in parameters],
        }
        self._client.start_weight_update()
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            received = pool.submit(self._client.update_weights, info)
            for _, weight in self._weights():
                self._group.broadcast(weight)
            received.result()
        finally:
            pool.shutdown(wait=False)  # after a failed broadcast the receivers may never answer
        self._client.finish_weight_update()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            full = getattr(parameter, "full_tensor", None)
            weight = full() if full is not None else parameter
            yield name, weight.detach().cpu().contiguous()

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None
