"""Stage 5, experience: a trained segment becomes light fields that travel and a payload that stays where it was made.

`PayloadStore.put` is the paper's `offload()` and `get` its `reload()`: between the two only the reference moves.
"""

from typing import Any, Protocol

import numpy as np

from molt.train.records.experience import Experience, Payload
from molt.train.records.trajectory import Segment


class PayloadStore(Protocol):
    """Where payloads lie between the process that produced them and the trainer rank that was assigned them."""

    def put(self, payload: Payload) -> Any:
        """Store a payload; returns the reference that an `Experience` carries."""
        ...

    def get(self, ref: Any) -> Payload:
        """The payload behind a reference that `put` gave."""
        ...


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


def make_experience(segment: Segment, *, rollout_id: str, group_id: str, payload_ref: Any) -> Experience:
    """The light fields of a trained segment, with the reference of its payload.

    Raises:
        ValueError: The segment has no action tokens.
    """
    versions = np.asarray([v for v, m in zip(segment.versions, segment.action_mask, strict=True) if m], dtype=np.int64)
    if not len(versions):
        raise ValueError(
            f"segment {segment.segment_id!r} has no action tokens; only trained segments become experiences"
        )
    return Experience(
        segment_id=segment.segment_id,
        rollout_id=rollout_id,
        group_id=group_id,
        num_tokens=len(segment.token_ids),
        num_actions=len(versions),
        oldest_version=int(versions.min()),
        newest_version=int(versions.max()),
        mean_version=float(versions.mean()),
        payload=payload_ref,
    )
