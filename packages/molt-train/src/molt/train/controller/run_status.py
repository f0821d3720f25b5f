"""What a run folder says about its run, whether a process is at work in it or not. Nothing is written, or locked."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from molt.train.config import Config, load_config
from molt.train.controller.checkpoints import BEST, steps_in
from molt.train.controller.run_folder import RunFolder
from molt.train.controller.server_file import ServerFile, read_server_file
from molt.train.errors import ConfigError
from molt.train.observe.journal import read_journal
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import EventRow

RunState = Literal["running", "finished", "stopped", "failed", "crashed"]
"""`stopped`: somebody told it to; `failed`: it could not go on; `crashed`: its process died without a word."""
NUM_REWARDS = 5
NUM_EVENTS = 10
COUNTED = ("engine_died", "engine_restarted", "actor_died", "actor_restarted", "refit_failed", "worker_died", "stalled")
"""Events that are counted over the whole run, restarts of the server included."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at a glance."""

    folder: str
    state: RunState
    reason: str
    """Why it is in that state, where that needs a word."""
    url: str
    """Where it serves; empty where it does not."""
    updates: int
    """Updates made."""
    num_updates: int
    """Updates of the whole run."""
    policy_version: int
    """Of the last update; what engines serve is in `live`."""
    rewards: dict[int, float]
    """Mean rewards of the last updates, by update."""
    evaluation: dict[str, Any] | None
    """The last one."""
    checkpoints: list[int]
    """Updates that have a checkpoint."""
    best: int | None
    """The update whose checkpoint is marked as the best."""
    groups: dict[str, int]
    """By state."""
    leases: dict[str, int]
    """Live leases, by worker."""
    quarantined: dict[str, list[str]]
    """Tasks that are offered no more, with the errors of their attempts."""
    dropped: dict[str, int]
    """Groups that were not trained, by reason."""
    left_out: dict[str, int]
    """What windows had, by name, and was not trained, or was changed: sums of `dropped` in metrics.jsonl."""
    counts: dict[str, int]
    """Deaths, restarts and failures of the whole run."""
    events: list[EventRow]
    """The last ones."""
    live: dict[str, Any] | None = None
    """What the server says of itself, if it was asked."""


def read_status(folder: RunFolder) -> RunStatus:
    """The status of the run in `folder`. Raises ConfigError when it holds none."""
    if not folder.config.is_file() or not folder.ledger.is_file():
        raise ConfigError(f"{str(folder.path)!r} holds no run: there is no config.toml or no ledger.db in it")
    config = load_config(folder.config, [], Config)
    rows, evaluations = (read_journal(path) if path.is_file() else [] for path in (folder.metrics, folder.evaluations))
    server = read_server_file(folder.server)
    left_out = Counter[str]()
    for row in rows:
        left_out.update(row.get("dropped", {}))
    best = folder.checkpoints / BEST
    with contextlib.closing(LedgerReader.open(folder.ledger)) as ledger:
        events = list(ledger.events())
        state, reason = _state(server, events)
        kinds = Counter(event.kind for event in events)
        return RunStatus(
            folder=str(folder.path),
            state=state,
            reason=reason,
            url=server.url if server is not None and state == "running" else "",
            updates=rows[-1]["step"] if rows else 0,
            num_updates=config.train.num_updates,
            policy_version=rows[-1]["step"] if rows else 0,
            rewards={row["step"]: row["reward_mean"] for row in rows[-NUM_REWARDS:]},
            evaluation=evaluations[-1] if evaluations else None,
            checkpoints=steps_in(folder.checkpoints) if folder.checkpoints.is_dir() else [],
            best=int(best.resolve().name.rpartition("-")[2]) if best.exists() else None,
            groups={str(name): count for name, count in ledger.count_groups().items()},
            leases=ledger.count_leases() if state == "running" else {},
            quarantined=ledger.quarantined(),
            dropped=ledger.count_drops(),
            left_out=dict(left_out),
            counts={kind: kinds[kind] for kind in COUNTED if kinds[kind]},
            events=events[-NUM_EVENTS:],
        )


def _state(server: ServerFile | None, events: Sequence[EventRow]) -> tuple[RunState, str]:
    if server is not None and server.is_alive() is not False:
        where = f"process {server.pid} on {server.host}"
        return "running", where if server.is_alive() else f"{where}, which is not this machine: not looked at"
    last = next((event for event in reversed(events) if event.kind in ("run_started", "run_ended")), None)
    if last is None:
        return "crashed", "its process is gone, and had not begun"
    if last.kind == "run_started":
        return "crashed", f"process {last.detail.get('pid')} on {last.detail.get('host')} is gone without a word"
    return last.detail["state"], last.detail["reason"]
