"""A run's pool on a ledger in the test's folder, and workers that report what the test says."""

import time

import pytest

from molt.train.config import PoolConfig
from molt.train.controller.results import experiences_into
from molt.train.experience import LocalPayloadStore
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Outcome, Rollout, Task
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory

EXPERIENCES_OF = experiences_into(LocalPayloadStore())


def one_turn(name, version):
    """What a session recorded that made one model call: two tokens in, two out."""
    return Turn(
        turn_id=f"{name}-t",
        session_id=name,
        wire="chat",
        parent_turn_id=None,
        opened_by="start",
        response_id="r",
        status="delivered",
        adopted=True,
        auxiliary=False,
        finish_reason="stop",
        prompt_length=2,
        context_ids=[5, 6],
        token_ids=[7, 8],
        logprobs=[-0.5, -0.25],
        versions=[version, version],
    )


class Workers:
    """Stands for every worker of a run: takes leases and reports them at once."""

    def __init__(self, pool):
        self.pool = pool

    def report(self, assignment, *, version=0, reward=1.0, kind="completed", info=None, answer=None):
        turns = [one_turn(assignment.lease_id, version)]
        segments = build_trajectory(assignment.lease_id, turns).segments
        reward = reward if kind in ("completed", "truncated") else None
        outcome = Outcome(kind=kind, reward=reward, info=info or {}, answer=answer)
        rollout = Rollout(
            rollout_id=assignment.rollout_id,
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            outcome=outcome,
            experiences=EXPERIENCES_OF(segments, assignment.rollout_id, assignment.group_id),
        )
        assert self.pool.report(assignment.lease_id, assignment.attempt, rollout, segments, turns).accepted

    def finish_all(self, **outcome):
        """Report everything that waits for a worker."""
        for assignment in self.pool.acquire("w", 10_000):
            self.report(assignment, **outcome)

    async def serve(self, outcome_of):
        """Take whatever is offered, until cancelled. `outcome_of` says how an assignment ends; None: it never does."""
        while True:
            if await self.pool.wait_offers(5.0):
                for assignment in self.pool.acquire("w", 1):
                    outcome = outcome_of(assignment)
                    if outcome is not None:
                        self.report(assignment, **outcome)


@pytest.fixture
def tasks():
    return [Task(task_id=f"t{i}", data={"q": i}) for i in range(3)]


@pytest.fixture
def restart_pool(tmp_path):
    """Open the pool of the test's one ledger; calling it again is a restart after a crash."""
    pools = []

    def make():
        if pools:
            pools[-1].ledger.close()
        ledger = Ledger(tmp_path / "run" / "ledger.db")
        pools.append(Pool(ledger, settings=PoolConfig(), clock=time.monotonic, experiences_of=EXPERIENCES_OF))
        return pools[-1]

    yield make
    for pool in pools:
        pool.ledger.close()


@pytest.fixture
def make_workers():
    return Workers
