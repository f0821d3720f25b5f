"""What waiting for the slowest rollout costs: `python -m benchmarks.async_overlap`.

The calculator is trained three times on the real stack. One rollout in ten takes ten times longer than the others, the
same ones every time.

- `sync`: `train.max_staleness` 0, and a refit waits for what is being generated: the synchronous loop.
- `strict`: `train.max_staleness` 0 on the asynchronous runtime.
- `async`: `train.max_staleness` 4; generations are kept over refits.

One JSON line: updates an hour of each arm after its first few, how many times more `async` makes than `sync`, its
largest staleness, and whether `strict` trained what `sync` did.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from calculator import tasks
from calculator.demo import HERE, warm_policy, write_rows
from molt.train.config import cache_folder
from molt.train.controller.run_folder import RunFolder
from molt.train.observe.journal import read_journal
from molt.train.pool.reader import LedgerReader


class Arm(NamedTuple):
    """One way to train."""

    max_staleness: int
    on_refit: str
    num_updates: int
    warm_up: int
    """Updates that are left out of the rates: until rollouts of every age are under way."""


ARMS = {
    "sync": Arm(max_staleness=0, on_refit="wait", num_updates=9, warm_up=1),
    "strict": Arm(max_staleness=0, on_refit="keep", num_updates=9, warm_up=1),
    "async": Arm(max_staleness=4, on_refit="keep", num_updates=30, warm_up=6),
}
GROUPS_PER_UPDATE = 8
CONCURRENCY = 160
"""Rollouts at once each of two workers: nobody waits for a worker, only for what it does."""


class Window(NamedTuple):
    """What one update trained on."""

    group_ids: tuple[str, ...]
    rewards: tuple[float | None, ...]
    tokens: tuple[tuple[int, ...], ...]
    """Of each rollout, one segment after the other."""


def main() -> None:
    """Run the arms and print the comparison."""
    training, _ = tasks.expressions(0)
    model = warm_policy(training, seed=0, cache=cache_folder())
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "tasks.jsonl"
        write_rows(rows, [tasks.row(expression) for expression in training])
        runs = {name: train(name, model=model, rows=rows, folder=Path(scratch)) for name in ARMS}
        arms = {name: figures(run, ARMS[name].warm_up) for name, run in runs.items()}
        result = {
            "benchmark": "async_overlap",
            "arms": arms,
            "speedup": round(arms["async"]["updates_an_hour"] / arms["sync"]["updates_an_hour"], 2),
            "staleness_max": arms["async"]["staleness_max"],
            "strict_is_sync": compare(runs["strict"], runs["sync"]),
        }
    print(json.dumps(result))


def train(name: str, *, model: Path, rows: Path, folder: Path) -> RunFolder:
    """Train an arm; returns its run folder."""
    arm, run = ARMS[name], folder / name
    overrides = [
        f"model.path={model}",
        f"data.path={rows}",
        f"agent.path={Path(__file__).parent / 'agent.py'}",
        f"run.dir={run}",
        f"train.num_updates={arm.num_updates}",
        f"train.groups_per_update={GROUPS_PER_UPDATE}",
        f"train.max_staleness={arm.max_staleness}",
        f"engine.on_refit={arm.on_refit}",
        "train.checkpoint_every=0",
        f"agent.concurrency={CONCURRENCY}",
    ]
    command = [sys.executable, "-m", "molt.train.cli", "run", str(HERE / "config.toml"), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    return RunFolder(run)


def figures(run: RunFolder, warm_up: int) -> dict[str, Any]:
    """Rates and staleness of a run, from its journal."""
    journal = read_journal(run.metrics)
    seconds = statistics.mean(row["timing"]["total"] for row in journal[warm_up:])
    dropped: dict[str, int] = {}
    for row in journal:
        dropped = {key: dropped.get(key, 0) + row["dropped"].get(key, 0) for key in dropped | row["dropped"]}
    return {
        "updates_an_hour": round(3600 / seconds),
        "update_s": round(seconds, 3),
        "wait_rollouts_s": round(statistics.mean(row["timing"]["wait_rollouts"] for row in journal[warm_up:]), 3),
        "staleness_mean": round(statistics.mean(row["staleness_mean"] for row in journal[warm_up:]), 3),
        "staleness_max": max(row["staleness_max"] for row in journal),
        "dropped": dropped,
    }


def compare(strict: RunFolder, sync: RunFolder) -> dict[str, Any]:
    """What two runs trained on, update by update, and the losses that came out."""
    ours, theirs = windows(strict), windows(sync)
    pairs = list(zip(ours, theirs, strict=True))
    rollouts = [pair for one, other in pairs for pair in zip(one.tokens, other.tokens, strict=True)]
    losses = zip(read_journal(strict.metrics), read_journal(sync.metrics), strict=True)
    return {
        "same_groups": all(one.group_ids == other.group_ids for one, other in pairs),
        "same_rewards": all(one.rewards == other.rewards for one, other in pairs),
        "same_tokens": round(sum(one == other for one, other in rollouts) / len(rollouts), 4),
        "loss_gap_max": max(abs(one["loss"] - other["loss"]) for one, other in losses),
    }


def windows(run: RunFolder) -> list[Window]:
    """The windows of a run, from its ledger."""
    reader = LedgerReader.open(run.ledger)
    found = []
    for window in reader.windows():
        rollouts = [row for group_id in window.group_ids for row in reader.rollouts(group_id)]
        tokens = [
            tuple(token for segment in (row.recording.segments if row.recording else ()) for token in segment.token_ids)
            for row in rollouts
        ]
        rewards = tuple(row.outcome.reward if row.outcome else None for row in rollouts)
        found.append(Window(window.group_ids, rewards, tuple(tokens)))
    reader.close()
    return found


if __name__ == "__main__":
    main()
