"""Reward by update of every algorithm, three seeds each: `python -m benchmarks.learning [ARM ...]`.

Each run is `molt-train demo` with other keys. The curves are kept in docs/learning/curves.json, from which the figures
beside it are drawn; arms and seeds that are in it already are not run again, unless `--again`. One JSON line says in
which update the mean reward of each run first was at 0.8, over five updates.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learning.picture import draw
from molt.train.observe.journal import read_journal

FOLDER = Path(__file__).parent.parent.parent / "docs" / "learning"
CURVES = FOLDER / "curves.json"
NUM_UPDATES = 70
SMOOTHED = 5
GOAL = 0.8
SINGLE = ["rollout.group_size=1", "train.groups_per_update=128"]
"""One sample a prompt, as many rollouts an update."""
STALE = [
    "algorithm.preset=flash_reinforce",
    *SINGLE,
    "train.max_staleness=8",
    "agent.concurrency=640",
    "actor.optimizer.lr=5e-4",
]
"""With rollouts for five windows under way a token is some six updates old when it is trained. A plain policy gradient,
since the clip of the others bounds a part of the harm; at half the demo's learning rate, since at the whole one eight
updates change more than a weight that is cut at 2 can mend."""
ARMS: dict[str, list[str]] = {
    "grpo": ["algorithm.preset=grpo"],
    "rloo": ["algorithm.preset=rloo"],
    "reinforce_pp": ["algorithm.preset=reinforce_pp"],
    "dr_grpo": ["algorithm.preset=dr_grpo"],
    "flash_reinforce": ["algorithm.preset=flash_reinforce", *SINGLE],
    "ppo": ["algorithm.preset=ppo", *SINGLE, "critic.optimizer.lr=1e-3", "critic.optimizer.warmup_steps=10"],
    "lag8_corrected": [*STALE, "algorithm.correction=tis"],
    "lag8_uncorrected": [*STALE, "algorithm.correction=custom", "algorithm.correction_mode=none"],
}


def main() -> None:
    """Run what is missing, draw, and print when each run got there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*", default=list(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--again", action="store_true", help="also what was run before")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    curves: dict[str, dict[str, Any]] = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    for seed in arguments.seeds:
        for arm in arguments.arms:
            if arguments.again or str(seed) not in curves.get(arm, {}).get("seeds", {}):
                overrides = [f"train.num_updates={NUM_UPDATES}", "train.checkpoint_every=0", *ARMS[arm]]
                entry = curves.setdefault(arm, {"seeds": {}})
                entry["command"] = " ".join(["molt-train demo --seed SEED", *overrides])
                entry["seeds"][str(seed)] = run(overrides, seed=seed)
                CURVES.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    draw(curves, FOLDER)
    reached = {arm: {seed: when(curve["reward"]) for seed, curve in e["seeds"].items()} for arm, e in curves.items()}
    print(json.dumps({"benchmark": "learning", "goal": GOAL, "reached_in_update": reached}))


def run(overrides: list[str], *, seed: int) -> dict[str, list[float]]:
    """One run of the demo: its journal's series."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", "molt.train.cli", "demo", "--out", str(out), "--seed", str(seed), *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
        rows = read_journal(out / "metrics.jsonl")
    return {
        "reward": [round(row["reward_mean"], 4) for row in rows],
        "staleness": [round(row["staleness_mean"], 2) for row in rows],
        "ess": [round(row["effective_sample_size"], 4) for row in rows],
    }


def when(rewards: list[float]) -> int | None:
    """The first update whose mean reward, over it and the four before, is at the goal."""
    for end in range(SMOOTHED, len(rewards) + 1):
        if sum(rewards[end - SMOOTHED : end]) / SMOOTHED >= GOAL:
            return end
    return None


if __name__ == "__main__":
    main()
