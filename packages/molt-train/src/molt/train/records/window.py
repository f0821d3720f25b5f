"""Stages 6 to 9, window to step: what the actor ranks are given, and what they report."""

import msgspec
import numpy as np

from molt.train.records.experience import Experience


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One segment to train, with the advantage of each of its action tokens, in order."""

    experience: Experience
    advantages: np.ndarray
    """float32 [num_actions]"""


class Microbatch(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that one forward and backward pass takes together. May be empty, so that all ranks make equal steps."""

    rows: tuple[Row, ...]


class RankWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of an optimizer window."""

    microbatches: tuple[Microbatch, ...]
    num_action_tokens: int
    """Of the whole window, over all ranks."""


class TrainWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer window over all ranks: `ranks[r]` are the microbatches of rank r, equally many on each."""

    step: int
    """The update that this window makes: the first is 1."""
    policy_version: int
    """The version of the weights before the update."""
    ranks: tuple[tuple[Microbatch, ...], ...]
    num_action_tokens: int
    """Action tokens over all ranks and microbatches: the one denominator of the token mean."""

    def share(self, rank: int) -> RankWindow:
        """What `rank` is given of it."""
        return RankWindow(microbatches=self.ranks[rank], num_action_tokens=self.num_action_tokens)


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one update did, reduced over all ranks. Gaps are |recorded - recomputed| log-probs before the update."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    logprob_gap_mean: float
    logprob_gap_max: float
    metrics: dict[str, float]
    """Further means over the window's action tokens: `ratio_mean`, `clip_fraction`, `correction_filtered`, ..."""
