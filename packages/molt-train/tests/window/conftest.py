import pytest

from molt.train.records.experience import Experience
from molt.train.records.rollout import Group, Outcome, Rollout


def _rollout(rollout_id, group_id, reward, segments, kind="completed", **fields):
    """`segments`: (tokens, actions, versions of the actions) each."""
    experiences = tuple(
        Experience(
            segment_id=f"{rollout_id}/{i}",
            rollout_id=rollout_id,
            group_id=group_id,
            num_tokens=tokens,
            num_actions=actions,
            oldest_version=min(versions),
            newest_version=max(versions),
            mean_version=sum(versions) / len(versions),
            payload=None,
        )
        for i, (tokens, actions, versions) in enumerate(segments)
    )
    outcome = Outcome(kind=kind, reward=reward)
    return Rollout(
        rollout_id=rollout_id, group_id=group_id, attempt=1, outcome=outcome, experiences=experiences, **fields
    )


@pytest.fixture
def make_rollout():
    return _rollout


@pytest.fixture
def make_group():
    def make(group_id, *members):
        """`members`: (reward, segments) or (reward, segments, kind) each."""
        rollouts = tuple(_rollout(f"{group_id}-{i}", group_id, *member) for i, member in enumerate(members))
        return Group(group_id=group_id, task_id=f"task-{group_id}", rollouts=rollouts)

    return make
