"""Stages 1 and 6, lease and window: tasks, outcomes, and complete groups of rollouts."""

from typing import Any

import msgspec

from molt.agents.protocol import OutcomeKind
from molt.train.records.experience import Experience


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the data: `task_id` is unique in a run, `data` is the row as given."""

    task_id: str
    data: dict[str, Any]
    dataset: str = ""
    """The name of the data set it is from; empty where there is only one."""
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """What a worker has to have to be given it."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a rollout ended. `reward` is finite for `completed` and `truncated`, else None."""

    kind: OutcomeKind
    reward: float | None = None
    score: float | None = None
    error: str | None = None
    info: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    answer: Any = None
    """What was graded, plain JSON, so that it can be graded again; None where the agent graded itself."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One finished rollout: its outcome and the experiences of its trained segments, in order."""

    rollout_id: str
    group_id: str
    attempt: int
    outcome: Outcome
    experiences: tuple[Experience, ...]
    delivered_fraction: float = 1.0
    """Sampled tokens that reached the client, over all sampled tokens."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The finished rollouts of one prompt, in the order of the members."""

    group_id: str
    task_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled an action token of the group; None when nothing was sampled."""
        versions = [e.oldest_version for r in self.rollouts for e in r.experiences]
        return min(versions, default=None)
