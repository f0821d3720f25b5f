import pytest

from molt.train.config import PoolConfig
from molt.train.experience import LocalPayloadStore, offload_trained
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Rollout, Task
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn


class Clock:
    """Seconds that only the test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_turn(session_id, *, version=0):
    return Turn(
        turn_id=f"{session_id}/t0",
        session_id=session_id,
        wire="chat",
        parent_turn_id=None,
        opened_by="start",
        response_id="r0",
        status="delivered",
        adopted=True,
        auxiliary=False,
        finish_reason="stop",
        prompt_length=2,
        context_ids=[7, 8],
        token_ids=[9, 10],
        logprobs=[-0.25, -0.5],
        versions=[version, version],
    )


def make_segment(session_id, *, version=0):
    return Segment(
        segment_id=f"{session_id}/0",
        turn_ids=[f"{session_id}/t0"],
        opened_by="start",
        token_ids=[7, 8, 9, 10],
        action_mask=[0, 0, 1, 1],
        logprobs=[0.0, 0.0, -0.25, -0.5],
        versions=[None, None, version, version],
        trained=True,
    )


def experiences_of(segments, rollout_id, group_id):
    return offload_trained(segments, LocalPayloadStore(), rollout_id=rollout_id, group_id=group_id)


def _report(pool, assignment, kind="completed", *, reward=1.0, error=None, version=0):
    segments = [make_segment(assignment.lease_id, version=version)]
    outcome = Outcome(kind=kind, reward=reward if kind in ("completed", "truncated") else None, error=error)
    rollout = Rollout(
        rollout_id=assignment.rollout_id,
        group_id=assignment.group_id,
        attempt=assignment.attempt,
        outcome=outcome,
        experiences=experiences_of(segments, assignment.rollout_id, assignment.group_id),
        delivered_fraction=0.5,
    )
    turns = [make_turn(assignment.lease_id, version=version)]
    return pool.report(assignment.lease_id, assignment.attempt, rollout, segments, turns, counters={"turns": 1})


def _task(name="t", **labels):
    return Task(task_id=name, data={"question": name}, labels=labels)


@pytest.fixture
def report():
    """Report an attempt as the server would, with one turn in one segment."""
    return _report


@pytest.fixture
def task():
    """Make a task from its name, and the labels that its workers need."""
    return _task


@pytest.fixture
def recording():
    """Make what a session of one turn recorded, from its id."""

    def make(session_id):
        return Recording(
            session_id=session_id,
            state="closed",
            turns=[make_turn(session_id)],
            segments=[make_segment(session_id)],
            counters={"turns": 1},
            delivered_fraction=0.5,
        )

    return make


@pytest.fixture
def open_pool():
    """Open a pool on a ledger file, with keys of `[pool]`; the caller closes `pool.ledger`."""

    def make(path, clock, **keys):
        settings = PoolConfig(**keys)
        return Pool(Ledger(path, settings), settings=settings, clock=clock, experiences_of=experiences_of)

    return make


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make_pool(tmp_path, clock, open_pool):
    """A pool over the test's one ledger; calling it again is a restart after a crash."""
    pools = []

    def make(**settings):
        if pools:
            pools[-1].ledger.close()
        pools.append(open_pool(tmp_path / "ledger.sqlite", clock, **settings))
        return pools[-1]

    yield make
    if pools:
        pools[-1].ledger.close()


@pytest.fixture
def pool(make_pool):
    return make_pool()
