"""Stage 5, experience: a segment split into light fields that travel and a payload that stays where it was made."""

from typing import Any

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
    """What the payload store gave for it (a Ray object reference on a run, the payload itself in unit tests)."""
