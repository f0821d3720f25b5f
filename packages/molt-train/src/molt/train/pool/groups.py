"""Groups in memory: open ones that fill up, and complete ones that wait to be used."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from molt.train.config import PoolConfig
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
    """By rollout id, in the order of the members; more than the group's size where it was oversampled."""
    finished: dict[str, Rollout] = field(default_factory=dict)

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

    def is_completed_by(self, rollout: Rollout, settings: PoolConfig) -> bool:
        """Whether the group is complete once `rollout` has finished, too.

        A group that workers fill is when as many members as its size count, or when none is left that could. One that
        is collected from sessions is when as many as its size have finished.
        """
        num_finished = len(self.finished) + 1
        if self.row.key is not None:
            return num_finished >= self.row.size
        if num_finished == len(self.members):
            return True
        ended = [rollout, *self.finished.values()]
        return sum(settings.counts(r.outcome.kind) for r in ended) >= self.row.size

    def finish(self, row: RolloutRow, rollout: Rollout) -> None:
        """One more member has finished. What it answered is in the ledger, and may be long."""
        self.members[row.rollout_id] = row
        outcome = msgspec.structs.replace(rollout.outcome, answer=None)
        self.finished[row.rollout_id] = msgspec.structs.replace(rollout, outcome=outcome)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of a finished member; None when nothing was sampled."""
        versions = [e.oldest_version for rollout in self.finished.values() for e in rollout.experiences]
        return min(versions, default=None)

    def unfinished(self, *, beside: str | None = None) -> list[RolloutRow]:
        """The members that wait or run, but for `beside`."""
        rows = self.members.values()
        return [row for row in rows if row.state in ("waiting", "leased") and row.rollout_id != beside]

    def to_group(self) -> Group:
        """The complete group: its finished rollouts in the order of the members."""
        rollouts = tuple(self.finished[rollout_id] for rollout_id in self.members if rollout_id in self.finished)
        return Group(group_id=self.row.group_id, task_id=self.row.task.task_id, rollouts=rollouts)


def restore_group(row: GroupRow, members: Iterable[RolloutRow], experiences_of: ExperiencesOf) -> OpenGroup:
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
