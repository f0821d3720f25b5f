"""Stage 5, experience: a trained segment becomes light fields that travel and a payload that stays where it was made.

    Segment --to_payload--> Payload --Experience.offload--> Experience --(queue, window, rank)--> Experience.reload

Between `offload` and `reload` only the reference moves: what the pool, the controller and a window hold of a segment
has one size, however long the segment is. The payload goes when the last reference does, which is when its window has
been trained; until then the ledger can make it again.
"""

from collections.abc import Sequence

import numpy as np

from molt.train.records.experience import Experience, Payload, PayloadStore
from molt.train.records.trajectory import Segment


class LocalPayloadStore:
    """A store for one process: the reference is the payload itself."""

    def put(self, payload: Payload) -> Payload:
        """Gives the payload back as its own reference."""
        return payload

    def get(self, ref: Payload) -> Payload:
        """Gives the payload back."""
        return ref


def to_payload(segment: Segment) -> Payload:
    """The arrays of a segment, all [T]. Log-probs are 0 and versions -1 wherever the segment trains nothing."""
    action_mask = np.asarray(segment.action_mask, dtype=bool)
    versions = np.asarray([-1 if version is None else version for version in segment.versions], dtype=np.int32)
    return Payload(
        token_ids=np.asarray(segment.token_ids, dtype=np.int32),
        action_mask=action_mask,
        logprobs=np.where(action_mask, np.asarray(segment.logprobs, dtype=np.float32), np.float32(0)),
        versions=np.where(action_mask, versions, np.int32(-1)),
    )


def offload_trained(
    segments: Sequence[Segment], store: PayloadStore, *, rollout_id: str, group_id: str
) -> tuple[Experience, ...]:
    """The experiences of those of a rollout's segments that are trained, in order, with their payloads in `store`.

    Raises:
        ValueError: A segment that is said to be trained has no action tokens.
    """
    return tuple(
        Experience.offload(
            to_payload(segment), store, segment_id=segment.segment_id, rollout_id=rollout_id, group_id=group_id
        )
        for segment in segments
        if segment.trained
    )
