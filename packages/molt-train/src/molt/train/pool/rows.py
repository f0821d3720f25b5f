"""What the ledger holds, as structs: one a table, in the terms that the rest of the program uses."""

from typing import Any, Literal

import msgspec

from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Task

GroupKind = Literal["train", "eval"]
GroupState = Literal["open", "complete", "consumed", "failed", "dropped"]
"""`open` -> `complete` (enough members finished) -> `consumed` (by a window, or by an evaluation), or, with a reason,
`failed` (a member failed it, or it did not fill in time) or `dropped` (as too old, or by whoever forms windows)."""
RolloutState = Literal["waiting", "leased", "finished", "cut"]
"""`cut`: its group was complete, or was given up, without it."""
LeaseState = Literal["granted", "reported", "released", "expired", "cut", "late"]
"""`cut`: its rollout was. `late`: it had been released or cut, or had expired, and was reported all the same."""
SessionState = Literal["open", "idle", "closed", "expired"]
"""Of a session that no worker drives. `idle`: no more model calls, the reward may still come; `closed`: it came;
`expired`: it did not come in time."""


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A group of rollouts of one task."""

    seq: int
    """Order of opening; `group_id` is made from it."""
    group_id: str
    kind: GroupKind
    task: Task
    size: int
    position: int | None = None
    """The data position the task was taken from; None for a group collected from self-driven sessions."""
    key: str | None = None
    """The `group` key of the self-driven sessions that the group is collected from."""
    state: GroupState = "open"
    reason: str | None = None
    """Why it failed or was dropped."""
    step: int | None = None
    """The update whose window consumed it."""


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a group."""

    rollout_id: str
    group_id: str
    member: int
    """Its place in the group, from 0."""
    state: RolloutState
    attempt: int
    """The number of its current or next lease, from 1; no two leases of a rollout share one."""
    failures: int
    """Attempts spent: outcomes that were retried, expired leases included, but not leases given back or lost to a
    restart."""
    outcome: Outcome | None = None
    recording: Recording | None = None
    """Of the attempt that counts; both are None before the rollout has finished, and when it was cut."""


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one rollout."""

    lease_id: str
    rollout_id: str
    group_id: str
    attempt: int
    worker_id: str
    session_id: str | None
    state: LeaseState
    granted: float
    """Unix time, for people; no decision is taken on it."""
    ended: float | None


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One report, counted or not. `rollout_id` is None for a session of no group."""

    outcome: Outcome
    counted: bool
    reason: str | None = None
    """Why it does not count, or does not finish the rollout."""
    lease_id: str | None = None
    rollout_id: str | None = None
    attempt: int = 1


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session that no worker drives, so that its result can come late, and to another process than opened it."""

    session_id: str
    group: str | None
    """The key of its group; None for a session by itself."""
    task: Task | None
    metadata: dict[str, Any]
    state: SessionState = "open"
    opened: float = 0.0
    """Unix time, for people; no decision is taken on it."""


class WindowRow(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that one update trained on."""

    step: int
    policy_version: int
    group_ids: tuple[str, ...]


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth knowing later that is no state."""

    time: float
    """Unix time."""
    kind: str
    detail: dict[str, Any]
