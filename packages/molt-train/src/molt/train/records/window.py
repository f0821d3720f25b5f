"""Stages 6 to 9, window to step: what the actor ranks are given, and what they report."""

import msgspec
import numpy as np

from molt.train.records.experience import Experience


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One segment to train, with what belongs to its action tokens, in order: arrays are float32 [num_actions]."""

    experience: Experience
    rollout: int
    """Number of its rollout in the window: the segments of one rollout share it."""
    weight: float
    """What each of its action tokens counts in the window's loss; see `window.aggregate`."""
    advantages: np.ndarray
    reference: np.ndarray | None = None
    """Log-probs under the reference policy."""
    values: np.ndarray | None = None
    """The critic's values before the window."""
    returns: np.ndarray | None = None
    """What the critic is to predict."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks computed of one row before the window's advantages: float32 [num_actions] each."""

    old: np.ndarray | None = None
    """Log-probs under the policy before the window's first update."""
    reference: np.ndarray | None = None
    teacher: np.ndarray | None = None
    values: np.ndarray | None = None


class Microbatch(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that one forward and backward pass takes together. May be empty, so that all ranks make equal steps."""

    rows: tuple[Row, ...]


class RankWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of an optimizer window."""

    microbatches: tuple[Microbatch, ...]
    num_action_tokens: int
    """Of the whole window, over all ranks."""
    num_rollouts: int
    """Of the whole window: `Row.rollout` is below it."""


class TrainWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer window over all ranks: `ranks[r]` are the microbatches of rank r, equally many on each."""

    step: int
    """The update that this window makes: the first is 1."""
    policy_version: int
    """The version of the weights before the update."""
    ranks: tuple[tuple[Microbatch, ...], ...]
    num_action_tokens: int
    """Action tokens over all ranks and microbatches."""
    num_rollouts: int
    """Rollouts that `Row.rollout` numbers."""

    def share(self, rank: int) -> RankWindow:
        """What `rank` is given of it."""
        return RankWindow(
            microbatches=self.ranks[rank], num_action_tokens=self.num_action_tokens, num_rollouts=self.num_rollouts
        )


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
