"""Padding and stragglers of a laid out window, against random microbatches: `python -m benchmarks.window`.

Windows of 128 rows on 16 ranks, lengths lognormal with mean 5,100 and at most 18,400 tokens, microbatches of at most
20,480 tokens. Both layouts are of the program's own `lay_out`; the random one deals shuffled rows to the ranks, four to
a microbatch, padded to the longest. Each figure is the worst of the windows, and beside it their mean.

`padding_waste`: the part of the tokens in the microbatches that is padding. `unused_budget`: the part of the budgets of
the microbatches with rows that holds no token; packed rows need no padding, so this says how well they fill.
`straggler_ratio`: the cost of the slowest rank over the mean, padding included. `lockstep_ratio`: the same where ranks
also wait for each other after every microbatch, as sharded weights make them. Cost is the program's `row_cost`, for
hidden size 4,096. One JSON line; only `milliseconds`, to lay out one window, are measured by the clock.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from molt.train.records.experience import Experience
from molt.train.records.window import Row
from molt.train.window import WindowPlan, lay_out
from molt.train.window.assign import row_cost
from molt.train.window.pack import Layout

NUM_WINDOWS = 20
NUM_ROWS, NUM_RANKS = 128, 16
MEAN, SIGMA, LONGEST = 5_100, 0.6, 18_400
BUDGET = 20_480
RANDOM_ROWS = 4
"""Of a random microbatch."""

Ranks = list[list[list[int]]]
"""Lengths: rank by rank, microbatch by microbatch."""


def main() -> None:
    """Lay out the windows, and print the comparison."""
    figures: dict[str, list[dict[str, float]]] = {"packed": [], "padded": [], "random": []}
    for seed in range(NUM_WINDOWS):
        generator = np.random.default_rng(seed)
        tokens = lengths(generator)
        layouts: tuple[Layout, Layout] = ("packed", "padded")
        for layout in layouts:
            plan = WindowPlan(num_ranks=NUM_RANKS, microbatch_tokens=BUDGET, layout=layout)
            started = time.perf_counter()
            ranks = own(tokens, plan)
            spent = 1e3 * (time.perf_counter() - started)
            figures[layout].append(measure(ranks, is_packed=layout == "packed") | {"milliseconds": spent})
        figures["random"].append(measure(random(tokens, generator), is_packed=False))
    worst = {name: summary(windows, max) for name, windows in figures.items()}
    mean = {name: summary(windows, statistics.fmean) for name, windows in figures.items()}
    print(json.dumps({"benchmark": "window", **worst, "mean": mean}))


def lengths(generator: np.random.Generator) -> list[int]:
    """Tokens of each row of a window."""
    drawn = generator.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, NUM_ROWS)
    return [int(tokens) for tokens in np.clip(drawn, 16, LONGEST)]


def own(tokens: Sequence[int], plan: WindowPlan) -> Ranks:
    """As the program lays rows out."""
    (window,) = lay_out([[row(i, n) for i, n in enumerate(tokens)]], plan, step=1, policy_version=0)
    return [[[r.experience.num_tokens for r in microbatch.rows] for microbatch in rank] for rank in window.ranks]


def random(tokens: Sequence[int], generator: np.random.Generator) -> Ranks:
    """Shuffled, equally many rows a rank and a microbatch."""
    dealt = generator.permutation(tokens).reshape(NUM_RANKS, -1, RANDOM_ROWS)
    return dealt.tolist()


def measure(ranks: Ranks, *, is_packed: bool) -> dict[str, float]:
    """Waste and balance of one window."""
    microbatches = [microbatch for rank in ranks for microbatch in rank if microbatch]
    held = sum(sum(microbatch) for microbatch in microbatches)
    size = held if is_packed else sum(len(microbatch) * max(microbatch) for microbatch in microbatches)
    costs = [[cost(microbatch, is_packed=is_packed) for microbatch in rank] for rank in ranks]
    mean = statistics.fmean(sum(rank) for rank in costs)
    return {
        "padding_waste": 1 - held / size,
        "unused_budget": 1 - held / (len(microbatches) * BUDGET),
        "straggler_ratio": max(sum(rank) for rank in costs) / mean,
        "lockstep_ratio": sum(max(together) for together in zip(*costs, strict=True)) / mean,
        "microbatches_a_rank": len(ranks[0]),
    }


def cost(microbatch: Sequence[int], *, is_packed: bool) -> int:
    """Of one forward and backward pass; each row attends to itself only."""
    if is_packed:
        return sum(row_cost(tokens) for tokens in microbatch)
    return len(microbatch) * row_cost(max(microbatch)) if microbatch else 0


def summary(windows: Sequence[dict[str, float]], of: Callable[[list[float]], float]) -> dict[str, float]:
    """One number of each figure."""
    return {name: round(of([window[name] for window in windows]), 4) for name in windows[0]}


def row(index: int, num_tokens: int) -> Row:
    """A row of which only the length matters."""
    experience = Experience(
        segment_id=str(index),
        rollout_id=str(index),
        group_id="",
        num_tokens=num_tokens,
        num_actions=1,
        oldest_version=0,
        newest_version=0,
        mean_version=0.0,
        payload=None,
    )
    return Row(experience=experience, rollout=index, weight=1 / NUM_ROWS, advantages=np.zeros(1, np.float32))


if __name__ == "__main__":
    main()
