# ruff: noqa: TID252 - the folders of tests are no installed package
"""A desk on a ledger in the test's folder, with a clock and a disk that the test sets."""

import msgspec
import pytest

from molt.train.config import Config, ModelConfig, PoolConfig, RolloutConfig
from molt.train.controller.desk import DeskSettings, RolloutDesk
from molt.train.controller.results import experiences_into
from molt.train.experience import LocalPayloadStore
from molt.train.gateway.sessions import Sessions
from molt.train.pool.disk import DiskRoom
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Task

from ..conftest import one_turn

CONFIG = Config(
    model=ModelConfig(name="tiny"),
    rollout=RolloutConfig(group_size=2, max_tokens=64, temperature=0.7, timeout_s=120.0),
    pool=PoolConfig(max_attempts=2, lease_ttl_s=30.0, session_idle_s=100.0, reward_wait_s=1000.0),
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Disk:
    """The free bytes that the ledger is told of."""

    free = 1 << 40

    def __call__(self, _folder):
        return self.free


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def sessions(clock):
    return Sessions(clock=clock)


@pytest.fixture
def admitted():
    """What the desk calls before it grants leases; a test adds to it."""
    return []


@pytest.fixture
def open_pool(tmp_path, clock, disk):
    """Open the pool of the test's one ledger; calling it again is a restart."""
    pools = []

    def open_one():
        if pools:
            pools[-1].ledger.close()
        times = iter(range(10**9))  # every answer about the disk is a new one
        room = DiskRoom(tmp_path, min_free=1, measure=disk, clock=lambda: next(times) * 10.0)
        ledger = Ledger(tmp_path / "ledger.db", CONFIG.pool, room=room)
        experiences_of = experiences_into(LocalPayloadStore())
        pools.append(Pool(ledger, settings=CONFIG.pool, clock=clock, experiences_of=experiences_of))
        return pools[-1]

    yield open_one
    for pool in pools:
        pool.ledger.close()


@pytest.fixture
def pool(open_pool):
    return open_pool()


@pytest.fixture
def make_desk_of(admitted):
    def make(pool, sessions, url="http://trainer:1", **changes):
        return RolloutDesk(
            pool,
            sessions,
            settings=msgspec.structs.replace(DeskSettings.of(CONFIG, url), **changes),
            experiences_of=experiences_into(LocalPayloadStore()),
            admit=lambda: [hook() for hook in admitted],
            progress=lambda: {"step": 7},
        )

    return make


@pytest.fixture
def make_desk(make_desk_of, pool, sessions):
    return lambda *args, **changes: make_desk_of(pool, sessions, *args, **changes)


@pytest.fixture
def desk(make_desk):
    return make_desk()


@pytest.fixture
def restart(make_desk_of, open_pool, clock):
    """Another server on the same ledger, with its own clock and no session in memory: its pool and its desk."""

    def again():
        clock.now = 5.0
        pool = open_pool()
        return pool, make_desk_of(pool, Sessions(clock=clock))

    return again


@pytest.fixture
def open_group(pool):
    def open_one(size=1, **more):
        task = Task(task_id="t", data={"q": "1+1"}, labels=more.pop("labels", {}))
        return pool.open_group(task, kind="train", size=size, position=pool.next_position, **more)

    return open_one


@pytest.fixture
def call_model(sessions):
    """Let a session look as if its client had made one model call, of two tokens in and two out."""

    def call(session_id, *, status="delivered"):
        session = sessions.get(session_id)
        assert session.state == "open", "410 Gone"
        turn = msgspec.structs.replace(one_turn(session_id, 3), status=status, logprobs=[-0.1, -0.2], versions=[3, 4])
        session.turns = lambda: [turn]
        session.count("sampling_overridden")
        session.begun(session)
        session.ended(session)

    return call
