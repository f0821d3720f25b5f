"""A gloo process group of its own, apart from the default one: rank 0 sends weights, the others receive them."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore


class GlooGroup:
    """Broadcast from rank 0 between processes that share no default process group.

    The interface of gloo is the one named by GLOO_SOCKET_IFNAME, which must be set where hosts differ.
    """

    def __init__(self, *, host: str, port: int, rank: int, world_size: int, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(self._store, rank, world_size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send (rank 0) or receive (others) `tensor`, in place; it must be contiguous and on the CPU."""
        self.begin_broadcast(tensor)()

    def begin_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """The same, under way: what is returned waits for its end. Raises RuntimeError there if a member is gone."""
        return self._group.broadcast(tensor, 0).wait
