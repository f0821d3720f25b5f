"""A run without progress stops and says who waits for what."""

from types import SimpleNamespace

import pytest

from molt.train.controller import stall
from molt.train.controller.stall import WORKER_LIMIT_S, StallGuard
from molt.train.errors import RunError, StallError


class Bench:
    """A guard, with its clock and all that it looks at."""

    now = 0.0
    progress = 0
    has_worker = True

    def watch(self):
        return StallGuard(
            60.0,
            signature=lambda: self.progress,
            report=lambda: "3 leases at worker w",
            any_worker=lambda: self.has_worker,
        )


@pytest.fixture
def bench(monkeypatch):
    bench = Bench()
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: bench.now))
    bench.guard = bench.watch()
    return bench


def test_a_run_that_stands_still_for_the_limit_is_stopped_with_what_it_waits_for(bench):
    bench.guard.check("complete groups")
    bench.now = 60.0
    bench.guard.check("complete groups")
    bench.now = 60.5
    with pytest.raises(StallError, match="no progress for 60 s while waiting for complete groups: 3 leases at worker"):
        bench.guard.check("complete groups")


def test_any_progress_starts_the_limit_anew(bench):
    bench.guard.check("complete groups")
    bench.now, bench.progress = 100.0, 1
    bench.guard.check("complete groups")
    bench.now = 160.0
    bench.guard.check("complete groups")
    bench.now = 161.0
    with pytest.raises(StallError):
        bench.guard.check("complete groups")


def test_until_a_worker_has_shown_up_the_limit_is_an_hour(bench):
    bench.has_worker = False
    bench.guard.check("complete groups")
    bench.now = WORKER_LIMIT_S
    bench.guard.check("complete groups")
    bench.now += 1
    with pytest.raises(StallError):
        bench.guard.check("complete groups")


def test_a_stall_ends_the_run():
    assert issubclass(StallError, RunError)
