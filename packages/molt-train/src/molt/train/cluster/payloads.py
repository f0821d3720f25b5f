"""The payload store of a run: the Ray object store of the node that produced the payload.

Ray frees what a process has put when that process dies, whoever still refers to it. So what is put has an owner that
lives as long as the run: the process that made the store, and elsewhere a keeper, an actor of that process, one on each
node. A payload thus outlives the process that produced it, on the node where it was made. Should a node be lost with
all that lies there, `get` says so, and the window is made again from the ledger.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from molt.train.errors import PayloadLostError
from molt.train.records.experience import Payload

GET_TIMEOUT_S = 60.0


class RayPayloadStore:
    """Payloads by Ray reference. It can be sent to other processes, which may `get`.

    `put` leaves a payload on this node; `get` fetches it to the node that trains on it, by shared memory if the same.

    Args:
        keepers: By node, who owns what processes other than this one put; see `start_keepers`.
    """

    def __init__(self, keepers: dict[str, Any] | None = None) -> None:
        self._home = _this_process()
        self._keepers = keepers or {}

    def put(self, payload: Payload) -> ray.ObjectRef:
        """Store a payload; it lives as long as the run and a reference to it do.

        Raises:
            RuntimeError: This process did not make the store, and has no keeper on its node.
        """
        if _this_process() == self._home:
            return ray.put(payload)
        node = ray.get_runtime_context().get_node_id()
        if node not in self._keepers:
            raise RuntimeError(
                "a payload must not be put by a process that may die before the run does: put it where the store was "
                "made, or make the store with start_keepers()"
            )
        # In a list: the answer itself belongs to this process, and only what is in it to the keeper.
        return ray.get(self._keepers[node].keep.remote(payload), timeout=GET_TIMEOUT_S)[0]

    def get(self, ref: ray.ObjectRef) -> Payload:
        """The payload behind `ref`.

        Raises:
            PayloadLostError: It is gone, or does not arrive within `GET_TIMEOUT_S`.
        """
        try:
            return ray.get(ref, timeout=GET_TIMEOUT_S)
        except ObjectLostError as error:  # the owner's death and failed fetches are kinds of it
            raise PayloadLostError(f"a payload is gone from the object store: {type(error).__name__}") from None
        except GetTimeoutError:
            raise PayloadLostError(f"a payload did not arrive within {GET_TIMEOUT_S:.0f} s") from None


class _Keeper:
    """Owns payloads that other processes of its node have made."""

    def keep(self, payload: Payload) -> Sequence[ray.ObjectRef]:
        return [ray.put(payload)]


def start_keepers() -> dict[str, Any]:
    """A keeper on every node of the cluster, for a store that other processes put into; they end with this process."""
    remote: Any = ray.remote(_Keeper)  # Ray's types do not follow `remote`
    return {
        node["NodeID"]: remote.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }


def _this_process() -> str:
    return ray.get_runtime_context().get_worker_id()
