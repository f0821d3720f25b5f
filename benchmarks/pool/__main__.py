"""What a lease costs, and whether that stays so: `python -m benchmarks.pool`.

A cycle is a rollout leased, given its session and reported with what the session recorded: four turns of 300 tokens of
context and 200 sampled ones, and the segment that they make. The ledger is on disk as on a run (`pool.sync` "window");
every eight groups of eight rollouts an update consumes them, which forces all to disk. In one process, without HTTP.

`cycles_per_s`: of all rounds together. `cost_us`: of one cycle, by the clock, in ledgers that hold so many rollouts
already; the two take turns, so that what else the machine does falls on both, and the figure is the median round.
`cpu_us`: the same in time of the processor. `growth`: of both, from the small ledger to the large one. `rss_mb`: of a
process that has taken 32 rollouts, none of them consumed, whose payloads have so many bytes each and are written to
files, as Ray's store would keep them: what it holds afterwards, without what the allocator keeps for later, and its
peak, in which one recording is there as lists of numbers. One JSON line.
"""

import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.pool.load import Cycles, FilePayloads, conversation, fill

TURNS = (4, 300, 200)
SIZES = (1_000, 100_000)
NUM_ROUNDS, ROUND = 9, 256
"""Rounds, and cycles of one; a round has as many updates as any other."""
PAYLOADS = {"1KB": 1_000, "10MB": 10_000_000}
NUM_PAYLOADS = 32
TOKEN_BYTES = 13
"""Of a token in a payload: id, mask, log-prob, version."""


def main() -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as scratch:
        rounds = cycle_costs(Path(scratch))
    cost, cpu = (
        {size: statistics.median(costs[which] for costs in of_size) for size, of_size in rounds.items()}
        for which in (0, 1)
    )
    memory = {name: measured(size) for name, size in PAYLOADS.items()}
    report = {
        "benchmark": "pool",
        "cycles_per_s": round(1 / statistics.fmean(costs[0] for of_size in rounds.values() for costs in of_size)),
        "cost_us": {size: round(1e6 * seconds) for size, seconds in cost.items()},
        "cpu_us": {size: round(1e6 * seconds) for size, seconds in cpu.items()},
        "growth": {name: ratio(figures) for name, figures in (("cost", cost), ("cpu", cpu))},
        "rss_mb": memory,
        "rss_growth": {key: ratio({name: of[key] for name, of in memory.items()}) for key in ("held", "peak")},
    }
    print(json.dumps(report))


def ratio(figures: dict[Any, float]) -> float:
    """Of the last figure to the first."""
    first, last = figures.values()
    return round(last / first, 3)


def cycle_costs(folder: Path) -> dict[int, list[tuple[float, float]]]:
    """Seconds a cycle, by the clock and of the processor, round by round, in ledgers of each size."""
    turns = conversation(*TURNS)
    ledgers: dict[int, Iterator[None]] = {}
    for size in SIZES:
        fill(folder / str(size), size)
        ledgers[size] = Cycles(folder / str(size), lambda *_: ()).run((NUM_ROUNDS + 1) * ROUND, turns)
    costs: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for number in range(NUM_ROUNDS + 1):
        for size, cycles in ledgers.items():
            started, busy = time.perf_counter(), time.process_time()
            for _ in islice(cycles, ROUND):
                pass
            if number:  # the first fills the caches
                costs[size].append(((time.perf_counter() - started) / ROUND, (time.process_time() - busy) / ROUND))
    return costs


def measured(payload_bytes: int) -> dict[str, float]:
    """The memory of a process of its own that takes payloads of this size."""
    command = [sys.executable, "-m", "benchmarks.pool", str(payload_bytes)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def take_payloads(payload_bytes: int) -> dict[str, float]:
    """Take rollouts with payloads of this size, none consumed; returns memory afterwards, and its peak, in MB."""
    num_tokens = max(payload_bytes // TOKEN_BYTES, 2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = FilePayloads(folder / "store")
        cycles = Cycles(folder, store.experiences)
        turns = conversation(1, num_tokens // 2, num_tokens - num_tokens // 2)
        for _ in cycles.run(NUM_PAYLOADS - 1, turns):
            pass
        del turns
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        cycles.ledger.close()
    return {
        "held": round(pages * resource.getpagesize() / 1e6, 1),
        "peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(take_payloads(int(sys.argv[1]))))
    else:
        main()
