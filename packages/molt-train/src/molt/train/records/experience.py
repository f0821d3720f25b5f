"""Stage 5, experience: a segment split into light fields that travel and a payload that stays where it was made."""

from typing import Any, Protocol, Self

import msgspec
import numpy as np


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """The heavy arrays of a segment, all of length T (its tokens)."""

    token_ids: np.ndarray
    """int32 [T]"""
    action_mask: np.ndarray
    """bool [T]: sampled by the policy and trained in this segment"""
    logprobs: np.ndarray
    """float32 [T]: behaviour log-prob of the token, 0 where not an action"""
    versions: np.ndarray
    """int32 [T]: policy version that sampled the token, -1 where not an action"""


class PayloadStore(Protocol):
    """Where payloads lie between the process that produced them and the trainer rank that was assigned them."""

    def put(self, payload: Payload) -> Any:
        """Store a payload; returns the reference that an `Experience` carries. It stays as long as a reference does."""
        ...

    def get(self, ref: Any) -> Payload:
        """The payload behind a reference that `put` gave. Raises PayloadLostError when it is gone all the same."""
        ...


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """Light fields of one trained segment, and where its payload is."""

    segment_id: str
    rollout_id: str
    group_id: str
    num_tokens: int
    num_actions: int
    oldest_version: int
    newest_version: int
    mean_version: float
    """Mean over the action tokens."""
    payload: Any
    """What the payload store gave for it: a Ray object reference on a run, the payload itself in unit tests."""

    @classmethod
    def offload(cls, payload: Payload, store: PayloadStore, *, segment_id: str, rollout_id: str, group_id: str) -> Self:
        """Leave `payload` in `store`, and keep its light fields and the reference.

        Raises:
            ValueError: The payload has no action tokens.
        """
        versions = payload.versions[payload.action_mask]
        if not len(versions):
            raise ValueError(f"segment {segment_id!r} has no action tokens; only trained segments become experiences")
        return cls(
            segment_id=segment_id,
            rollout_id=rollout_id,
            group_id=group_id,
            num_tokens=len(payload.token_ids),
            num_actions=len(versions),
            oldest_version=int(versions.min()),
            newest_version=int(versions.max()),
            mean_version=float(versions.mean(dtype=np.float64)),
            payload=store.put(payload),
        )

    def reload(self, store: PayloadStore) -> Payload:
        """Fetch the payload from `store`. Raises PayloadLostError when it is gone."""
        return store.get(self.payload)
