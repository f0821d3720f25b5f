"""`molt-train demo`: build a small policy, warm it up, and train it with tools, all on the machine at hand."""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calculator import policy, tasks
from calculator.demonstrations import demonstrate
from molt.train.config import Config, check, load_config
from molt.train.launch.supervised import run_supervised
from molt.train.launch.training import run_training

HERE = Path(__file__).parent
NUM_DEMONSTRATIONS = 6000


def demo(out: Path, *, seed: int, overrides: Sequence[str], cache: Path) -> dict[str, Any]:
    """Train the calculator agent; everything about the run is left in `out`. Returns the run's summary.

    The warm policy is kept in `cache` and used again by runs of the same seed.
    """
    held_out_rows = [f"eval.path={out / 'held_out.jsonl'}", "eval.samples=2"]
    # A slip in the overrides must not cost a warm start.
    check(load_config(HERE / "config.toml", [*held_out_rows, *overrides], Config))
    training, held_out = tasks.expressions(seed)
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "tasks.jsonl", [tasks.row(expression) for expression in training])
    write_rows(out / "held_out.jsonl", [tasks.row(expression) for expression in held_out])
    paths = [
        f"model.path={warm_policy(training, seed=seed, cache=cache)}",
        f"data.path={out / 'tasks.jsonl'}",
        *held_out_rows,
        f"agent.path={HERE / 'agent.py'}",
        f"run.dir={out}",
        f"run.seed={seed}",
    ]
    return run_training(load_config(HERE / "config.toml", [*paths, *overrides], Config), local_workers=True)


def warm_policy(training: Sequence[tasks.Expression], *, seed: int, cache: Path) -> Path:
    """The policy after its supervised warm start, made unless `cache` holds it."""
    folder = cache / f"calculator-{seed}-{_fingerprint()}"
    warm = folder / "warm" / "model"
    if warm.is_dir():
        return warm
    cold = folder / "cold"
    cold.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    conversations = [demonstrate(rng.choice(training), rng) for _ in range(NUM_DEMONSTRATIONS)]
    policy.build_tokenizer(policy.render(conversations), cold)
    policy.build_model(cold, seed=seed)
    write_rows(folder / "demonstrations.jsonl", conversations)
    paths = [
        f"model.path={cold}",
        f"data.path={folder / 'demonstrations.jsonl'}",
        f"run.dir={folder / 'warm'}",
        f"run.seed={seed}",
    ]
    run_supervised(load_config(HERE / "sft.toml", paths, Config))
    return warm


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSONL, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


def _fingerprint() -> str:
    """Changes with whatever the warm policy is made from."""
    digest = hashlib.sha256()
    for name in ("agent.py", "demonstrations.py", "policy.py", "sft.toml", "tasks.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:12]
