"""What is simulated. All that is random about it comes from the seed: the faults, and what the agents do."""

import random
from pathlib import Path
from typing import Literal

import msgspec

from molt.train.config import Config, TrainConfig
from molt.train.config.sections import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    PoolConfig,
    RolloutConfig,
    RunConfig,
    ServerConfig,
)

TOKEN = "simulation-token-of-the-workers"
GROUP_SIZE, OVERSAMPLE = 4, 1
DEADLY = "deadly"
"""The task that kills whoever works on it."""

FaultKind = Literal["kill_server", "kill_worker", "stop_worker", "step_clock", "cut_off"]
Ending = Literal["completed", "truncated", "failed", "timeout", "infrastructure", "deadly"]

_ENDINGS: dict[Ending, float] = {
    "completed": 0.90,
    "truncated": 0.04,
    "failed": 0.03,
    "infrastructure": 0.025,
    "timeout": 0.005,
}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation."""

    seed: int = 0
    num_rollouts: int = 10_000
    """Rollouts that finish at least."""
    num_coroutines: int = 200
    """Workers that share a process, one rollout each at a time."""
    num_processes: int = 8
    """Workers with a process of their own, `molt-agent work`."""
    num_server_kills: int = 8
    num_worker_kills: int = 16
    num_worker_stops: int = 12
    num_clock_steps: int = 8
    num_cut_offs: int = 80
    """Coroutine workers whose heartbeats stop for longer than a lease lives, and whose results come late."""
    groups_per_update: int = 16
    num_tasks: int = 600
    lease_ttl_s: float = 9.0
    timeout_s: float = 12.0
    """Of a rollout."""

    @property
    def num_updates(self) -> int:
        """Updates in which at least `num_rollouts` rollouts finish: a quarter of the groups is degenerate."""
        return -(-self.num_rollouts // round(1.35 * self.groups_per_update * GROUP_SIZE))


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong when the run has come so far."""

    at: float
    """Of the run's updates, the fraction made."""
    delay_s: float
    """After that."""
    kind: FaultKind
    target: int
    """Which worker, where it is about one."""
    amount: float
    """Seconds: of the stop, of being cut off, or by how much the clock is set."""


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent does in one attempt."""

    num_calls: int
    pauses_s: tuple[float, ...]
    """Before each call."""
    discards: tuple[bool, ...]
    """Before each call, whether the same is asked once and not gone on with."""
    gives_up: tuple[bool, ...]
    """Whether that one is not even waited for."""
    ending: Ending
    reward: float
    reports_twice: bool


def scenario_of(num_rollouts: int, seed: int) -> Scenario:
    """The scenario of so many rollouts: what a short one has fewer of are workers, and faults."""
    full = Scenario(seed=seed, num_rollouts=num_rollouts)
    share = min(1.0, num_rollouts / Scenario().num_rollouts)
    if share == 1.0:
        return full
    scaled = {
        name: max(least, round(getattr(full, name) * share))
        for name, least in (
            ("num_coroutines", 24),
            ("num_processes", 2),
            ("num_server_kills", 2),
            ("num_worker_kills", 2),
            ("num_worker_stops", 1),
            ("num_clock_steps", 2),
            ("num_cut_offs", 4),
            ("groups_per_update", 4),
            ("num_tasks", 30),
        )
    }
    return msgspec.structs.replace(full, lease_ttl_s=2.0, timeout_s=2.0, **scaled)


def fault_schedule(scenario: Scenario) -> list[Fault]:
    """The faults, by the time at which they happen."""
    rng = random.Random(f"{scenario.seed}/faults")
    faults: list[Fault] = []

    def add(kind: FaultKind, number: int, amount: tuple[float, float], num_targets: int = 1) -> None:
        for _ in range(number):
            fault = Fault(
                at=rng.uniform(0.02, 0.97),
                delay_s=rng.uniform(0.0, 0.5),
                kind=kind,
                target=rng.randrange(max(1, num_targets)),
                amount=rng.uniform(*amount),
            )
            faults.append(fault)

    add("kill_server", scenario.num_server_kills, (0.0, 0.0))
    add("kill_worker", scenario.num_worker_kills, (0.0, 0.0), scenario.num_processes)
    past_the_lease = (1.2 * scenario.lease_ttl_s, 2.0 * scenario.lease_ttl_s)
    add("stop_worker", scenario.num_worker_stops, past_the_lease, scenario.num_processes)
    add("cut_off", scenario.num_cut_offs, past_the_lease, scenario.num_coroutines)
    add("step_clock", scenario.num_clock_steps, (-3600.0, 3600.0))
    return sorted(faults, key=lambda fault: fault.at)


def behaviour_of(seed: int, task_id: str, rollout_id: str, attempt: int) -> Behaviour:
    """What the agent does in this attempt, wherever it runs."""
    rng = random.Random(f"{seed}/{rollout_id}/{attempt}")
    ending: Ending = rng.choices(list(_ENDINGS), list(_ENDINGS.values()))[0]
    num_calls = rng.choice((1, 1, 2, 2, 3))
    # Some tasks are too easy or too hard, so that the groups of them have one reward only.
    easy = random.Random(f"{seed}/{task_id}/easy").choice((0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0))
    return Behaviour(
        num_calls=num_calls,
        pauses_s=tuple(rng.uniform(0.0, 0.4) for _ in range(num_calls)),
        discards=tuple(rng.random() < 0.08 for _ in range(num_calls)),
        gives_up=tuple(rng.random() < 0.5 for _ in range(num_calls)),
        ending="deadly" if task_id == DEADLY else ending,
        reward=float(rng.random() < easy),
        reports_twice=rng.random() < 0.05,
    )


def write_tasks(scenario: Scenario, path: Path) -> None:
    """The tasks, one of which is deadly."""
    rows = [{"id": f"t{i}", "prompt": f"Question number {i}: what comes next?"} for i in range(scenario.num_tasks)]
    rows[scenario.num_tasks // 3] = {"id": DEADLY, "prompt": "Whoever reads this is killed."}
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def config_of(scenario: Scenario, folder: Path, *, port: int, public_port: int) -> Config:
    """The run's configuration. Outcome policies differ with the seed."""
    rng = random.Random(f"{scenario.seed}/config")
    return Config(
        model=ModelConfig(path=str(folder / "model")),
        run=RunConfig(dir=str(folder / "run"), seed=scenario.seed, stall_timeout=90.0),
        train=TrainConfig(
            num_updates=scenario.num_updates,
            groups_per_update=scenario.groups_per_update,
            max_staleness=3,
            checkpoint_every=5,
            drop_degenerate=True,
            on_stale=rng.choice(("drop", "release")),
        ),
        rollout=RolloutConfig(
            group_size=GROUP_SIZE, oversample=OVERSAMPLE, max_tokens=64, timeout_s=scenario.timeout_s
        ),
        algorithm=AlgorithmConfig(),
        data=DataConfig(path=str(folder / "tasks.jsonl")),
        pool=PoolConfig(
            lease_ttl_s=scenario.lease_ttl_s,
            on_failed=rng.choice(("retry", "train", "mask")),
            on_timeout=rng.choice(("mask", "fail_group", "train")),
            on_truncated=rng.choice(("train", "mask")),
            on_infrastructure="retry",
        ),
        server=ServerConfig(port=port, public_url=f"http://127.0.0.1:{public_port}", token=TOKEN),
    )
