"""Groups in memory: open ones that fill up, and complete ones that wait to be used."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from molt.train.pool.rows import GroupRow, RolloutRow
from molt.train.records.experience import Experience
from molt.train.records.rollout import Group, Rollout
from molt.train.records.trajectory import Segment

ExperiencesOf = Callable[[Sequence[Segment], str, str], tuple[Experience, ...]]
"""Segments, rollout id, group id -> the experiences of the segments that are trained, in order."""


@dataclass(slots=True)
class OpenGroup:
    """A group that fills up. Its rows are those of the ledger."""

    row: GroupRow
    members: dict[str, RolloutRow] = field(default_factory=dict)
    """By rollout id, in the order of the members."""
    finished: dict[str, Rollout] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        """Members that have not finished, those that do not exist yet included."""
        return self.row.size - len(self.finished)

    def new_member(self, member: int) -> RolloutRow:
        """The row of a member before its first attempt."""
        return RolloutRow(
            rollout_id=f"{self.row.group_id}.{member}",
            group_id=self.row.group_id,
            member=member,
            state="waiting",
            attempt=1,
            failures=0,
        )

    def finish(self, row: RolloutRow, rollout: Rollout) -> None:
        """One more member has finished."""
        self.members[row.rollout_id] = row
        self.finished[row.rollout_id] = rollout

    def to_group(self) -> Group:
        """The complete group, its rollouts in the order of the members."""
        rollouts = tuple(self.finished[rollout_id] for rollout_id in self.members)
        return Group(group_id=self.row.group_id, task_id=self.row.task.task_id, rollouts=rollouts)


def why_failed(group: GroupRow, rollouts: Iterable[Rollout]) -> str | None:
    """Why a group of finished members is of no use for training; None when it is.

    A group that lost a member to an outage is not trained without it: what makes outages likely, a long rollout for
    one, is seldom independent of the reward, so the rest of the group is a biased sample. An evaluation, which compares
    no members, has such a member reported as missing.
    """
    if group.kind == "eval":
        return None
    for rollout in rollouts:
        if rollout.outcome.kind == "infrastructure":
            return f"rollout {rollout.rollout_id} was lost to infrastructure: {rollout.outcome.error}"
    return None


def restore_group(row: GroupRow, members: Sequence[RolloutRow], experiences_of: ExperiencesOf) -> OpenGroup:
    """A group as it stood, from the ledger; the experiences of its finished members are made again."""
    group = OpenGroup(row)
    for member in members:
        light = msgspec.structs.replace(member, outcome=None, recording=None)
        if member.outcome is None:
            group.members[member.rollout_id] = light
            continue
        recording = member.recording
        rollout = Rollout(
            rollout_id=member.rollout_id,
            group_id=member.group_id,
            attempt=member.attempt,
            outcome=member.outcome,
            experiences=()
            if recording is None
            else experiences_of(recording.segments, member.rollout_id, member.group_id),
            delivered_fraction=1.0 if recording is None else recording.delivered_fraction,
        )
        group.finish(light, rollout)
    return group
