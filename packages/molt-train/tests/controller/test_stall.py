"""A run without progress stops and says who waits for what, and where every process is at."""

import asyncio
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from molt.train.controller import stall
from molt.train.controller.stall import WORKER_LIMIT_S, Signs, StallGuard, StallReport
from molt.train.errors import RunError, StallError
from molt.train.observe.waits import Waits

LIMIT_S, PATIENCE_S = 60.0, 600.0


class Bench:
    """A guard, with its clock and all that it looks at."""

    now = 0.0
    progress = activity = 0
    has_worker = True

    def __init__(self):
        self.reports = []

    def watch(self):
        return StallGuard(
            LIMIT_S,
            signs=lambda: Signs(progress=self.progress, activity=self.activity),
            any_worker=lambda: self.has_worker,
            patience_s=PATIENCE_S,
            report=self.report,
        )

    def report(self, waiting_for):
        self.reports.append(waiting_for)
        return "the report is there"


@pytest.fixture
def bench(monkeypatch):
    bench = Bench()
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: bench.now))
    bench.guard = bench.watch()
    return bench


def test_a_run_in_which_nothing_happens_for_the_limit_is_stopped_with_what_it_waits_for(bench):
    bench.guard.check("complete groups")
    bench.now = LIMIT_S
    bench.guard.check("complete groups")
    bench.now += 0.5
    assert bench.reports == []
    message = "nothing happened for 60 s while waiting for complete groups; the report is there"
    with pytest.raises(StallError, match=message):
        bench.guard.check("complete groups")
    assert bench.reports == ["complete groups"]


@pytest.mark.parametrize("sign", ["progress", "activity"])
def test_anything_that_happens_starts_the_limit_anew(bench, sign):
    bench.guard.check("complete groups")
    setattr(bench, sign, 1)
    bench.now = 100.0
    bench.guard.check("complete groups")
    bench.now = 100.0 + LIMIT_S
    bench.guard.check("complete groups")
    bench.now += 1
    with pytest.raises(StallError):
        bench.guard.check("complete groups")


def go_on(bench, *, seconds, progress_every=None):
    """Something happens every ten seconds, and brings the run nearer to its end at the interval given."""
    for second in range(0, seconds, 10):
        bench.now, bench.activity = second, bench.activity + 1
        if progress_every and second % progress_every == 0:
            bench.progress += 1
        bench.guard.check("complete groups")


def test_attempts_that_come_to_nothing_do_not_keep_a_run_alive_for_ever(bench):
    go_on(bench, seconds=int(LIMIT_S + PATIENCE_S))
    bench.now = LIMIT_S + PATIENCE_S + 1
    bench.activity += 1
    with pytest.raises(StallError, match="no progress for 661 s, though attempts go on, while waiting for complete"):
        bench.guard.check("complete groups")


def test_a_run_whose_rollouts_are_long_goes_on(bench):
    go_on(bench, seconds=10_000, progress_every=600)
    assert bench.now >= 10_000 - 600


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


# The report.

LISTENER = textwrap.dedent("""
    import sys, threading
    from pathlib import Path
    from molt.train.observe.stacks import listen

    def hang_in_a_thread_of_its_own():
        threading.Event().wait()

    listen(Path(sys.argv[1]), "engine")
    threading.Thread(target=hang_in_a_thread_of_its_own, daemon=True).start()
    print("listening", flush=True)
    sys.stdin.read()
""")


@pytest.fixture
def listener(tmp_path):
    """Another process of the run."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(tmp_path / "stacks")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "listening\n"
    yield process
    process.kill()
    process.wait(10)


async def test_a_report_says_who_waits_for_whom_since_when_and_where_every_process_is(tmp_path, listener, caplog):
    clock = SimpleNamespace(now=100.0)
    waits = Waits(lambda: clock.now)
    report = StallReport(
        tmp_path / "logs",
        tmp_path / "stacks",
        waits=waits,
        parts=lambda: {"engines": "engine 0: in service, 3 requests\nengine 1: in service, 0 requests"},
    )

    async def wait_for_a_group_that_never_comes():
        await asyncio.Event().wait()

    task = asyncio.create_task(wait_for_a_group_that_never_comes(), name="collector")
    await asyncio.sleep(0)
    with (
        waits.on("the window of update 3"),
        waits.on("the actor ranks to train", limit_s=900.0),
        caplog.at_level("ERROR"),
    ):
        clock.now = 142.5
        where = report("3 more complete groups")
    task.cancel()
    (path,) = (tmp_path / "logs").glob("stall-*.txt")
    assert where == f"{path} has the whole report"
    text = path.read_text()
    for told in (
        "waiting for:\n  3 more complete groups\n",
        "waits:\n  the window of update 3: for 42.5 s\n  the actor ranks to train: for 42.5 s, at most 900 s\n",
        "engines:\n  engine 0: in service, 3 requests\n  engine 1: in service, 0 requests\n",
    ):
        assert told in text
        assert told in caplog.text
    assert "wait_for_a_group_that_never_comes" in text
    assert "hang_in_a_thread_of_its_own" in text, "the other process was not asked"
    assert f".{listener.pid}:" in text


def test_a_disk_without_room_costs_the_report_its_file_only(tmp_path):
    (tmp_path / "logs").write_text("no folder")
    report = StallReport(tmp_path / "logs", tmp_path / "stacks", waits=Waits(), parts=dict)
    assert report("room").startswith("the report is in the log only: ")
