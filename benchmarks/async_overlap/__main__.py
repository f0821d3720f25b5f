"""How much of the actor's waiting the asynchronous loop takes away: `python -m benchmarks.async_overlap`.

The calculator with a slow tool is trained twice on the real stack, strictly on-policy (`max_staleness` 0) and
asynchronously (2). One JSON line compares, over the updates after the first three: seconds an update, seconds of it
that the actor waited for rollouts, and the largest staleness recorded.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from calculator import tasks
from calculator.demo import HERE, warm_policy, write_rows
from molt.train.config import cache_folder
from molt.train.observe.journal import read_journal

NUM_UPDATES = 18
WARM_UP = 3
ARMS = (0, 2)


def main() -> None:
    """Run both arms and print the comparison."""
    training, _ = tasks.expressions(0)
    model = warm_policy(training, seed=0, cache=cache_folder())
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "tasks.jsonl"
        write_rows(rows, [tasks.row(expression) for expression in training])
        arms = {staleness: run_arm(staleness, model=model, rows=rows, folder=Path(scratch)) for staleness in ARMS}
    waits = [arms[staleness]["wait_rollouts_s"] for staleness in ARMS]
    seconds = [arms[staleness]["update_s"] for staleness in ARMS]
    result = {
        "benchmark": "async_overlap",
        "arms": {f"max_staleness={staleness}": figures for staleness, figures in arms.items()},
        "wait_ratio": round(waits[1] / waits[0], 3),
        "speedup": round(seconds[0] / seconds[1], 3),
    }
    print(json.dumps(result))


def run_arm(staleness: int, *, model: Path, rows: Path, folder: Path) -> dict[str, float]:
    """Train with this bound, and take the figures from the run's journal."""
    run = folder / f"staleness-{staleness}"
    overrides = [
        f"model.path={model}",
        f"data.path={rows}",
        f"agent.path={Path(__file__).parent / 'agent.py'}",
        f"run.dir={run}",
        f"train.num_updates={NUM_UPDATES}",
        f"train.max_staleness={staleness}",
        "train.checkpoint_every=0",
        "agent.concurrency=192",
    ]
    command = [sys.executable, "-m", "molt.train.cli", "run", str(HERE / "config.toml"), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    journal = read_journal(run / "metrics.jsonl")[WARM_UP:]
    return {
        "update_s": round(statistics.mean(row["timing"]["total"] for row in journal), 3),
        "wait_rollouts_s": round(statistics.mean(row["timing"]["wait_rollouts"] for row in journal), 3),
        "staleness_max": max(row["staleness_max"] for row in journal),
        "staleness_mean": round(statistics.mean(row["staleness_mean"] for row in journal), 3),
    }


if __name__ == "__main__":
    main()
