"""What a run counts as progress: a sandbox that always fails keeps everyone busy, and brings nothing nearer."""

import time
from types import SimpleNamespace

import pytest

from molt.train.config import Config, PoolConfig, RolloutConfig, RunConfig
from molt.train.controller import stall
from molt.train.controller.run_folder import RunFolder
from molt.train.engine.router import Router
from molt.train.errors import StallError
from molt.train.launch.stall import make_stall_guard
from molt.train.observe.waits import Waits
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Outcome, Rollout, Task

STALL_S, TIMEOUT_S, ATTEMPTS = 60.0, 100.0, 3
LONGEST_S = STALL_S + ATTEMPTS * TIMEOUT_S
"""That activity alone keeps a run alive for."""


class Bench:
    """A pool with tasks without end, a worker, an engine, and a clock."""

    def __init__(self, folder):
        self.now = 0.0
        settings = PoolConfig(max_attempts=ATTEMPTS)
        self.ledger = Ledger(folder / "ledger.db", settings)
        self.pool = Pool(self.ledger, settings=settings, clock=time.monotonic, experiences_of=lambda *_: ())
        self.desk = SimpleNamespace(num_leases=0, num_results=0)
        self.router, self.events = Router(), []
        self.router.admit(0, SimpleNamespace())
        self._num_groups = 0
        config = Config(run=RunConfig(stall_timeout=STALL_S), rollout=RolloutConfig(timeout_s=TIMEOUT_S), pool=settings)
        self.guard = make_stall_guard(
            config,
            RunFolder(folder),
            SimpleNamespace(pool=self.pool, desk=self.desk),
            serving=SimpleNamespace(version=4),
            router=self.router,
            waits=Waits(),
            on_event=lambda kind, detail: self.events.append((kind, detail)),
        )

    def attempt(self, kind):
        """The worker takes a lease and reports it."""
        if not len(self.pool.acquire("w", 0)) and not self.pool.status().num_waiting:
            self._num_groups += 1
            task = Task(task_id=f"t{self._num_groups}", data={})
            self.pool.open_group(task, kind="train", size=1, position=self._num_groups)
        (lease,) = self.pool.acquire("w", 1)
        self.desk.num_leases += 1
        reward = 1.0 if kind == "completed" else None
        rollout = Rollout(
            rollout_id=lease.rollout_id,
            group_id=lease.group_id,
            attempt=lease.attempt,
            outcome=Outcome(kind=kind, reward=reward, error=None if reward else "the sandbox burst"),
            experiences=(),
        )
        self.pool.report(lease.lease_id, lease.attempt, rollout, [], [])
        self.desk.num_results += 1

    def go_on(self, until, kind, *, every=20.0):
        """An attempt that ends so at every interval, with a check after it."""
        while self.now < until:
            self.now += every
            self.attempt(kind)
            self.guard.check("2 more complete groups")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: bench.now))
    bench.guard.check("2 more complete groups")
    yield bench
    bench.ledger.close()


def test_rollouts_that_count_keep_a_run_alive(bench):
    bench.go_on(10 * LONGEST_S, "completed")
    assert bench.now >= 10 * LONGEST_S


@pytest.mark.parametrize("kind", ["infrastructure", "failed", "timeout"])
def test_attempts_that_count_nowhere_do_so_only_for_a_while(bench, kind):
    bench.attempt("completed")
    with pytest.raises(StallError, match="though attempts go on"):
        bench.go_on(10 * LONGEST_S, kind)
    assert LONGEST_S <= bench.now <= LONGEST_S + 40.0


def test_without_engines_they_count_for_nothing(bench):
    bench.router.remove(0)
    bench.guard.check("2 more complete groups")
    with pytest.raises(StallError, match="nothing happened for 80 s"):
        bench.go_on(LONGEST_S, "infrastructure")


def test_the_report_tells_of_pool_workers_and_engines(bench, tmp_path):
    bench.attempt("infrastructure")
    bench.guard.check("2 more complete groups")
    bench.now += STALL_S + 1
    with pytest.raises(StallError):
        bench.guard.check("2 more complete groups")
    assert bench.events == [("stalled", {"waiting_for": "2 more complete groups"})]
    (report,) = (tmp_path / "logs").glob("stall-*.txt")
    text = report.read_text()
    for told in (
        "num_waiting: 1",
        "'worker_id': 'w'",
        "policy version 4",
        "engine 0: in service, 0 requests",
        "stacks of the server",
    ):
        assert told in text
