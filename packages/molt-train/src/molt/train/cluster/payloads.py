"""The payload store of a run: the Ray object store of the node that produced the payload."""

import ray

from molt.train.records.experience import Payload


class RayPayloadStore:
    """Payloads by Ray reference.

    `put` leaves a payload on this node; `get` fetches it to the node that trains on it, by shared memory if the same.
    """

    def put(self, payload: Payload) -> ray.ObjectRef:
        """Store a payload; it lives as long as a reference to it does."""
        return ray.put(payload)

    def get(self, ref: ray.ObjectRef) -> Payload:
        """The payload behind `ref`."""
        return ray.get(ref, timeout=60)
