"""The trainer's half of a refit.

It speaks the protocol of `vllm.distributed.weight_transfer`, so that the gloo sender and vLLM's own nccl sender are
driven alike; vllm itself is imported for nccl only (it takes ten seconds).

    rank 0                               every engine
    start_weight_update      ------->    hold the generations; take the model apart
    update_weights, weights  ------->    receive, load
    finish_weight_update     ------->    put the model together
    weight_digests           <-------    what it holds; compared with what was sent
    serve                    ------->    announce the version, let the generations go on

An engine that got no `serve` serves nothing. Where any step fails, no later one is made.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Literal, Protocol

import torch

from molt.train.errors import RunError
from molt.train.records.refit import Interrupted
from molt.train.refit.digest import Level, differing, digest
from molt.train.refit.gloo_group import GlooGroup

Transfer = Literal["gloo", "nccl"]
MAX_NAMES = 5
"""Tensors that the message about a mismatch names."""


class SyncClient(Protocol):
    """The control plane of the engines: each call reaches all of them and returns when all have done it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the sender's group."""
        ...

    def start_weight_update(self) -> None:
        """Hold the generations, and make ready for new weights."""
        ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive what is being sent."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the new weights ready. Nothing is sampled from them yet."""
        ...

    def weight_digests(self) -> list[dict[str, str]]:
        """Of what each worker of each engine holds, by name of the weight."""
        ...

    def serve(self, version: int) -> Interrupted:
        """Serve what they hold as `version`, and let the held generations go on."""
        ...


class WeightSender(Protocol):
    """One rank's end of the transfer. `send_weights` is called on every rank; rank 0 alone talks to the engines."""

    def send_weights(self) -> None:
        """Send every weight to every engine."""
        ...

    def shutdown(self) -> None:
        """Leave the group."""
        ...


class Weights:
    """The parameters of a model by name, each gathered whole, which is a collective of all ranks, always in one order.

    `level` says what is remembered of each: None for ranks that only help to gather.
    """

    def __init__(self, model: torch.nn.Module, *, level: Level | None):
        self._model = model
        self._level: Level | None = level
        self._walk: Iterator[tuple[str, torch.Tensor]] | None = None
        self.digests: dict[str, str] = {}
        """Of what the last walk gave."""

    def describe(self) -> dict[str, Any]:
        """What a walk will give: `names`, `dtype_names` and `shapes`, without gathering anything."""
        parameters = list(self._model.named_parameters())
        return {
            "names": [name for name, _ in parameters],
            "dtype_names": [str(parameter.dtype).removeprefix("torch.") for _, parameter in parameters],
            "shapes": [list(parameter.shape) for _, parameter in parameters],
        }

    def begin(self) -> None:
        """Forget the last walk."""
        self._walk = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._walk = self._gather()
        return self._walk

    def finish(self) -> None:
        """Walk to the end, from wherever a failure left the walk: else the other ranks would wait in a collective."""
        for _ in self if self._walk is None else self._walk:
            pass

    def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.digests = {}
        for name, parameter in self._model.named_parameters():
            full = getattr(parameter, "full_tensor", None)
            weight: torch.Tensor = (full() if full is not None else parameter).detach()
            if self._level is not None:
                self.digests[name] = digest(weight, self._level)
            yield name, weight


class Refitter:
    """One rank's end of the refits of one transfer group."""

    def __init__(self, weights: Weights, sender: WeightSender, *, is_sender: bool, client: SyncClient):
        self._weights, self._sender, self._is_sender, self._client = weights, sender, is_sender, client

    def refit(self, version: int) -> Interrupted:
        """Have every engine hold the weights whole, and only then serve them as `version`.

        Raises:
            RunError: An engine does not hold what was sent. Others: an engine failed, or is gone.
        """
        self._weights.begin()
        try:
            self._sender.send_weights()
        except BaseException:
            with suppress(Exception):
                self._weights.finish()
            raise
        if not self._is_sender:
            return Interrupted()
        check_digests(self._weights.digests, self._client.weight_digests())
        return self._client.serve(version)

    def shutdown(self) -> None:
        """Leave the group."""
        self._sender.shutdown()


def check_digests(sent: Mapping[str, str], held: list[dict[str, str]]) -> None:
    """Raise RunError where a worker of an engine does not hold what was sent."""
    for number, of_worker in enumerate(held):
        if names := differing(sent, of_worker):
            listed = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" * (len(names) > MAX_NAMES))
            raise RunError(f"worker {number} of the engines does not hold the weights that were sent: {listed}")


def make_refitter(
    model: torch.nn.Module, transfer: Transfer, *, rank: int, init: dict[str, Any], client: SyncClient, verify: Level
) -> Refitter:
    """Rendezvous with the engines' workers: `init` holds `host`, `port`, `world_size` (1 + workers), `timeout_s`.

    Raises RunError for a model whose parameters are not named as in its Hugging Face checkpoint: engines load by name.
    """
    if getattr(model, "state_dict_adapter", None) is not None:
        raise RunError(
            f"{type(model).__name__} names its parameters otherwise than its checkpoint does: no refit of it"
        )
    weights = Weights(model, level=verify if rank == 0 else None)
    sender: WeightSender
    if transfer == "gloo":
        sender = GlooSender(weights, rank=rank, init=init, client=client)
    else:
        sender = _nccl_sender(model, weights, rank=rank, init=init, client=client)
    return Refitter(weights, sender, is_sender=rank == 0, client=client)


def _nccl_sender(
    model: torch.nn.Module, weights: Weights, *, rank: int, init: dict[str, Any], client: SyncClient
) -> WeightSender:
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Source(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(weights)

    info = NCCLTrainerInitInfo(
        master_address=init["host"], master_port=init["port"], world_size=init["world_size"], rank=rank
    )
    return WeightTransferTrainerFactory.trainer_init(init_info=info, client=client, source=Source(model))


class GlooSender:
    """Broadcasts every weight, whole and in order, over gloo."""

    def __init__(self, weights: Weights, *, rank: int, init: dict[str, Any], client: SyncClient):
        self._weights, self._client = weights, client
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
        group = self._group
        if group is None:
            for _ in self._weights:
                pass
            return
        self._client.start_weight_update()
        pool = ThreadPoolExecutor(max_workers=2)
        try:
            received = pool.submit(self._client.update_weights, self._weights.describe())
            for _, weight in self._weights:
                sent = pool.submit(group.begin_broadcast(weight.cpu().contiguous()))
                _first_failure(sent, received)
            received.result()
        finally:
            pool.shutdown(wait=False)  # after a failed broadcast the receivers may never answer
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


def _first_failure(sent: Future[None], received: Future[None]) -> None:
    """Wait until a weight was sent; raises what the receivers raise, who would not take it then, without waiting."""
    wait((sent, received), return_when=FIRST_COMPLETED)
    if received.done():
        received.result()
    sent.result()
