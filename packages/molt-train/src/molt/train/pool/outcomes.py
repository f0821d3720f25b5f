"""What the outcome of an attempt does to its rollout and its group: the policies `pool.on_...`."""

from typing import Literal

from molt.agents.protocol import OutcomeKind
from molt.train.config import PoolConfig
from molt.train.pool.rows import GroupKind
from molt.train.records.rollout import Rollout

Consequence = Literal["finish", "retry", "fail_group"]
"""`finish`: the rollout has ended so, whether it counts or not. `retry`: it waits for another attempt. `fail_group`: it
has ended so, and its whole group with it."""


def consequence_of(outcome: OutcomeKind, *, group: GroupKind, may_retry: bool, settings: PoolConfig) -> Consequence:
    """What an attempt that ended as `outcome` does.

    An evaluation measures failures, so its groups never fail, and only what says nothing about the policy is tried
    again. Training follows the policies: `retry` while `may_retry`; spent, the rollout is left out, but one that was
    lost to infrastructure fails its group. What makes outages likely, a long rollout for one, is seldom independent of
    the reward, so the rest of the group is a biased sample.
    """
    if group == "eval":
        return "retry" if outcome == "infrastructure" and may_retry else "finish"
    match _policy(outcome, settings):
        case "fail_group":
            return "fail_group"
        case "retry" if may_retry:
            return "retry"
        case "retry" if outcome == "infrastructure":
            return "fail_group"
        case _:
            return "finish"


def why_group_failed(rollout: Rollout) -> str:
    """The reason of a group that failed with this rollout."""
    kind, error = rollout.outcome.kind, rollout.outcome.error
    ending = "was lost to infrastructure" if kind == "infrastructure" else f"ended as {kind!r}"
    return f"rollout {rollout.rollout_id} {ending}: {error or 'no error was given'}"


def _policy(outcome: OutcomeKind, settings: PoolConfig) -> str:
    match outcome:
        case "completed":
            return "train"
        case "truncated":
            return settings.on_truncated
        case "failed":
            return settings.on_failed
        case "timeout":
            return settings.on_timeout
        case "infrastructure":
            return settings.on_infrastructure
